"""Folds and scans against the recurrence; which bytes a fold may touch; tolerances as in `assert_close`."""

from __future__ import annotations

import pytest
import torch

from replay_transformers.kernels.saturate import store
from tests.support.operators import EVERY_OPERATOR, GEOMETRIES, Geometry, Operator, assert_close, part
from tests.support.replay import Replay

FLOAT16_LARGEST = 65504.0


def filled(operator: Operator, geometry: Geometry, counts: list[int], dtype: torch.dtype = torch.float64) -> Replay:
    """Rows with so many committed records, in rings that have wrapped around."""
    replay = Replay(operator, geometry, window=16, first=tuple(13 + 7 * row for row in range(len(counts))), dtype=dtype)
    for step in range(max(counts)):
        replay.append(operator.draw(len(counts), 1, geometry, dtype))
        for row, count in enumerate(counts):
            replay.settle(row, int(step < count))
    assert replay.committed == counts
    return replay


@EVERY_OPERATOR
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_fold_equals_the_recurrence(operator: Operator, geometry: Geometry) -> None:
    replay = filled(operator, geometry, [0, 1, 5, 16])
    operands = operator.fold_operands(replay.rings, replay.parameters)
    before = replay.state.clone()
    cursor = {"base": replay.cursor["base"], "count": replay.cursor["committed"]}

    folded = operator.kernel.folded_state(replay.state, *operands, **cursor)
    assert torch.equal(replay.state, before)
    assert folded.dtype == torch.float64
    assert_close(folded, replay.true_state())
    assert torch.equal(folded[0], before[0])

    operator.kernel.fold(replay.state, *operands, **cursor)
    assert torch.equal(replay.state, folded)


@EVERY_OPERATOR
def test_fold_takes_the_oldest_records_only(operator: Operator) -> None:
    replay = filled(operator, GEOMETRIES[0], [9, 12])
    operands = operator.fold_operands(replay.rings, replay.parameters)
    for counts in ([4, 0], [1, 12]):
        folded = operator.kernel.folded_state(
            replay.state, *operands, base=replay.cursor["base"], count=torch.tensor(counts)
        )
        assert_close(folded, recurrence_over_ring(replay, counts))


def recurrence_over_ring(replay: Replay, counts: list[int]) -> torch.Tensor:
    """The recurrence over the first ``counts`` records, read back from the ring slot by slot."""
    states = []
    for row, count in enumerate(counts):
        slots = [(replay.base[row] + age) % replay.capacity for age in range(count)]
        tokens = {name: replay.rings[name][row : row + 1, :, slots].transpose(1, 2) for name in replay.rings}
        tokens.pop("ring_d", None)
        if replay.operator.name == "mamba2":
            x, B, dt = tokens.values()
            named = {"x": x, "dt": dt, "B": B, "C": torch.zeros_like(B)}
        else:
            k, v, g, beta = tokens.values()
            named = {"q": torch.zeros_like(k), "k": k, "v": v, "g": g, "beta": beta}
        states.append(replay.operator.oracle(named, replay.parameters, replay.state[row : row + 1])[1])
    return torch.cat(states)


@EVERY_OPERATOR
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_without_records_keep_their_bytes(operator: Operator, dtype: torch.dtype) -> None:
    replay = filled(operator, GEOMETRIES[0], [0, 3, 0], torch.float32)
    state = replay.state.to(dtype)
    special = [-0.0, 0.0, float("inf"), float("-inf"), float("nan"), torch.finfo(dtype).smallest_normal / 4]
    state[0, 0, 0, : len(special)] = torch.tensor(special, dtype=dtype)
    bits = state.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[2, 0, 0, 0] = -3  # a NaN with a payload
    before = bits.clone()
    operands = operator.fold_operands(replay.rings, replay.parameters)
    operator.kernel.fold(state, *operands, base=replay.cursor["base"], count=replay.cursor["committed"])
    assert torch.equal(bits[[0, 2]], before[[0, 2]])
    assert not torch.equal(bits[1], before[1])


