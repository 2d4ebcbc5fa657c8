"""Launch configurations of the Triton kernels: which block sizes and how many warps, by GPU, operator and size.

They stand in `launch.json` beside this file. A file named by the environment variable `REPLAY_TRANSFORMERS_LAUNCH`
adds to them; it is read once, at the first step.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from replay_transformers.kernels.launch_table import DEFAULT, OPERATORS, Entry, Launch, find, merge, read

__all__ = [
    "TABLE",
    "VARIABLE",
    "Launch",
    "choose",
    "gpu_name",
    "on_their_device",
    "override",
    "reload",
]

TABLE = Path(__file__).with_suffix(".json")
VARIABLE = "REPLAY_TRANSFORMERS_LAUNCH"

_overrides: dict[str, Launch] = {}


def choose(
    operator: str, device: torch.device, size: int, tokens: int, head_dim: int = 0, state_dim: int = 0
) -> Launch:
    """The configuration for a step, without waiting for the GPU.

    Args:
        operator: "mamba2", "gated_delta" or "causal_conv".
        size: rows times heads, or rows times channels for the convolution.
        tokens: of the step. head_dim, state_dim: of a head; the convolution has none.

    Raises:
        ValueError: an unknown operator, or the table that the environment names is bad.
    """
    if operator in _overrides:
        return _overrides[operator]
    return _chosen(gpu_name(device), operator, size, tokens, head_dim, state_dim)


def on_their_device(launch: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that launches kernels: Triton launches on the current device, wherever the tensors are."""

    @wraps(launch)
    def launched(first: torch.Tensor, *operands: Any, **settings: Any) -> torch.Tensor:
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return launch(first, *operands, **settings)
        with torch.cuda.device(first.device):
            return launch(first, *operands, **settings)

    return launched


@contextmanager
def override(operator: str, launch: Launch) -> Iterator[None]:
    """Within the block every step of ``operator`` is launched like this, in all threads.

    Raises:
        ValueError: an unknown operator.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    before = _overrides.get(operator)
    _overrides[operator] = launch
    try:
        yield
    finally:
        if before is None:
            del _overrides[operator]
        else:
            _overrides[operator] = before


def reload() -> None:
    """Read the tables again at the next step."""
    _table.cache_clear()
    _chosen.cache_clear()


@cache
def gpu_name(device: torch.device) -> str:
    """The name by which the table knows the device; "default" for a CPU (Triton's interpreter)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else DEFAULT


@cache
def _table() -> list[Entry]:
    entries, path = read(TABLE), os.environ.get(VARIABLE)
    return merge(entries, read(Path(path))) if path else entries


@cache
def _chosen(gpu: str, operator: str, size: int, tokens: int, head_dim: int, state_dim: int) -> Launch:
    return find(_table(), gpu, operator, size, tokens, head_dim, state_dim)
