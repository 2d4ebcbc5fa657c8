"""Results first: every kernel is compared in float64 before it is timed."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from replay_transformers.kernels.formats import StoredState
from replay_transformers.kernels.formats.rounding import LOW, philox
from replay_transformers.kernels.formats.stored import State, readable

from .eager import EAGER, NORM_EPSILON, EagerOperator, Tile
from .operators import OPERANDS, ReplayLayer, Tensors

# Largest error relative to the largest value. float32: many sums of rounded products. The narrow ones: one rounding of
# the result, or a truncation in Triton's interpreter.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Of the values of a head in a format of few bits, so many may be rounded to the other side: they lie so close to the
# middle of two numbers that the last bits of the sum decide.
OTHER_SIDE = 0.03


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

    The reference computes in float64 and reads the same bytes. Rows that are due are among those compared. The layer's
    rings are as before afterwards; its states are not if the cursor folds.
    """
    before = {key: ring.clone() for key, ring in layer.rings.items()}
    try:
        rows = _rows_to_check(cursor)
        if "ring_d" in layer.rings:
            _derive(layer, cursor, rows)
        _poison(layer, cursor)
        operands = [x[rows].double() if x.ndim > 1 else x.double() for x in layer.operands]
        rings = {key: ring[rows].double() for key, ring in layer.rings.items()}
        states = {key: _rows_of(state, rows, cursor) for key, state in layer.states.items()}
        if isinstance(states["state"], torch.Tensor) and len(states) == 1:
            states["state"] = states["state"].double()
        places = {key: tensor if tensor is None else tensor[rows] for key, tensor in cursor.items()}
        want = reference(*operands, **states, **rings, **layer.settings, **places)
        got = step(*layer.operands, **layer.buffers, **layer.settings, **cursor)
        compare(f"{name}: output", got[rows], want)
        for key, ring in layer.rings.items():
            compare(f"{name}: {key}", ring[rows], rings[key])
        for key, state in layer.states.items():
            if isinstance(state, torch.Tensor) and isinstance(layer.states["state"], torch.Tensor):
                compare(f"{name}: {key}", state[rows], _decoded(states[key]))
            else:
                due = torch.zeros_like(rows) if cursor["folds"] is None else cursor["folds"][rows]
                _compare_stored(f"{name}: {key}", state, states[key], rows, due > 0)
    finally:
        for key, ring in before.items():
            layer.rings[key].copy_(ring)


def _rows_to_check(cursor: dict[str, Any]) -> torch.Tensor:
    """Some rows, among them such as are due, in order."""
    rows = sample_rows(cursor["base"].shape[0], cursor["base"].device)
    if cursor["folds"] is not None:
        due = cursor["folds"].nonzero()[:, 0]
        rows = torch.cat([rows, due[:1], due[-1:]]).unique()
    return rows


def _rows_of(state: State, rows: torch.Tensor, cursor: dict[str, Any] | None = None) -> State:
    """Copies of these rows. Given the cursor, its fold rounds them by the random bits of their place in ``state``."""
    if isinstance(state, torch.Tensor):
        return state[rows]
    few = state.with_parts({name: part[rows] for name, part in state.parts.items()})
    if cursor is not None and cursor["folds"] is not None and state.format.is_stochastic:
        bits = _bits(state, rows, (cursor["base"] + cursor["folds"])[rows])
        few.format = copy.copy(state.format)
        few.format.encode = lambda values, _: state.format.encode(values, bits)  # type: ignore[assignment]
    return few


def _bits(state: StoredState, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As `state_bits` has them for these rows of the whole batch."""
    heads, channels = state.parts["values"].shape[1:3]
    element = torch.arange(channels * state.states, device=rows.device).view(channels, state.states)
    place = (rows[:, None] * heads + torch.arange(heads, device=rows.device))[..., None, None]
    position = positions.view(-1, 1, 1, 1)
    return philox((element, place, position & LOW, position >> 32), state.key)[0]


def _decoded(state: State) -> torch.Tensor:
    return readable(state, torch.float64)


def _compare_stored(name: str, got: State, want: State, rows: torch.Tensor, due: torch.Tensor) -> None:
    """Compare decoded states; rows that are not due must have kept their bytes, which ``want`` has.

    Raises:
        WrongResultError: values further apart than neighbours of the format, or more than `OTHER_SIDE` of a head's
            values that differ.
    """
    got = _rows_of(got, rows)
    pairs = (
        [(got.parts[part], want.parts[part]) for part in got.parts]
        if isinstance(got, StoredState) and isinstance(want, StoredState)
        else [(_decoded(got), _decoded(want))]
    )
    if not all(torch.equal(mine[~due], theirs[~due]) for mine, theirs in pairs):
        raise WrongResultError(f"{name}: written in a row that is not due")
    mine, theirs = _decoded(got)[due], _decoded(want)[due]
    if not len(mine):
        return
    difference, scale = (mine - theirs).abs(), theirs.abs().max()
    if not difference.max() <= scale / 2:
        raise WrongResultError(f"{name}: {float(difference.max() / scale):.1e} of the largest value apart")
    tolerance = TOLERANCES[got.dtype if isinstance(got, torch.Tensor) else torch.float32]
    apart = float((difference > tolerance * scale).double().mean((-2, -1)).max())
    if apart > OTHER_SIDE:
        raise WrongResultError(f"{name}: {apart:.1%} of a head's values differ, allowed {OTHER_SIDE:.0%}")


def check_update(kind: str, update: Callable[..., torch.Tensor], layer: ReplayLayer) -> None:
    """Run one token on ``layer`` and compare; changes the layer's state."""
    state = layer.states["state"]
    assert isinstance(state, torch.Tensor)
    rows = sample_rows(state.shape[0], state.device)
    inputs = {name: x[rows, 0] if x.ndim > 1 else x for name, x in zip(OPERANDS[kind], layer.operands, strict=True)}
    want, after = EAGER[kind].plain(state=state[rows], **inputs)
    got = update(*layer.operands, state=state)
    compare("update: output", got[rows, 0], want)
    compare("update: state", state[rows], after)


def _derive(layer: ReplayLayer, cursor: dict[str, Any], rows: torch.Tensor) -> None:
    """Give the records of these rows the ``d`` that follows from their inputs and the state that steps read.

    A row that is due may be read before its fold, with ``d``, or after it, from the inputs alone.
    """
    inputs = [layer.rings[name][rows].double() for name in ("ring_k", "ring_v", "ring_g", "ring_beta")]
    state = _decoded(_rows_of(layer.states.get("readout", layer.states["state"]), rows))
    base, live = cursor["base"][rows], (cursor["committed"] + cursor["pending"])[rows]
    ring = layer.rings["ring_d"]
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
    for ring in layer.rings.values():
        slots = torch.arange(ring.shape[2], device=ring.device)
        age = torch.remainder(slots - cursor["base"][:, None], ring.shape[2])
        ring.masked_fill_((age >= live).view(*age.shape[:1], 1, -1, *[1] * (ring.ndim - 3)), float("nan"))
