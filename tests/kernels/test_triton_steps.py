"""Single steps of the Triton kernels: cursors, shapes, dtypes and layouts; what they may touch.

Tolerances are in `assert_as_good`, the claims about bytes in `check_case`. Every dead slot and all scratch is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replay_transformers.kernels.launch import Launch, override
from tests.support.kernels import (
    KERNELS,
    OPERATORS_IN_TRITON,
    Case,
    bits,
    check_case,
    from_projection,
    make_case,
    spaced,
)
from tests.support.operators import GATED_DELTA, MAMBA2, Geometry, Operator

FEW_PROGRAMS = Launch(block=16, warps=1, share=4)
SMALL, PAIR = Geometry(1, 1, 12, 16), Geometry(2, 1, 5, 6)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """The interpreter takes its time for each."""
    with override("mamba2", FEW_PROGRAMS), override("gated_delta", FEW_PROGRAMS):
        yield


def due_and_not(window: int, count: int) -> dict[str, Any]:
    """A full window that is folded, beside a row that is not due where the window leaves room for that."""
    other = max(0, window - count - 2)
    pending = min(2, max(0, window - count))
    due = other + pending + count > window
    return {"committed": (window, other), "pending": (0, pending), "folds": [window, other if due else 0]}


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("count", "window"), [*itertools.product((1, 2, 4, 8), (1, 7, 16)), (11, 16)])
def test_tokens_and_windows(operator: Operator, count: int, window: int, dtype: str) -> None:
    """11 tokens go through in two parts, the first of which folds."""
    geometry = SMALL if dtype == "bf16" else Geometry(1, 1, 7, 11)
    case = make_case(operator, geometry, count, dtype=DTYPES[dtype], **due_and_not(window, count))
    got = check_case(case)
    assert not torch.equal(got.buffers["state"][0], case.buffers["state"][0])


GEOMETRIES = [
    Geometry(4, 1, 8, 16),
    Geometry(4, 4, 8, 16),
    Geometry(3, 1, 80, 8),
    Geometry(3, 3, 5, 80),
    Geometry(4, 2, 9, 24),
    Geometry(4, 1, 4, 1),
]


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_shapes(operator: Operator, geometry: Geometry) -> None:
    """One group, one per head, 2 and 4 heads per group; widths that are no powers of two. One row, which is due."""
    check_case(make_case(operator, geometry, 2, committed=(5,), pending=(1,), folds=[5]))


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("launch", [Launch(1, 1, 1), Launch(4, 2, 2), Launch(32, 4, 32)], ids=["1-1", "4-2", "32-32"])
def test_launches(operator: Operator, launch: Launch) -> None:
    """Blocks narrower than a head and wider, up to all heads of a group per program."""
    with override(operator.name, launch):
        check_case(make_case(operator, Geometry(4, 1, 5, 6), 1, committed=(5,), pending=(1,), folds=[5]))


@OPERATORS_IN_TRITON
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [("f32", "bf16"), ("f32", "f16"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32")],
)
def test_dtypes(operator: Operator, dtype: str, state_dtype: str) -> None:
    case = make_case(operator, SMALL, 2, folds=[5, 0], dtype=DTYPES[dtype], state_dtype=DTYPES[state_dtype])
    got = check_case(case)
    assert got.output.dtype == DTYPES[dtype]


# of rows with 5 and 2 committed and 0 and 3 pending records
FOLDS = {"None": None, "zeros": [0, 0], "one row": [0, 2], "all": [5, 2], "only the oldest": [3, 1]}


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("folds", FOLDS.values(), ids=FOLDS)
def test_folds(operator: Operator, folds: list[int] | None) -> None:
    check_case(make_case(operator, PAIR, 1, folds=folds))


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("folds", [None, [3, 1]], ids=["None", "only the oldest"])
def test_folds_before_two_parts(operator: Operator, folds: list[int] | None) -> None:
    check_case(make_case(operator, Geometry(1, 1, 5, 6), 9, folds=folds))


# per row: base, committed and pending, in a ring of 24 slots
CURSORS = {
    "nothing yet": ((0, 24), (0, 0), (0, 0)),
    "pending only": ((3, 23), (0, 0), (4, 1)),
    "full": ((7, 100), (16, 4), (6, 18)),
    "the end of the ring": ((22, 23), (2, 1), (0, 0)),
    "beyond 32 bits": ((2**31 - 1, 2**40 + 5), (6, 1), (1, 9)),
}


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("position", CURSORS.values(), ids=CURSORS)
def test_cursors(operator: Operator, position: tuple[tuple[int, ...], ...]) -> None:
    base, committed, pending = position
    case = make_case(
        operator, SMALL, 2, base=base, committed=committed, pending=pending, capacity=24, folds=list(committed)
    )
    got = check_case(case)
    case.max_records = max(1, *(c + p for c, p in zip(committed, pending, strict=True)))
    if case.max_records in (1, 22):
        known = check_case(case)
        assert torch.equal(known.output, got.output)


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("records", [16, 17])
def test_records_at_the_edges_of_a_block(operator: Operator, records: int) -> None:
    """Of four heads: one alone is nearly exact in the reference by luck."""
    geometry = Geometry(4, 1, 12, 16)
    case = make_case(operator, geometry, 1, committed=(records, 0), pending=(0, records), folds=[records, 0])
    case.max_records = records
    check_case(case)


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("log_decay", [-100.0, -400.0, -1e-8, 0.0])
def test_any_decay(operator: Operator, log_decay: float, dtype: str) -> None:
    """From "everything before is gone" to "nothing is ever forgotten"."""
    got = check_case(make_case(operator, SMALL, 3, folds=[5, 0], log_decay=log_decay, dtype=DTYPES[dtype]))
    assert all(tensor.isfinite().all() for tensor in (got.output, got.buffers["state"]))


@OPERATORS_IN_TRITON
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(from_projection, "bf16"), (spaced, "f32")],
    ids=["split projection", "no stride of 1"],
)
def test_strides(operator: Operator, layout: Any, dtype: str) -> None:
    """The same bits as from contiguous tensors."""
    case = make_case(operator, Geometry(2, 2, 5, 6), 2, folds=[5, 0], dtype=DTYPES[dtype])
    kernel = KERNELS[operator.name]
    expected = case.run(kernel)
    tokens = layout(case.tokens)
    assert not any(tensor.is_contiguous() for tensor in tokens.values())
    assert all(torch.equal(view, case.tokens[name]) for name, view in tokens.items())
    got = case.run(kernel, tokens=tokens)
    assert torch.equal(got.output, expected.output)
    assert all(torch.equal(bits(got.buffers[name]), bits(expected.buffers[name])) for name in expected.buffers)


def test_no_skip_weight() -> None:
    case = make_case(MAMBA2, SMALL, 2, folds=[5, 0])
    case.parameters["D"] = None
    check_case(case)


def test_narrow_parameters() -> None:
    case = make_case(MAMBA2, SMALL, 2, folds=[5, 0], dtype=torch.bfloat16)
    case.parameters = {name: None if p is None else p.bfloat16() for name, p in case.parameters.items()}
    check_case(case)


@pytest.mark.filterwarnings("ignore:invalid value")
@OPERATORS_IN_TRITON
def test_rows_that_are_not_due_keep_their_bytes(operator: Operator) -> None:
    """NaN with a payload, infinities, -0.0 and subnormals as well; the other row's fold is not disturbed by them."""
    case = make_case(operator, PAIR, 1, folds=[5, 0])
    special = [-0.0, float("inf"), float("-inf"), float("nan"), 1e-40]
    case.buffers["state"][1, 0, 0, : len(special)] = torch.tensor(special)
    bits(case.buffers["state"])[1, 1, 0, 0] = -3
    got, clean = case.triton(), make_clean(case).triton()
    assert torch.equal(bits(got.buffers["state"])[1], bits(case.buffers["state"])[1])
    assert torch.equal(got.buffers["state"][0], clean.buffers["state"][0])
    assert torch.equal(got.output[0], clean.output[0])


