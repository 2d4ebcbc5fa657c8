"""Results first: every kernel is compared in float64 before it is timed."""

from collections.abc import Callable
from typing import Any

import torch

from .eager import EAGER, NORM_EPSILON, EagerOperator, Tensors, Tile
from .operators import OPERANDS, ReplayLayer

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

    Rows that are due are among those compared. The layer's rings are as before afterwards; its state is not if the
    cursor folds.
    """
    rings = {key: ring.clone() for key, ring in layer.buffers.items() if key != "state"}
    try:
        rows = sample_rows(cursor["base"].shape[0], cursor["base"].device)
        if cursor["folds"] is not None:
            due = cursor["folds"].nonzero()[:, 0]
            rows = torch.cat([rows, due[:1], due[-1:]]).unique()
        if "ring_d" in layer.buffers:
            _derive(layer, cursor, rows)
        _poison(layer, cursor)
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


def check_update(kind: str, update: Callable[..., torch.Tensor], layer: ReplayLayer) -> None:
    """Run one token on ``layer`` and compare; changes the layer's state."""
    state = layer.buffers["state"]
    rows = sample_rows(state.shape[0], state.device)
    inputs = {name: x[rows, 0] if x.ndim > 1 else x for name, x in zip(OPERANDS[kind], layer.operands, strict=True)}
    want, after = EAGER[kind].plain(state=state[rows], **inputs)
    got = update(*layer.operands, state=state)
    compare("update: output", got[rows, 0], want)
    compare("update: state", state[rows], after)


def _derive(layer: ReplayLayer, cursor: dict[str, Any], rows: torch.Tensor) -> None:
    """Give the records of these rows the ``d`` that follows from their inputs and the checkpoint.

    A row that is due may be read before its fold, with ``d``, or after it, from the inputs alone.
    """
    names = ("state", "ring_k", "ring_v", "ring_g", "ring_beta")
    state, *inputs = (layer.buffers[name][rows].double() for name in names)
    base, live = cursor["base"][rows], (cursor["committed"] + cursor["pending"])[rows]
    ring = layer.buffers["ring_d"]
    repeats, every = ring.shape[1] // inputs[0].shape[1], torch.arange(len(rows), device=rows.device)
    for age in range(int(live.max())):  # beyond the last record of a row: slots that are poisoned afterwards
        slot = (base + age) % ring.shape[2]
        k, v, g, beta = (records[every, :, slot] for records in inputs)
        k = (k / (k.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt()).repeat_interleave(repeats, dim=1)[..., None]
        state = state * g.exp()[..., None, None]
        delta = (v - (state * k).sum(-2)) * beta[..., None]
        state = state + k * delta[:, :, None]
        ring[rows, :, slot] = delta.to(ring.dtype)


def _poison(layer: ReplayLayer, cursor: dict[str, Any]) -> None:
    live = (cursor["committed"] + cursor["pending"])[:, None]
    for key, ring in layer.buffers.items():
        if key != "state":
            slots = torch.arange(ring.shape[2], device=ring.device)
            age = torch.remainder(slots - cursor["base"][:, None], ring.shape[2])
            ring.masked_fill_((age >= live).view(*age.shape[:1], 1, -1, *[1] * (ring.ndim - 3)), float("nan"))
