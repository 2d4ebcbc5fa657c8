"""One step of a Triton kernel beside its reference, on rows of any cursor; and how close is close enough.

Without a GPU the kernels run in Triton's interpreter (`tests/conftest.py` switches it on), with one they run on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from replay_transformers.kernels.causal_conv import triton as causal_conv
from replay_transformers.kernels.gated_delta import triton as gated_delta
from replay_transformers.kernels.mamba2 import triton as mamba2
from tests.support.operators import (
    GATED_DELTA,
    MAMBA2,
    GatedDelta,
    Geometry,
    Mamba2,
    Operator,
    Tensors,
    cursor,
    join,
    part,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
KERNELS: dict[str, ModuleType] = {"mamba2": mamba2, "gated_delta": gated_delta, "causal_conv": causal_conv}
NAN = float("nan")
TOLERATED = 2.0  # times the reference's own error: two orders of summation of the same terms differ, at random


def with_triton(operator: Operator) -> Operator:
    """The operator with its steps in Triton; folds and scans are the reference's."""
    kernel: Any = SimpleNamespace(**vars(operator.kernel) | {"replay_step": KERNELS[operator.name].replay_step})
    return {"mamba2": Mamba2, "gated_delta": GatedDelta}[operator.name](kernel)


def last_places(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One unit in the last place of ``dtype`` at each value (float64)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def assert_as_good(got: torch.Tensor, exact: torch.Tensor, reference: torch.Tensor, *others: torch.Tensor) -> None:
    """Norm of the error against float64 at most `TOLERATED` times the reference's own.

    In Triton's interpreter, which truncates what it stores as bfloat16 instead of rounding to nearest, one unit in the
    last place of each value in the stored dtype on top. On a GPU nothing on top, but the reference can be nearly exact
    by luck, in tensors of few heads above all, where one exponential is in many values: there its error counts as the
    others' at least, and as one unit in the last place of the largest value in float32. Where it is exact, one unit of
    each value is allowed.
    """
    assert all(got.shape == other.shape for other in (exact, reference, *others))
    assert all(got.dtype == other.dtype for other in (reference, *others))
    own, *theirs = ((other.double() - exact).norm().item() for other in (reference, *others))
    unit = last_places(exact, got.dtype).norm().item()
    if INTERPRETED:
        bound = TOLERATED * own + unit
    else:
        least = last_places(exact.abs().max(), torch.float32).item() * exact.numel() ** 0.5
        bound = max(TOLERATED * max(own, *theirs, least), unit if own == 0 else 0.0)
    error = (got.double() - exact).norm().item()
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}, the reference's own {own:.3g}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: NaN equals itself, -0.0 does not equal 0.0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


@dataclass
class Result:
    """What a step returned and what it left in the buffers."""

    output: torch.Tensor
    buffers: Tensors


