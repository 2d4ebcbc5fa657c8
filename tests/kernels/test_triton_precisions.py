"""Steps of the Triton kernels on states in every format, with and without a copy that is read, and decay skip.

Both implementations read the same bytes, so outputs are compared as those of a float32 state are. A fold may round a
value to the other side where the two sums differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from replay_transformers.kernels.formats import StoredState, precision
from replay_transformers.kernels.formats.stored import readable, refresh
from replay_transformers.kernels.launch import Launch, override
from tests.support.kernels import KERNELS, NAN, OPERATORS_IN_TRITON, make_case
from tests.support.operators import Geometry, Operator
from tests.support.precisions import EVERY_PRECISION, KEY, Precise, clone, parts_of, same_up_to_rounding

SMALL, ODD = Geometry(2, 1, 8, 16), Geometry(2, 2, 5, 24)


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """The interpreter takes its time for each."""
    launch = Launch(block=16, warps=1, share=4)
    with override("mamba2", launch), override("gated_delta", launch):
        yield


@OPERATORS_IN_TRITON
@EVERY_PRECISION
def test_a_row_that_folds_and_one_that_does_not(operator: Operator, checkpoint: str, readout: str | None) -> None:
    case = make_case(operator, SMALL, 1, committed=(7, 2), pending=(0, 3), folds=[7, 0])
    precise = Precise(case, checkpoint, readout)
    _, state, copy = precise.check()
    assert not torch.equal(parts_of(state)["values"][0], parts_of(precise.state)["values"][0])
    if copy is not None:  # it has been made of the new checkpoint
        again = clone(copy)
        for part in parts_of(again).values():
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
@pytest.mark.parametrize("readout", ["fp8", "nvfp4"])
@pytest.mark.parametrize("programs", [2, 4])
def test_several_tiles_in_a_program(
    operator: Operator, readout: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the three of a head: all in one program, and two in each of two."""
    monkeypatch.setattr(precision, "NARROW_PROGRAMS", programs)
    geometry = Geometry(1, 1, 3 * precision.NARROW_BLOCK, 16)
    assert precision.tiles_per_program(2, geometry.head_dim) == {2: 3, 4: 2}[programs]
    for count in (1, 2):
        Precise(make_case(operator, geometry, count, folds=[5, 0]), "float32", readout).check()


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
        part = None if state is None else list(parts_of(state).values())[-1]
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
    turned = not readout.transposed
    precise.readout = StoredState(readout.format, readout.parts, readout.states, turned, readout.key)
    with pytest.raises(ValueError, match=f"readout must be a StoredState with transposed={not turned}, got {turned}"):
        precise.run(KERNELS[operator.name])


@OPERATORS_IN_TRITON
@pytest.mark.parametrize(("checkpoint", "readout"), [("float32", "fp8"), ("nvfp4", None)])
def test_the_operators_registration(operator: Operator, checkpoint: str, readout: str | None) -> None:
    case = make_case(operator, SMALL, 1, folds=[5, 0])
    precise = Precise(case, checkpoint, readout)
    rings = [ring.nan_to_num() for name, ring in case.buffers.items() if name != "state"]
    operands = (
        *case.tokens.values(), *case.parameters.values(),
        list(parts_of(precise.state).values()), list(parts_of(precise.readout).values()), *rings,
        *case.position.values(), case.folds, 16, checkpoint, readout or "", KEY, 0.0,
    )  # fmt: skip
    torch.library.opcheck(KERNELS[operator.name]._stored_operator, operands)
