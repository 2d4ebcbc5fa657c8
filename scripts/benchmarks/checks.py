"""Results first: every kernel is compared in float64 before it is timed."""

from collections.abc import Callable
from typing import Any

import torch

from .eager import EagerOperator, Tensors, Tile
from .operators import ReplayLayer

# Largest error relative to the largest value. float32: many sums of rounded products. The narrow ones: one rounding of
# the result, or a truncation in Triton's interpreter.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class WrongResultError(Exception):
    """A kernel disagrees with its reference: no time is worth printing."""


def compare(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise `WrongResultError` unless ``got`` equals the float64 tensor ``want`` up to its dtype's tolerance."""
    dead = torch.isnan(want)
    if not torch.equal(torch.isnan(got), dead):
        raise WrongResultError(f"{name}: NaN in other places than in the reference")
    difference = (got.double() - want).masked_fill(dead, 0).abs().max()
    error = float(difference / want.masked_fill(dead, 0).abs().max().clamp_min(1e-30))
    if not error <= TOLERANCES[got.dtype]:
        raise WrongResultError(f"{name}: relative error {error:.1e}, allowed {TOLERANCES[got.dtype]:.0e}")


def sample_rows(rows: int, device: torch.device) -> torch.Tensor:
    """The first, a middle and the last row."""
    return torch.tensor(sorted({0, rows // 2, rows - 1}), device=device)


def check_eager(operator: EagerOperator, tile: Tile, layer: Tensors) -> None:
    """Run one token on ``layer`` and compare; changes the layer's state."""
    rows = sample_rows(layer["state"].shape[0], layer["state"].device)
    inputs = {name: tensor[rows] if tensor.ndim > 1 else tensor for name, tensor in layer.items() if name != "y"}
    output, state = operator.plain(**inputs)
    operator.update(tile, **layer)
    compare(f"eager output, {tile}", layer["y"][rows], output)
    compare(f"eager state, {tile}", layer["state"][rows], state)


def check_replay(
    name: str, step: Callable[..., Any], reference: Callable[..., Any], layer: ReplayLayer, cursor: dict[str, Any]
) -> None:
    """Run one step on ``layer`` and compare the output and everything it may write, with NaN in all dead slots.

    The layer's rings are as before afterwards; its state is not if the cursor folds.
    """
    rings = {key: ring.clone() for key, ring in layer.buffers.items() if key != "state"}
    try:
        _poison(layer, cursor)
        rows = sample_rows(cursor["base"].shape[0], cursor["base"].device)
        operands = [x[rows].double() if x.ndim > 1 else x.double() for x in layer.operands]
        buffers = {key: tensor[rows].double() for key, tensor in layer.buffers.items()}
        places = {key: tensor if tensor is None else tensor[rows] for key, tensor in cursor.items()}
        want = reference(*operands, **buffers, **places)
        got = step(*layer.operands, **layer.buffers, **cursor)
        compare(f"{name}: output", got[rows], want)
        for key, tensor in layer.buffers.items():
            compare(f"{name}: {key}", tensor[rows], buffers[key])
    finally:
        for key, ring in rings.items():
            layer.buffers[key].copy_(ring)


def _poison(layer: ReplayLayer, cursor: dict[str, Any]) -> None:
    live = (cursor["committed"] + cursor["pending"])[:, None]
    for key, ring in layer.buffers.items():
        if key != "state":
            slots = torch.arange(ring.shape[2], device=ring.device)
            age = torch.remainder(slots - cursor["base"][:, None], ring.shape[2])
            ring.masked_fill_((age >= live).view(*age.shape[:1], 1, -1, *[1] * (ring.ndim - 3)), float("nan"))
