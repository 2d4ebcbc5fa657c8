"""Sequences of replay steps against the recurrence, token by token.

Tolerances: float64 as in `assert_close`. float32 has no number of its own: its error against float64 may be `MARGIN`
times that of the plain float32 recurrence on the same tokens.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support.operators import EVERY_OPERATOR, GEOMETRIES, Geometry, Operator, assert_close, folds
from tests.support.replay import Replay

MARGIN = 4.0  # two orders of summation of the same terms differ by a small factor, at random
WINDOWS = {1: GEOMETRIES[0], 2: GEOMETRIES[1], 3: GEOMETRIES[2], 7: GEOMETRIES[3], 16: GEOMETRIES[4]}
EVERY_WINDOW = pytest.mark.parametrize(
    ("window", "geometry"), WINDOWS.items(), ids=[f"L{window}-{shape}" for window, shape in WINDOWS.items()]
)
# beyond 2**31 and 2**33: positions that no 32-bit integer holds
FIRST = (0, 5, 2**31 - 3, 2**33 + 1)


def settle_at_random(replay: Replay, next_tokens: int) -> None:
    """Every row for itself: accept some, leave some pending (few enough for the ring), reject the rest."""
    for row in range(replay.rows):
        available = replay.pending[row]
        choice = random.choice(["hold", "commit all", "reject some", "partly"])
        if choice == "hold" and available <= 8:
            continue
        still = random.randint(0, min(available, 8)) if choice == "partly" else 0
        accepted = available if choice == "commit all" else random.randint(0, available - still)
        replay.settle(row, accepted, still)
    assert max(h + u + next_tokens for h, u in zip(replay.committed, replay.pending, strict=True)) <= replay.capacity


def run(replay: Replay, geometry: Geometry, steps: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, Any]]:
    """Steps of 1, 2, 4 or 8 tokens with random verdicts between them."""
    results = []
    due = [[False] * replay.rows]
    for _ in range(steps):
        count = random.choice([1, 1, 2, 4, 8])
        settle_at_random(replay, count)
        due.append(replay.due(count))
        results.append(replay.append(replay.operator.draw(replay.rows, count, geometry, dtype)))
    assert any(0 < sum(rows) < replay.rows for rows in due), "the rows never flushed apart from each other"
    return results


@EVERY_OPERATOR
@EVERY_WINDOW
def test_equals_the_recurrence(operator: Operator, window: int, geometry: Geometry) -> None:
    replay = Replay(operator, geometry, window, first=FIRST)
    for output, truth in run(replay, geometry, 30, torch.float64):
        assert_close(output, truth[torch.float64])
    assert_close(replay.folded(), replay.true_state())
    grown = [base - first for base, first in zip(replay.base, FIRST, strict=True)]
    assert min(grown) > replay.capacity, "the ring never wrapped around"


@EVERY_OPERATOR
@EVERY_WINDOW
def test_float32_is_as_good_as_the_eager_recurrence(operator: Operator, window: int, geometry: Geometry) -> None:
    both = (torch.float64, torch.float32)
    replay = Replay(operator, geometry, window, first=FIRST, dtype=torch.float32, oracle_dtypes=both)
    results = run(replay, geometry, 30, torch.float32)
    truth = torch.cat([step[torch.float64].flatten() for _, step in results])
    eager = torch.cat([step[torch.float32].flatten() for _, step in results])
    output = torch.cat([output.flatten() for output, _ in results])
    assert (output - truth).norm() <= MARGIN * (eager - truth).norm()
    error, eager_error = (state - replay.true_state() for state in (replay.folded(), replay.true_state(torch.float32)))
    assert error.norm() <= MARGIN * eager_error.norm()


@EVERY_OPERATOR
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_pending_tokens_stay_through_flushes(operator: Operator, tokens: int) -> None:
    """A tail that nobody decides about survives flushes of what is committed before it, in its slots."""
    geometry, replay = GEOMETRIES[0], Replay(operator, GEOMETRIES[0], window=7, first=(3, 4))
    flushes = 0
    for _ in range(40 // tokens):
        flushes += replay.due(tokens)[0] and replay.committed[0] > 0 and replay.pending[0] > 0
        output, truth = replay.append(operator.draw(2, tokens, geometry))
        assert_close(output, truth[torch.float64])
        for row in range(2):
            leaving = max(0, replay.pending[row] - 3)
            replay.settle(row, leaving, replay.pending[row] - leaving)
    assert flushes >= 3


@EVERY_OPERATOR
@pytest.mark.parametrize("rejected", range(8))
def test_rejected_tokens_leave_no_trace(operator: Operator, rejected: int) -> None:
    """The accepted ones count; what the others were does not matter to a single bit."""
    geometry, draft = GEOMETRIES[0], 8
    prompt, block = operator.draw(2, 5, geometry), operator.draw(2, draft, geometry)
    later = [operator.draw(2, count, geometry) for count in (1, 4, 1, 8, 2, 1)]
    other = {name: tensor.clone() for name, tensor in block.items()}
    for tensor, fresh in zip(other.values(), operator.draw(2, draft, geometry).values(), strict=True):
        tensor[:, draft - rejected :] = fresh[:, draft - rejected :]

    runs = []
    for tokens in (block, other):
        torch.manual_seed(1)
        replay = Replay(operator, geometry, window=7, first=(0, 11))
        outputs = []
        for step, accepted in [(prompt, 5), (tokens, draft - rejected), *((step, 1) for step in later)]:
            output, truth = replay.append(step)
            assert_close(output, truth[torch.float64])
            for row in range(2):
                replay.settle(row, accepted)
            outputs.append(output)
        outputs[1] = outputs[1][:, : draft - rejected]
        runs.append([*outputs, replay.folded()])
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


@EVERY_OPERATOR
def test_no_folds_are_folds_of_nothing(operator: Operator) -> None:
    geometry = GEOMETRIES[1]
    torch.manual_seed(1)
    one = Replay(operator, geometry, window=16, first=(2, 9), dtype=torch.float32)
    torch.manual_seed(1)
    two = Replay(operator, geometry, window=16, first=(2, 9), dtype=torch.float32)
    for tokens in (operator.draw(2, count, geometry, torch.float32) for count in (1, 4, 8, 2, 1)):
        assert not any(one.due(tokens[operator.log_decay].shape[1]))
        first, _ = one.append(tokens, folds=torch.zeros(2, dtype=torch.int64))
        second, _ = two.append(tokens, folds=None)
        assert torch.equal(first, second)
        assert torch.equal(one.state, two.state)
        assert all(torch.equal(one.rings[name], two.rings[name]) for name in one.rings)
        for replay in (one, two):
            replay.settle(0, 1)


@EVERY_OPERATOR
def test_strided_tokens(operator: Operator) -> None:
    """Slices of one projection, as a mixer passes them; and rows that are not contiguous."""
    geometry = GEOMETRIES[0]
    results = []
    for strided in (False, True):
        torch.manual_seed(1)
        replay = Replay(operator, geometry, window=3, first=(0, 7))
        outputs = []
        for count in (2, 1, 4, 1, 1):
            tokens = operator.draw(2, count, geometry)
            if strided:
                tokens = split_from_projection(tokens)
                assert not any(tensor.is_contiguous() for tensor in tokens.values())
            output, _ = replay.append(tokens)
            outputs.append(output)
            replay.settle_all()
        results.append([*outputs, replay.folded()])
    for contiguous, other in zip(*results, strict=True):
        assert_close(other, contiguous)


def split_from_projection(tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tokens as views of one buffer ``[T, rows, channels]``, transposed."""
    flat = [tensor.flatten(2) for tensor in tokens.values()]
    joined = torch.cat([*flat, torch.full_like(flat[0], float("nan"))], dim=-1).transpose(0, 1).contiguous()
    pieces = joined.transpose(0, 1).split([*(piece.shape[-1] for piece in flat), flat[0].shape[-1]], dim=-1)
    return {name: piece.unflatten(-1, tokens[name].shape[2:]) for name, piece in zip(tokens, pieces, strict=False)}


