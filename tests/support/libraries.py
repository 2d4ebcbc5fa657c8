"""The libraries that scan prompts on a GPU, in a process of its own: the tests' own one leaves them out."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

import torch

from replay_transformers.implementation import LIBRARIES

SOURCES = "MAMBA_SSM"  # names the folder mamba_ssm of mamba-ssm's sources, where it is not installed
TRIES = 5
# rows, tokens, heads; many: mamba-ssm would count beyond 2^31, flash-linear-attention launch beyond 65,535 programs
FEW, MANY = (2, 200, 8), {"mamba2": (2240, 16, 96), "gated_delta": (2080, 16, 32)}


def is_there(operator: str) -> bool:
    """Whether its library can be found."""
    if operator == "mamba2" and os.environ.get(SOURCES):
        return True
    name = LIBRARIES[operator]
    # left out in this process (None), it may still be there in another one
    return name in sys.modules or importlib.util.find_spec(name) is not None


def scan_errors(operator: str, device: str, *, many: bool = False) -> list[tuple[float, float]] | None:
    """Of outputs and states after a prompt, in several tries, relative to the reference in float32; None without it.

    The tensors are on ``device``, and the first GPU is the current one. ``many``: one try with more rows than the
    library can take at once; the first and the last are looked at.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_scan_errors, (operator, device, many))


def _scan_errors(operator: str, device: str, many: bool) -> list[tuple[float, float]] | None:
    if operator == "mamba2" and (folder := os.environ.get(SOURCES)):
        importlib.import_module("scripts.benchmarks.stock").provide_mamba_ssm(Path(folder))
    if importlib.util.find_spec(LIBRARIES[operator]) is None:
        return None
    kernels = f"replay_transformers.kernels.{operator}"
    library, reference = (importlib.import_module(f"{kernels}.{name}") for name in ("library", "reference"))
    torch.manual_seed(0)
    errors = []
    shape = MANY[operator] if many else FEW
    for _ in range(1 if many else TRIES):
        operands, state = _operands(operator, torch.device(device), *shape)
        ends = [0, len(state) - 1]
        wide = [operand[ends].float() if operand.dim() > 1 else operand for operand in operands]
        want_state = state[ends]
        want = reference.update(*wide, state=want_state)
        got = library.update(*operands, state=state)
        assert torch.cuda.current_device() == 0
        errors.append((_error(got[ends], want), _error(state[ends], want_state)))
    return errors


def _operands(
    operator: str, device: torch.device, rows: int, tokens: int, heads: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """In bfloat16 but for decays, and a state; heads as in the released models."""
    groups, states = heads // 4, 128
    channels = 128 if operator == "gated_delta" else 80

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, tokens, *shape, device=device).bfloat16()

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.empty(rows, tokens, heads, device=device).uniform_(low, high)

    if operator == "gated_delta":
        state = torch.randn(rows, heads, states, channels, device=device)
        values = normal(groups, states), normal(groups, states), normal(heads, channels)
        return [*values, uniform(-0.1, 0), uniform(0, 1).bfloat16()], state
    state = torch.randn(rows, heads, channels, states, device=device)
    rates = -torch.rand(heads, device=device)
    inputs = normal(heads, channels), uniform(0.01, 0.1), normal(groups, states), normal(groups, states)
    return [*inputs, rates, torch.rand(heads, device=device)], state


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())
