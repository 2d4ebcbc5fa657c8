"""What the tuner times: calls of one operator in the steady state of decoding, and a check of their results."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from replay_transformers.cursor import SPREAD_ROWS
from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.formats import FORMATS

from . import operators
from .checks import check_replay, compare, sample_rows
from .kernel_cells import MOST_LAYERS, PAST_THE_CACHE, layer_count, rotated_steps
from .precision_grid import Setting
from .timing import Call, cache_bytes

WEIGHT_SCALE = 0.5


@dataclass(frozen=True)
class Settings:
    """What is the same in all cases.

    Args:
        window: flush window.
        checkpoint: format of the state. activations: dtype of everything else.
    """

    device: torch.device
    window: int = 16
    checkpoint: str = "float32"
    activations: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Workload:
    """Calls over buffers that together do not fit into a cache; ``check`` raises `WrongResultError`."""

    calls: list[Call]
    check: Callable[[], None]


def make_workload(
    operator: str, geometry: LayerGeometry, rows: int, tokens: int, settings: Settings, copies: int | None = None
) -> Workload:
    """Steps of ``tokens`` tokens. ``copies`` of the layer; by default enough to be past the L2 cache."""
    make = _convolution if operator == "causal_conv" else _replay_step
    return make(geometry, rows, tokens, settings, copies)


def steady_cursors(rows: int, window: int, device: torch.device) -> list[dict[str, torch.Tensor | None]]:
    """Rows in all phases of the window, one in ``window`` folding; small batches halfway, and no row due."""
    if rows >= SPREAD_ROWS:
        return operators.spread_cursors(rows, window, device)
    middle = torch.full((rows,), window // 2, device=device)
    return [operators.cursor(middle, torch.zeros_like(middle))]


def _replay_step(geometry: LayerGeometry, rows: int, tokens: int, settings: Settings, copies: int | None) -> Workload:
    folder, device, window = f"replay_transformers.kernels.{geometry.kind}", settings.device, settings.window
    kernel = importlib.import_module(f"{folder}.triton").replay_step
    reference = importlib.import_module(f"{folder}.reference").replay_step
    step = functools.partial(kernel, max_records=window)
    layers = [
        operators.replay_layer(
            geometry, rows, tokens, capacity=operators.ring_capacity(window, tokens),
            dtype=settings.activations, precision=Setting(settings.checkpoint), device=device,
        )
        for _ in range(copies or layer_count(geometry, rows, FORMATS[settings.checkpoint], device))
    ]  # fmt: skip
    cursors = steady_cursors(rows, window, device)
    calls = rotated_steps(step, layers, cursors)
    return Workload(calls, lambda: check_replay(geometry.kind, step, reference, layers[0], cursors[0]))


def _convolution(geometry: LayerGeometry, rows: int, tokens: int, settings: Settings, copies: int | None) -> Workload:
    folder, device, dtype = "replay_transformers.kernels.causal_conv", settings.device, settings.activations
    kernel = importlib.import_module(f"{folder}.triton").conv_step
    reference = importlib.import_module(f"{folder}.reference").conv_step
    channels, taps = geometry.conv_dim, geometry.conv_kernel
    slots = operators.ring_capacity(settings.window, tokens) + taps - 1
    weight = torch.randn(channels, taps, device=device).mul_(WEIGHT_SCALE).to(dtype)
    bias = torch.randn(channels, device=device).to(dtype) if geometry.kind == "mamba2" else None
    position = torch.randint(operators.LARGEST_POSITION, (rows,), device=device)
    touched = rows * channels * (taps - 1 + 2 * tokens) * dtype.itemsize
    copies = copies or min(MOST_LAYERS, max(2, -(-PAST_THE_CACHE * cache_bytes(device) // touched)))

    def layer() -> dict[str, Any]:
        inputs, ring = (torch.randn(rows, length, channels, device=device).to(dtype) for length in (tokens, slots))
        return {"inputs": inputs, "weight": weight, "bias": bias, "ring": ring, "position": position}

    layers = [layer() for _ in range(copies)]
    return Workload(
        [functools.partial(kernel, **tensors) for tensors in layers],
        functools.partial(_check_convolution, kernel, reference, layers[0]),
    )


def _check_convolution(kernel: Callable[..., Any], reference: Callable[..., Any], layer: dict[str, Any]) -> None:
    rows = sample_rows(layer["position"].shape[0], layer["position"].device)
    bias = None if layer["bias"] is None else layer["bias"].double()
    inputs, ring = layer["inputs"][rows].double(), layer["ring"][rows].double()
    want = reference(inputs, layer["weight"].double(), bias, ring=ring, position=layer["position"][rows])
    compare("convolution", kernel(**layer)[rows], want)
    compare("convolution's ring", layer["ring"][rows], ring)