@dataclass
class Case:
    """Everything one call of `replay_step` takes.

    ``exact`` holds the same buffers in float64, the derived ``ring_d`` before it was rounded. The first tokens of
    ``history`` are the live records.
    """

    operator: Operator
    tokens: Tensors
    parameters: dict[str, Any]
    buffers: Tensors
    exact: Tensors
    position: Tensors
    folds: torch.Tensor | None
    history: Tensors
    max_records: int | None = None

    @property
    def count(self) -> int:
        """Tokens per row."""
        return next(iter(self.tokens.values())).shape[1]

    def run(self, kernel: Any, buffers: Tensors | None = None, tokens: Tensors | None = None) -> Result:
        """One step of ``kernel`` on copies of the buffers."""
        buffers = {name: tensor.clone() for name, tensor in (buffers or self.buffers).items()}
        operands = [*(tokens or self.tokens).values(), *self.parameters.values()]
        with torch.no_grad():
            output = kernel.replay_step(
                *operands, **buffers, **self.position, folds=self.folds, max_records=self.max_records
            )
        return Result(output, buffers)

    def triton(self) -> Result:
        """The Triton kernel's."""
        return self.run(KERNELS[self.operator.name])

    def reference(self) -> Result:
        """The reference's."""
        return self.run(self.operator.kernel)

    def truth(self) -> Result:
        """The reference's in float64."""
        wide: dict[str, Any] = {n: None if t is None else t.double() for n, t in self.parameters.items()}
        tokens = {name: tensor.double() for name, tensor in self.tokens.items()}
        return replace(self, parameters=wide).run(self.operator.kernel, self.exact, tokens)

    def eager(self) -> Result:
        """Output and folded state by the plain float32 recurrence, stored as the kernel stores them."""
        count = self.position["committed"] + self.position["pending"]
        folded = torch.zeros_like(count) if self.folds is None else self.folds
        outputs, states = [], []
        for row in range(len(count)):
            seen, old = (part(_row(self.history, row), 0, int(n[row])) for n in (count, folded))
            before = (self.parameters, self.buffers["state"][row : row + 1], torch.float32)
            outputs.append(self.operator.oracle(join(seen, _row(self.tokens, row)), *before)[0][:, -self.count :])
            states.append(self.operator.oracle(old, *before)[1])
        dtype = next(iter(self.tokens.values())).dtype
        return Result(torch.cat(outputs).to(dtype), {"state": torch.cat(states).to(self.buffers["state"].dtype)})

    def slots(self) -> torch.Tensor:
        """bool ``[rows, capacity]``: slots of live records."""
        return self._mask(0, self.position["committed"] + self.position["pending"])

    def new_slots(self) -> torch.Tensor:
        """bool ``[rows, capacity]``: slots that the step writes."""
        return self._mask(self.position["committed"] + self.position["pending"], self.count)

    def _mask(self, first: torch.Tensor | int, length: torch.Tensor | int) -> torch.Tensor:
        capacity = self.buffers[self.operator.ring_names[0]].shape[2]
        slot = torch.arange(capacity, device=DEVICE)
        age = torch.remainder(slot - (self.position["base"] + first)[:, None], capacity)
        return age < (length[:, None] if isinstance(length, torch.Tensor) else length)


def _row(tokens: Tensors, row: int) -> Tensors:
    return {name: tensor[row : row + 1] for name, tensor in tokens.items()}


def slot_mask(mask: torch.Tensor, ring: torch.Tensor) -> torch.Tensor:
    """``[rows, capacity]`` -> the shape of a ring ``[rows, heads, capacity, ...]``."""
    return mask.view(mask.shape[0], 1, mask.shape[1], *[1] * (ring.ndim - 3)).expand_as(ring)


