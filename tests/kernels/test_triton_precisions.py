"""Steps of the Triton kernels on states in every format, with and without a copy that is read, and decay skip.

Both implementations read the same bytes, so outputs are compared as those of a float32 state are. A fold may round a
value to the other side where the two sums differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from replay_transformers.kernels.formats import FORMATS, PlainFormat, StoredState
from replay_transformers.kernels.formats.stored import State, readable, refresh
from replay_transformers.kernels.launch import Launch, override
from tests.support.kernels import (
    INTERPRETED,
    KERNELS,
    NAN,
    OPERATORS_IN_TRITON,
    Case,
    Result,
    assert_as_good,
    bits,
    make_case,
)
from tests.support.operators import Geometry, Operator

SMALL, ODD = Geometry(2, 1, 8, 16), Geometry(2, 2, 5, 24)
KEY = 5 << 32 | 11
PRECISIONS = [
    ("float32", "bfloat16"), ("float32", "float16"), ("float32", "fp8"), ("float32", "nvfp4"), ("bfloat16", "fp8"),
    ("fp8", None), ("fp8_sr", None), ("float16_sr", None), ("nvfp4", None), ("fp8", "nvfp4"), ("nvfp4", "bfloat16"),
]  # fmt: skip
EVERY_PRECISION = pytest.mark.parametrize(
    ("checkpoint", "readout"), PRECISIONS, ids=[f"{c}-{r}" for c, r in PRECISIONS]
)


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """The interpreter takes its time for each."""
    launch = Launch(block=16, warps=1, share=4)
    with override("mamba2", launch), override("gated_delta", launch):
        yield


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
        got, state, readout = self.run(KERNELS[self.case.operator.name])
        want, want_state, want_readout = self.run(self.case.operator.kernel)
        exact, *_ = self.truth()
        assert exact.output.isfinite().all()
        assert_as_good(got.output, exact.output, want.output)
        for name, ring in got.buffers.items():
            if name == "ring_d":
                new = ~torch.isnan(ring) & ~torch.isnan(exact.buffers[name])
                assert_as_good(ring[new], exact.buffers[name][new], want.buffers[name][new])
            else:
                assert torch.equal(bits(ring), bits(want.buffers[name])), name
        folds = torch.zeros(2, dtype=torch.int64) if self.case.folds is None else self.case.folds
        for mine, theirs, before in ((state, want_state, self.state), (readout, want_readout, self.readout)):
            for name, part in _parts(mine).items():
                assert torch.equal(bits(part)[folds == 0], bits(_parts(before)[name])[folds == 0])
            if mine is not None and (folds > 0).any():
                same_up_to_rounding(mine, theirs, folds > 0)
        return got, state, readout


def _parts(state: Any) -> dict[str, torch.Tensor]:
    if state is None:
        return {}
    return state.parts if isinstance(state, StoredState) else {"values": state}


def same_up_to_rounding(got: Any, want: Any, rows: torch.Tensor) -> None:
    """Of values that agree to 1e-5 few lie so close to the middle of two numbers of a format that they part there."""
    mine, theirs = (readable(state, torch.float32)[rows] for state in (got, want))
    scale = theirs.abs().max()
    assert (mine - theirs).abs().max() <= scale / 2, "further apart than two neighbours of the narrowest format"
    limit = 2**-7 if INTERPRETED and _parts(got)["values"].dtype == torch.bfloat16 else 1e-5  # truncated there
    apart = (mine - theirs).abs() > limit * theirs.abs() + 1e-6 * scale
    assert apart.float().mean() <= 0.03, f"{apart.float().mean():.1%} of the values differ"


@OPERATORS_IN_TRITON
@EVERY_PRECISION
def test_a_row_that_folds_and_one_that_does_not(operator: Operator, checkpoint: str, readout: str | None) -> None:
    case = make_case(operator, SMALL, 1, committed=(7, 2), pending=(0, 3), folds=[7, 0])
    precise = Precise(case, checkpoint, readout)
    _, state, copy = precise.check()
    assert not torch.equal(_parts(state)["values"][0], _parts(precise.state)["values"][0])
    if copy is not None:  # it has been made of the new checkpoint
        again = clone(copy)
        for part in _parts(again).values():
            part.zero_()
        refresh(again, state, case.position["base"] + case.folds)
        same_up_to_rounding(copy, again, case.folds > 0)


@OPERATORS_IN_TRITON
@pytest.mark.parametrize(("checkpoint", "readout"), [("float32", "fp8"), ("float32", "nvfp4"), ("fp8_sr", None)])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_more_tokens(operator: Operator, count: int, checkpoint: str, readout: str | None) -> None:
    dtype = torch.bfloat16 if count == 4 else torch.float32
    case = make_case(operator, ODD, count, committed=(16, 2), pending=(0, 1), folds=[16, 0], dtype=dtype)
    Precise(case, checkpoint, readout).check()


@OPERATORS_IN_TRITON
@pytest.mark.parametrize(("checkpoint", "readout"), [("float32", "bfloat16"), ("float32", "nvfp4"), ("fp8", None)])
def test_no_fold_and_parts_of_a_long_step(operator: Operator, checkpoint: str, readout: str | None) -> None:
    Precise(make_case(operator, SMALL, 1), checkpoint, readout).check()
    Precise(make_case(operator, SMALL, 9, folds=[5, 0]), checkpoint, readout).check()


@OPERATORS_IN_TRITON
@pytest.mark.parametrize(("checkpoint", "readout"), [("float32", None), ("float32", "fp8"), ("nvfp4", None)])
@pytest.mark.parametrize("log_decay", [-0.5, -40.0])
def test_decay_skip(operator: Operator, checkpoint: str, readout: str | None, log_decay: float) -> None:
    """A state that is forgotten may hold NaN: it is not read, and the fold writes over it."""
    case = make_case(operator, SMALL, 1, committed=(7, 2), pending=(0, 0), folds=[7, 0], log_decay=log_decay)
    threshold = 0.1  # row 0: scaled by exp(8 * log_decay), folded by exp(7 * log_decay); row 1: by exp(3 * log_decay)
    precise = Precise(case, checkpoint, readout, threshold)
    forgotten = [True, log_decay == -40.0]
    for state in (precise.state, precise.readout):
        part = None if state is None else list(_parts(state).values())[-1]
        if part is not None:
            for row, is_forgotten in enumerate(forgotten):
                if is_forgotten and part.is_floating_point():
                    part[row] = NAN
    got, state, _ = precise.check()
    assert got.output.isfinite().all()
    assert readable(state, torch.float32)[0].isfinite().all()
    if not forgotten[1]:
        other = Precise(case, checkpoint, readout, 1e-30)  # the same kernels; nothing is scaled by so little
        other.state, other.readout = clone(precise.state), clone(precise.readout)
        assert torch.equal(other.run(KERNELS[operator.name])[0].output[1], got.output[1])


@OPERATORS_IN_TRITON
def test_refusals(operator: Operator) -> None:
    precise = Precise(make_case(operator, SMALL, 1, folds=[5, 0]), "fp8", "nvfp4")
    readout = precise.readout
    assert isinstance(readout, StoredState)
    precise.readout = readout.with_parts(readout.parts | {"scales": readout.parts["scales"][:, :, :-1]})
    with pytest.raises(ValueError, match=r"readout\.scales must have shape"):
        precise.run(KERNELS[operator.name])
    precise.readout = readable(readout, torch.float32).double().contiguous()
    with pytest.raises(ValueError, match=r"readout must be .*float64"):
        precise.run(KERNELS[operator.name])


@OPERATORS_IN_TRITON
@pytest.mark.parametrize(("checkpoint", "readout"), [("float32", "fp8"), ("nvfp4", None)])
def test_the_operators_registration(operator: Operator, checkpoint: str, readout: str | None) -> None:
    case = make_case(operator, SMALL, 1, folds=[5, 0])
    precise = Precise(case, checkpoint, readout)
    rings = [ring.nan_to_num() for name, ring in case.buffers.items() if name != "state"]
    operands = (
        *case.tokens.values(), *case.parameters.values(),
        list(_parts(precise.state).values()), list(_parts(precise.readout).values()), *rings,
        *case.position.values(), case.folds, 16, checkpoint, readout or "", KEY, 0.0,
    )  # fmt: skip
    torch.library.opcheck(KERNELS[operator.name]._stored_operator, operands)