@EVERY_OPERATOR
def test_gradients_reach_the_tokens_and_not_the_rings(operator: Operator) -> None:
    """Against finite differences, on top of records and of a flush."""
    geometry = Geometry(2, 1, 3, 4)
    replay = Replay(operator, geometry, window=5, first=(0, 1))
    replay.append(operator.draw(2, 4, geometry))
    replay.settle(0, 4)  # due in the next step; the other row is not
    replay.settle(1, 1)
    assert replay.due(2) == [True, False]
    saved = {"state": replay.state, **replay.rings}
    tokens = {name: tensor.requires_grad_() for name, tensor in operator.draw(2, 2, geometry).items()}

    def output(*values: torch.Tensor) -> torch.Tensor:
        buffers = {name: tensor.clone() for name, tensor in saved.items()}
        arguments = {**buffers, **replay.cursor, "folds": folds(replay.cursor, 2, 5)}
        result = operator.step(dict(zip(tokens, values, strict=True)), replay.parameters, **arguments)
        assert not any(buffer.requires_grad or buffer.grad_fn for buffer in buffers.values())
        assert not torch.equal(buffers["state"], saved["state"])
        return result

    assert torch.autograd.gradcheck(output, tuple(tokens.values()))


@EVERY_OPERATOR
def test_narrow_activations_come_back_in_their_dtype(operator: Operator) -> None:
    """bfloat16 in and out: half a unit in the last of 8 bits, 2**-9 of each value, and 2**-8 with the step below.

    Gated DeltaNet also keeps its derived ``d`` in bfloat16. Each is off by 2**-9 of itself, enters later outputs with
    ``|k . q| <= K**-0.5``, once directly and at most twice through the later ``d`` (the norm of the solution operator).
    """
    geometry = GEOMETRIES[0]
    replay = Replay(operator, geometry, window=3, first=(0,), dtype=torch.bfloat16)
    for _ in range(8):
        derived = 0.0
        if "ring_d" in replay.rings:
            largest = replay.rings["ring_d"].abs().max().item()
            derived = 3 * replay.committed[0] * 2**-9 * largest * geometry.state_dim**-0.5
        output, truth = replay.append(operator.draw(1, 2, geometry, torch.bfloat16))
        replay.settle_all()
        assert output.dtype == torch.bfloat16
        exact = truth[torch.float64]
        assert ((output.double() - exact).abs() <= 2**-8 * exact.abs() + derived + 1e-5).all()
    assert {ring.dtype for ring in replay.rings.values()} == {torch.bfloat16, torch.float32}
    assert replay.state.dtype == torch.float32