def make_case(
    operator: Operator,
    geometry: Geometry,
    count: int = 1,
    *,
    committed: tuple[int, ...] = (5, 2),
    pending: tuple[int, ...] = (0, 3),
    base: tuple[int, ...] = (),
    folds: list[int] | None = None,
    capacity: int | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    log_decay: float | None = None,
) -> Case:
    """A step of ``count`` tokens on records that an exact step appended; every dead slot holds NaN.

    Args:
        committed, pending: per row. base: per row; by default the first row's records run over the end of the ring,
            and the second row's positions are no 32-bit integers.
        folds: per row, or None. capacity: as small as it may be by default.
        dtype: of the activations. log_decay: of every token and head; random by default.
    """
    rows, records = len(committed), [c + p for c, p in zip(committed, pending, strict=True)]
    capacity = capacity or max(records) + count
    start = [*base, *(1000 * capacity - 2 if row % 2 == 0 else 2**33 + 1 + row for row in range(len(base), rows))]
    parameters = operator.parameters(geometry, dtype)
    history, tokens = (operator.draw(rows, n, geometry, dtype) for n in (max(records), count))
    parameters, history, tokens = (on_device(tensors) for tensors in (parameters, history, tokens))
    if log_decay is not None:
        for drawn in (history, tokens):
            drawn[operator.log_decay].fill_(log_decay)
            if "A" in parameters:
                drawn["dt"] /= parameters["A"]
    state = torch.randn(rows, *operator.state_shape(geometry), device=DEVICE).to(state_dtype)
    exact = {"state": state.double(), **operator.rings({n: t.double() for n, t in tokens.items()}, capacity)}
    origin = on_device(cursor(start, [0] * rows, [0] * rows))
    wide: Any = {name: tensor.double() for name, tensor in parameters.items()}
    case = Case(operator, {n: t.double() for n, t in history.items()}, wide, exact, exact, origin, None, history)
    if max(records):
        exact = case.run(operator.kernel).buffers
    position = on_device(cursor(start, list(committed), list(pending)))
    counts = None if folds is None else torch.tensor(folds, device=DEVICE)
    buffers = {"state": state, **operator.rings(tokens, capacity)}
    case = Case(operator, tokens, {**parameters}, buffers, exact, position, counts, history)
    for name, ring in buffers.items():
        if name != "state":
            exact[name].masked_fill_(~slot_mask(case.slots(), ring), NAN)
            ring.copy_(exact[name])
    return case


def on_device(tensors: Tensors) -> Tensors:
    """Copies on `DEVICE`."""
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def check_case(case: Case) -> Result:
    """The Triton kernel is as good as the reference, and touches no byte that it need not write."""
    got, reference, eager, exact = case.triton(), case.reference(), case.eager(), case.truth()
    assert exact.output.isfinite().all()
    assert_as_good(got.output, exact.output, reference.output, eager.output)
    state, before = got.buffers["state"], case.buffers["state"]
    due = torch.zeros(state.shape[0], dtype=torch.bool, device=DEVICE) if case.folds is None else case.folds > 0
    assert torch.equal(bits(state)[~due], bits(before)[~due])
    if due.any():
        assert_as_good(*(result.buffers["state"][due] for result in (got, exact, reference, eager)))
    for name in case.buffers:
        if name == "state":
            continue
        ring, new = got.buffers[name], slot_mask(case.new_slots(), got.buffers[name])
        assert torch.equal(bits(ring)[~new], bits(case.buffers[name])[~new]), f"{name}: a slot of no new record changed"
        if name == "ring_d":
            assert_as_good(ring[new], exact.buffers[name][new], reference.buffers[name][new])
        else:
            assert torch.equal(bits(ring)[new], bits(reference.buffers[name])[new]), f"{name}: a record was changed"
    return got


def from_projection(tokens: Tensors) -> Tensors:
    """The same tokens as slices of one tensor per dtype ``[rows, T, channels]``, as a mixer splits its projection."""
    views: Tensors = {}
    for dtype in {tensor.dtype for tensor in tokens.values()}:
        names = [name for name, tensor in tokens.items() if tensor.dtype == dtype]
        flat = [tokens[name].flatten(2) for name in names]
        joined = torch.cat([*flat, torch.full_like(flat[0], NAN)], dim=-1)
        pieces = joined.split([*(piece.shape[-1] for piece in flat), flat[0].shape[-1]], dim=-1)
        views |= {n: p.unflatten(-1, tokens[n].shape[2:]) for n, p in zip(names, pieces, strict=False)}
    return {name: views[name] for name in tokens}


def spaced(tokens: Tensors) -> Tensors:
    """The same tokens in every other place of memory, time first: no stride is 1."""
    views = {}
    for name, tensor in tokens.items():
        wide = torch.stack([tensor, torch.full_like(tensor, NAN)], dim=-1)
        views[name] = wide.transpose(0, 1).contiguous().transpose(0, 1)[..., 0]
    return views


OPERATORS_IN_TRITON = pytest.mark.parametrize("operator", [MAMBA2, GATED_DELTA], ids=str)