def make_clean(case: Case) -> Case:
    """The same with a state of zeros in the second row."""
    state = case.buffers["state"].clone()
    state[1] = 0
    return Case(**{**vars(case), "buffers": {**case.buffers, "state": state}})


@OPERATORS_IN_TRITON
def test_rows_do_not_see_each_other(operator: Operator) -> None:
    """NaN in all that one row holds and gets: the other row's bits do not change."""
    case = make_case(operator, PAIR, 2, folds=[5, 2])
    clean = case.triton()
    for tensor in (*case.tokens.values(), *case.buffers.values()):
        tensor[1] = float("nan")
    got = case.triton()
    assert torch.equal(got.output[0], clean.output[0])
    assert all(torch.equal(bits(got.buffers[name])[0], bits(clean.buffers[name])[0]) for name in clean.buffers)


def test_a_fold_takes_nothing_from_the_derived_corrections() -> None:
    """Whatever `ring_d` holds of live records, the folded state has the same bits."""
    case = make_case(GATED_DELTA, SMALL, 2, folds=[5, 2])
    clean = case.triton()
    case.buffers["ring_d"].normal_()
    case.buffers["ring_d"][1] = float("nan")
    got = case.triton()
    assert not torch.equal(got.buffers["state"], case.buffers["state"])
    assert torch.equal(bits(got.buffers["state"]), bits(clean.buffers["state"]))
    assert not torch.equal(got.output[0], clean.output[0]), "no record was read: the test could not fail"
    assert got.output[1].isnan().all()


@OPERATORS_IN_TRITON
def test_float16_states_saturate(operator: Operator) -> None:
    """A fold that leaves the range in both directions; a NaN among the records stays a NaN."""
    case = make_case(operator, Geometry(2, 1, 4, 4), 1, committed=(1, 1), pending=(0, 0), folds=[1, 1])
    record = case.buffers["ring_x" if operator.name == "mamba2" else "ring_v"]
    for row, values in enumerate(([1e30, -1e30, 1.0, 0.0], [float("nan"), 1.0, 1.0, 1.0])):
        record[row].copy_(
            torch.where(case.slots()[row, :, None], torch.tensor(values, device=record.device), record[row])
        )
    case.buffers["state"] = torch.zeros_like(case.buffers["state"], dtype=torch.float16)
    state = case.triton().buffers["state"]
    channels = state if operator.name == "mamba2" else state.transpose(-1, -2)
    assert channels[0].isfinite().all()
    assert (channels[0, :, :2].abs() == 65504).all()
    assert channels[1, :, 0].isnan().all()
    assert channels[1, :, 1:].isfinite().all()
    reference = case.reference().buffers["state"]
    torch.testing.assert_close(state, reference, rtol=1e-3, atol=1e-6, equal_nan=True)
