"""The cursor against the rules it implements, written here once more in plain integers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_transformers import ReplayConfig
from replay_transformers.cursor import Cursor, allocate, select_rows

CPU = torch.device("cpu")


def forward(cursor: Cursor, tokens: int, rows: int = 1) -> list[list[int]]:
    """One forward through the cursor; where it stands afterwards."""
    cursor.begin(rows, tokens, CPU)
    cursor.end()
    return where(cursor)


def where(cursor: Cursor) -> list[list[int]]:
    """``[base, committed, pending]`` per row."""
    return torch.stack(cursor.tensors(), dim=1).tolist()


def expected(row: list[int], tokens: int, window: int, max_draft: int, recording: bool) -> list[int]:
    """The rules: flush when h + u + T > L; what leaves the horizon is committed; long forwards are folded at once."""
    base, committed, pending = row
    horizon = max_draft if recording else 0
    if tokens > max_draft + 1:
        return [base + committed + pending + tokens - horizon, 0, horizon]
    if committed + pending + tokens > window:
        base, committed = base + committed, 0
    pending += tokens
    leaving = max(0, pending - horizon)
    return [base, committed + leaving, pending - leaving]


def test_plain_decoding_flushes_every_window() -> None:
    """Window 3: the fourth, seventh, ... token finds three records and folds them."""
    cursor = Cursor(ReplayConfig(window=3, max_draft=0))
    assert [forward(cursor, 1)[0] for _ in range(7)] == [
        [0, 1, 0],
        [0, 2, 0],
        [0, 3, 0],
        [3, 1, 0],
        [3, 2, 0],
        [3, 3, 0],
        [6, 1, 0],
    ]


def test_window_one_flushes_in_every_step() -> None:
    cursor = Cursor(ReplayConfig(window=1, max_draft=0))
    assert [forward(cursor, 1)[0] for _ in range(3)] == [[0, 1, 0], [1, 1, 0], [2, 1, 0]]


def test_recording_commits_what_leaves_the_horizon() -> None:
    cursor = Cursor(ReplayConfig(window=6, max_draft=2))
    cursor.recording = True
    assert [forward(cursor, tokens)[0] for tokens in (1, 1, 1, 2, 3)] == [
        [0, 0, 1],
        [0, 0, 2],
        [0, 1, 2],
        [0, 3, 2],  # 1 + 2 + 2 <= 6: not due
        [3, 3, 2],  # 3 + 2 + 3 > 6: three folded, the two pending ones stay and are committed, two of the new pend
    ]


def test_pending_tokens_count_for_the_flush_rule_and_are_not_folded() -> None:
    cursor = Cursor(ReplayConfig(window=4, max_draft=3))
    cursor.recording = True
    forward(cursor, 3)
    assert forward(cursor, 2) == [[0, 2, 3]]  # 0 + 3 + 2 > 4: due, and nothing committed to fold
    assert forward(cursor, 1) == [[2, 1, 3]]


@pytest.mark.parametrize(("recording", "after"), [(False, [11, 0, 0]), (True, [9, 0, 2])], ids=["plain", "recording"])
def test_a_forward_longer_than_the_ring_takes(recording: bool, after: list[int]) -> None:
    cursor = Cursor(ReplayConfig(window=16, max_draft=2))
    forward(cursor, 1)
    cursor.recording = recording
    plan = cursor.begin(1, 10, CPU)
    assert (plan.scanned, plan.kept) == ((8, 2) if recording else (10, 0))
    cursor.end()
    assert where(cursor) == [after]


def test_commit_takes_a_number_or_one_per_row() -> None:
    cursor = Cursor(ReplayConfig(window=16, max_draft=8))
    cursor.recording = True
    assert forward(cursor, 5, rows=3) == [[0, 0, 5]] * 3
    cursor.commit(torch.tensor([0, 2, 5]))
    assert where(cursor) == [[0, 5, 0], [0, 3, 0], [0, 0, 0]]
    forward(cursor, 2, rows=3)
    cursor.commit(1)
    assert where(cursor) == [[0, 6, 0], [0, 4, 0], [0, 1, 0]]
    assert cursor.lengths().tolist() == [6, 4, 1]


@given(
    st.integers(1, 9),
    st.integers(0, 4),
    st.lists(
        st.one_of(
            st.tuples(st.just("forward"), st.integers(1, 8)),
            st.tuples(st.just("commit"), st.lists(st.integers(0, 4), min_size=2, max_size=2)),
            st.tuples(st.just("flush"), st.none()),
            st.tuples(st.just("record"), st.none()),
        ),
        max_size=30,
    ),
)
def test_any_sequence_follows_the_rules(window: int, max_draft: int, actions: list) -> None:
    """Two rows that drift apart; the buffers stay where they are, and the plan's promise about flushes holds."""
    cursor = Cursor(ReplayConfig(window=window, max_draft=max_draft))
    forward(cursor, 1, rows=2)
    rows = [expected([0, 0, 0], 1, window, max_draft, False)] * 2
    addresses = [tensor.data_ptr() for tensor in cursor.tensors()]
    for name, value in actions:
        if name == "forward":
            due = [h + u + value > window for _, h, u in rows]
            plan = cursor.begin(2, value, CPU)
            folds = [h if flush else 0 for (_, h, _), flush in zip(rows, due, strict=True)]
            assert (plan.folds is None) == (plan.scanned > 0 or not any(due))
            assert plan.folds is None or plan.folds.tolist() == folds
            assert plan.scanned + plan.kept == value
            assert max(h + u for _, h, u in rows) <= plan.max_records
            assert not cursor.first
            assert where(cursor) == rows, "begin() moves nothing"
            cursor.end()
            rows = [expected(row, value, window, max_draft, cursor.recording) for row in rows]
        elif name == "commit":
            rejected = [min(n, u) for n, (_, _, u) in zip(value, rows, strict=True)]
            cursor.commit(torch.tensor(rejected))
            rows = [[base, h + u - n, 0] for n, (base, h, u) in zip(rejected, rows, strict=True)]
        elif name == "flush":
            cursor.flushed()
            rows = [[base + h, 0, u] for base, h, u in rows]
        else:
            cursor.recording = True
        assert where(cursor) == rows
    assert [tensor.data_ptr() for tensor in cursor.tensors()] == addresses
    assert all(tensor.dtype == torch.int64 for tensor in cursor.tensors())


