"""A step on a state in any format, with or without a copy that is read, in Triton beside the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replay_transformers.kernels.formats import FORMATS, PlainFormat, StoredState
from replay_transformers.kernels.formats.stored import State, readable
from tests.support.kernels import INTERPRETED, KERNELS, Case, Result, assert_as_good, bits
from tests.support.operators import Operator

KEY = 5 << 32 | 11
PRECISIONS = [
    ("float32", "bfloat16"), ("float32", "float16"), ("float32", "fp8"), ("float32", "nvfp4"), ("bfloat16", "fp8"),
    ("fp8", None), ("fp8_sr", None), ("float16_sr", None), ("nvfp4", None), ("fp8", "nvfp4"), ("nvfp4", "bfloat16"),
]  # fmt: skip
EVERY_PRECISION = pytest.mark.parametrize(
    ("checkpoint", "readout"), PRECISIONS, ids=[f"{c}-{r}" for c, r in PRECISIONS]
)


def stored(name: str, values: torch.Tensor, operator: Operator) -> State:
    """A state in a format of that name; values in transformers' layout."""
    form, is_transposed = FORMATS[name], operator.name == "gated_delta"
    if isinstance(form, PlainFormat):
        return values.to(form.dtype)
    rows, heads = values.shape[:2]
    channels, states = values.shape[:1:-1] if is_transposed else values.shape[2:]
    parts = {
        part: torch.zeros(rows, heads, *shape, dtype=dtype, device=values.device)
        for part, (shape, dtype) in form.parts(channels, states).items()
    }
    state = StoredState(form, parts, states, is_transposed, KEY)
    state.write(values, torch.zeros(rows, dtype=torch.int64, device=values.device))
    return state


def clone(state: State | None) -> Any:
    """A copy in memory of its own."""
    if isinstance(state, StoredState):
        return state.with_parts({name: part.clone() for name, part in state.parts.items()})
    return None if state is None else state.clone()


def part_rows(state: State | None, rows: torch.Tensor) -> Any:
    """These rows of a state (int64 ``[n]``), in memory of their own."""
    if isinstance(state, StoredState):
        return state.with_parts({name: part.index_select(0, rows) for name, part in state.parts.items()})
    return None if state is None else state.index_select(0, rows)


class Precise:
    """A case whose state is stored in some format, beside a copy that is read.

    The copy is of another state than the checkpoint, so that it shows which of the two is read.
    """

    def __init__(self, case: Case, checkpoint: str, readout: str | None, decay_skip: float = 0.0) -> None:
        self.case, self.decay_skip = case, decay_skip
        state = case.buffers["state"]
        self.state = stored(checkpoint, state, case.operator)
        self.readout = None if readout is None else stored(readout, state.flip(2), case.operator)

    def run(self, kernel: Any, case: Case | None = None) -> tuple[Result, Any, Any]:
        """Output and rings, the checkpoint and the copy after a step."""
        case = case or self.case
        state, readout = clone(self.state), clone(self.readout)
        buffers = {name: ring for name, ring in case.buffers.items() if name != "state"}
        arguments = {"state": state, "readout": readout, "decay_skip": self.decay_skip}

        class Kernel:
            @staticmethod
            def replay_step(*operands: Any, **rest: Any) -> torch.Tensor:
                return kernel.replay_step(*operands, **rest, **arguments)

        return case.run(Kernel, buffers), state, readout

    def truth(self) -> tuple[Result, Any, Any]:
        """In float64 on the same stored state."""
        case, wide = self.case, {n: None if t is None else t.double() for n, t in self.case.parameters.items()}
        tokens = {name: tensor.double() for name, tensor in case.tokens.items()}
        exact = {name: ring for name, ring in case.exact.items() if name != "state"}
        return self.run(case.operator.kernel, replace(case, parameters=wide, tokens=tokens, buffers=exact))

    def check(self) -> tuple[Result, Any, Any]:
        """Triton is as good as the reference; rows that are not due keep their bytes."""
        found = self.run(KERNELS[self.case.operator.name])
        self.compare(*found)
        return found

    def compare(self, got: Result, state: Any, readout: Any) -> None:
        """What Triton left of the case is as `check` says."""
        want, want_state, want_readout = self.run(self.case.operator.kernel)
        exact, *_ = self.truth()
        assert exact.output.isfinite().all()
        base = self.case.position["base"]
        folds = torch.zeros_like(base) if self.case.folds is None else self.case.folds
        as_good_where_nothing_is_rounded(got.output, exact.output, want.output, folds > 0)
        for name, ring in got.buffers.items():
            if name == "ring_d":
                new = ~torch.isnan(ring) & ~torch.isnan(exact.buffers[name])
                numbers = (tensor.masked_fill(~new, 0) for tensor in (ring, exact.buffers[name], want.buffers[name]))
                as_good_where_nothing_is_rounded(*numbers, folds > 0)
            else:
                assert torch.equal(bits(ring), bits(want.buffers[name])), name
        for mine, theirs, before in ((state, want_state, self.state), (readout, want_readout, self.readout)):
            for name, part in parts_of(mine).items():
                assert torch.equal(bits(part)[folds == 0], bits(parts_of(before)[name])[folds == 0])
            if mine is not None and (folds > 0).any():
                same_up_to_rounding(mine, theirs, folds > 0)


def parts_of(state: Any) -> dict[str, torch.Tensor]:
    if state is None:
        return {}
    return state.parts if isinstance(state, StoredState) else {"values": state}


def as_good_where_nothing_is_rounded(
    got: torch.Tensor, exact: torch.Tensor, want: torch.Tensor, due: torch.Tensor
) -> None:
    """As good as the reference in rows that fold nothing; in the others few values were rounded to the other side.

    Reading another state, or one before the fold, would make an error as large as the output.
    """
    if not due.all():
        assert_as_good(got[~due], exact[~due], want[~due])
    if due.any():
        error = (got[due].double() - exact[due]).norm()
        assert error <= 0.02 * exact[due].norm(), f"error {error / exact[due].norm():.3g} where rows fold"


def same_up_to_rounding(got: Any, want: Any, rows: torch.Tensor) -> None:
    """Of values that agree to 1e-5 few lie so close to the middle of two numbers of a format that they part there."""
    mine, theirs = (readable(state, torch.float32)[rows] for state in (got, want))
    scale = theirs.abs().max()
    assert (mine - theirs).abs().max() <= scale / 2, "further apart than two neighbours of the narrowest format"
    limit = 2**-7 if INTERPRETED and parts_of(got)["values"].dtype == torch.bfloat16 else 1e-5  # truncated there
    apart = (mine - theirs).abs() > limit * theirs.abs() + 1e-6 * scale
    assert apart.float().mean() <= 0.03, f"{apart.float().mean():.1%} of the values differ"