@EVERY_OPERATOR
def test_float16_checkpoints_saturate(operator: Operator) -> None:
    """One fold that leaves the range in both directions; a NaN among the records stays a NaN."""
    geometry = Geometry(2, 1, 4, 4)
    replay = filled(operator, geometry, [1, 1], torch.float32)
    record = replay.rings["ring_x" if operator.name == "mamba2" else "ring_v"]
    slots = [base % replay.capacity for base in replay.base]
    record[0, :, slots[0]] = torch.tensor([1e30, -1e30, 1.0, 0.0])
    record[1, :, slots[1]] = torch.tensor([float("nan"), 1.0, 1.0, 1.0])
    state = torch.zeros_like(replay.state, dtype=torch.float16)
    operands = operator.fold_operands(replay.rings, replay.parameters)
    operator.kernel.fold(state, *operands, base=replay.cursor["base"], count=replay.cursor["committed"])
    channels = state if operator.name == "mamba2" else state.transpose(-1, -2)
    assert channels[0].abs().max() == FLOAT16_LARGEST
    assert channels[0].isfinite().all()
    assert (channels[0, :, :2].abs() == FLOAT16_LARGEST).all()
    assert channels[1, :, 0].isnan().all()
    assert channels[1, :, 1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_store_rounds_to_nearest_and_bounds_float16_only(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1 / 3, 65519.0, 65520.0, 1e30, -1e30, float("inf"), float("nan")])
    state = torch.zeros(8, dtype=dtype)
    store(state, values)
    expected = values.to(dtype)
    if dtype == torch.float16:
        expected[3:6] = torch.tensor([1, 1, -1]) * FLOAT16_LARGEST
    assert torch.equal(state[:-1], expected[:-1])
    assert state[-1].isnan()


@EVERY_OPERATOR
@pytest.mark.parametrize("length", [1, 5, 33])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
def test_scan_equals_the_recurrence(operator: Operator, length: int, chunk_size: int) -> None:
    geometry = GEOMETRIES[2]
    tokens, parameters = operator.draw(2, length, geometry), operator.parameters(geometry)
    state = torch.randn(2, *operator.state_shape(geometry), dtype=torch.float64)
    before = state.clone()
    output, after = operator.scan(tokens, parameters, state=state, chunk_size=chunk_size)
    true_output, true_state = operator.oracle(tokens, parameters, state)
    assert_close(output, true_output)
    assert_close(after, true_state)
    assert torch.equal(state, before)


@EVERY_OPERATOR
def test_scan_in_float32_is_as_good_as_the_eager_recurrence(operator: Operator) -> None:
    """Twice the error of the plain recurrence at most, over 300 tokens in chunks of 64."""
    geometry = GEOMETRIES[0]
    tokens, parameters = operator.draw(1, 300, geometry, torch.float32), operator.parameters(geometry, torch.float32)
    state = torch.randn(1, *operator.state_shape(geometry))
    got = operator.scan(tokens, parameters, state=state)
    eager = operator.oracle(tokens, parameters, state, torch.float32)
    truth = operator.oracle(tokens, parameters, state)
    for one, two, exact in zip(got, eager, truth, strict=True):
        assert one.dtype == torch.float32
        assert (one - exact).norm() <= 2 * (two - exact).norm()


@EVERY_OPERATOR
def test_scan_continues_where_a_scan_ended(operator: Operator) -> None:
    """In chunks, in pieces, and piece by piece into a narrow state."""
    geometry = GEOMETRIES[0]
    tokens, parameters = operator.draw(2, 20, geometry), operator.parameters(geometry)
    state = torch.zeros(2, *operator.state_shape(geometry), dtype=torch.float64)
    whole, last = operator.scan(tokens, parameters, state=state)
    outputs = []
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        output, state = operator.scan(part(tokens, start, stop), parameters, state=state, chunk_size=4)
        outputs.append(output)
    assert_close(torch.cat(outputs, dim=1), whole)
    assert_close(state, last)