@pytest.mark.parametrize(("window", "max_draft", "most"), [(16, 5, 16), (3, 4, 9), (1, 0, 1)])
def test_kernels_look_at_no_more_records_than_there_can_be(window: int, max_draft: int, most: int) -> None:
    """While recording: as many as the window, or what cannot be folded and a longest forward; it does occur."""
    cursor = Cursor(ReplayConfig(window=window, max_draft=max_draft))
    cursor.recording = True
    plans = [(cursor.begin(1, 1, CPU).max_records, cursor.end())[0] for _ in range(max(window, max_draft + 1))]
    assert set(plans) == {most}
    if most > window:  # a full round that is folded, nothing of it rejected yet
        forward(cursor, max_draft + 1)
    assert sum(where(cursor)[0][1:]) == most


def test_nothing_is_asked_of_a_device_other_than_the_cpu() -> None:
    """Reading a value of a tensor without data raises, as waiting for a GPU would stall: the plan does neither."""
    cursor = Cursor(ReplayConfig(window=2, max_draft=1))
    for tokens in (1, 2, 1, 5, 1):
        plan = cursor.begin(3, tokens, torch.device("meta"))
        assert (plan.folds is None) == (plan.scanned > 0)
        cursor.end()
    with pytest.raises(RuntimeError, match="meta"):
        where(cursor)


def test_another_batch_is_refused_until_the_reset() -> None:
    cursor = Cursor(ReplayConfig())
    forward(cursor, 1, rows=2)
    before = where(cursor)
    with pytest.raises(ValueError, match="holds 2 rows on cpu, got 3 rows on cpu"):
        cursor.begin(3, 1, CPU)
    assert where(cursor) == before
    assert cursor.plan is None
    cursor.reset()
    assert cursor.fresh
    assert forward(cursor, 1, rows=3) == [[0, 1, 0]] * 3


def test_reset_goes_back_to_the_start_in_place() -> None:
    cursor = Cursor(ReplayConfig(window=2))
    cursor.recording = True
    forward(cursor, 3, rows=2)
    addresses = [tensor.data_ptr() for tensor in cursor.tensors()]
    cursor.begin(2, 1, CPU)  # and never ended
    cursor.reset()
    assert cursor.plan is None
    assert not cursor.recording
    assert where(cursor) == [[0, 0, 0]] * 2
    assert [tensor.data_ptr() for tensor in cursor.tensors()] == addresses
    cursor.begin(2, 1, CPU)
    assert cursor.first


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_are_selected(in_place: bool) -> None:
    cursor = Cursor(ReplayConfig())
    cursor.recording = True
    forward(cursor, 4, rows=3)
    cursor.commit(torch.tensor([0, 1, 2]))
    old = cursor.tensors()
    cursor.select(torch.tensor([2, 0, 0]), in_place)
    assert where(cursor) == [[0, 2, 0], [0, 4, 0], [0, 4, 0]]
    assert all((new is kept) == in_place for new, kept in zip(cursor.tensors(), old, strict=True))
    if not in_place:
        cursor.select(torch.tensor([1]), in_place)
        assert cursor.batch_size == 1


def test_copies_go_their_own_way() -> None:
    cursor = Cursor(ReplayConfig())
    forward(cursor, 3)
    for other in (copy.deepcopy(cursor), pickle.loads(pickle.dumps(cursor))):
        forward(other, 2)
        assert where(other) == [[0, 5, 0]]
        assert where(cursor) == [[0, 3, 0]]


def test_buffers_made_in_inference_mode_are_ordinary_tensors() -> None:
    with torch.inference_mode():
        buffer = allocate((2,), torch.float32, CPU)
        rows = select_rows(buffer, torch.tensor([1, 0]), in_place=False)
    assert not buffer.is_inference()
    assert not rows.is_inference()
    buffer.add_(1)
    assert buffer.tolist() == [1, 1]
