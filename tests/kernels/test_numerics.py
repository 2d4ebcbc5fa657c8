"""Strong and weak decay, long runs, and what lies dead in the rings."""

from __future__ import annotations

import pytest
import torch

from tests.support.operators import (
    EVERY_OPERATOR,
    GATED_DELTA,
    GEOMETRIES,
    Geometry,
    Operator,
    assert_close,
    folds,
    part,
)
from tests.support.replay import Replay

# log-decay of one token: from "everything before is gone" to "nothing is ever forgotten"
DECAYS = {"strong": [-200.0], "weak": [-1e-30], "mixed": [-200.0, -1e-30, -0.1, -88.8, -1e-8, 0.0]}
NAN = float("nan")


def with_decay(operator: Operator, tokens: dict[str, torch.Tensor], replay: Replay, logs: list[float]) -> None:
    """Give the tokens these log-decays in turn, heads out of step with each other."""
    field = tokens[operator.log_decay]
    pattern = torch.tensor(logs, dtype=field.dtype)
    index = torch.arange(field.shape[1])[:, None] + torch.arange(field.shape[2])
    values = pattern[index % len(logs)].expand_as(field)
    field.copy_(values / replay.parameters["A"] if operator.name == "mamba2" else values)


@EVERY_OPERATOR
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay(operator: Operator, dtype: torch.dtype, decay: str) -> None:
    """float32: 1e-5 of the largest value; at most 24 records of 16 products, each within 6e-8, are summed."""
    geometry = GEOMETRIES[0]
    replay = Replay(operator, geometry, window=16, first=(0, 9), dtype=dtype)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for count in (8, 8, 1, 4, 1, 8, 1):
        tokens = operator.draw(2, count, geometry, dtype)
        with_decay(operator, tokens, replay, DECAYS[decay])
        output, truth = replay.append(tokens)
        assert output.isfinite().all()
        assert_close(output, truth[torch.float64], tolerance)
        assert_close(replay.folded(), replay.true_state(), tolerance)
        replay.settle(0, count)
        replay.settle(1, count // 2)


@EVERY_OPERATOR
@pytest.mark.parametrize("decay", DECAYS)
def test_scan_takes_any_decay(operator: Operator, decay: str) -> None:
    geometry = GEOMETRIES[0]
    replay = Replay(operator, geometry, window=1)
    tokens = operator.draw(1, 150, geometry)
    with_decay(operator, tokens, replay, DECAYS[decay])
    output, state = operator.scan(tokens, replay.parameters, state=replay.state)
    true_output, true_state = operator.oracle(tokens, replay.parameters, replay.state)
    assert_close(output, true_output)
    assert_close(state, true_state)


@pytest.mark.no_poison
@EVERY_OPERATOR
def test_the_state_does_not_drift(operator: Operator) -> None:
    """2,000 steps, narrow records, a fold every 16 of them: no worse than updating a float32 state at every step.

    Narrow records cost nothing because both paths see the same narrow inputs. The factor is for the luck of rounding.
    """
    geometry, steps = Geometry(8, 2, 8, 16), 2000
    replay = Replay(operator, geometry, window=16, max_tokens=1, max_pending=0, dtype=torch.bfloat16)
    if operator.name == "mamba2":
        replay.parameters["A"].mul_(0.005)
    tokens = operator.draw(1, steps, geometry, torch.bfloat16)
    if operator.name == "gated_delta":
        tokens["g"].mul_(0.005)
    start, cursor = replay.state.clone(), replay.cursor
    for step in range(steps):
        folded = folds(cursor, 1, 16)
        arguments = {"state": replay.state, **replay.rings, **cursor, "folds": folded}
        operator.step(part(tokens, step, step + 1), replay.parameters, **arguments)
        cursor["base"] += folded
        cursor["committed"] += 1 - folded
    assert cursor["base"] == 16 * (steps // 16 - 1)
    operands = operator.fold_operands(replay.rings, replay.parameters)
    state = operator.kernel.folded_state(replay.state, *operands, base=cursor["base"], count=cursor["committed"])
    _, truth = operator.oracle(tokens, replay.parameters, start)
    _, eager = operator.oracle(tokens, replay.parameters, start, torch.float32)
    error, eager_error = (((s - truth).norm() / truth.norm()).item() for s in (state, eager))
    assert 1e-8 < eager_error < 5e-6, "the recurrence forgets too fast or too slowly to tell anything"
    assert error <= 1.5 * eager_error


@EVERY_OPERATOR
@pytest.mark.parametrize("poison", [NAN, float("inf")], ids=str)
def test_dead_slots_are_never_read(operator: Operator, poison: float) -> None:
    """Twice the same run, once with poison in every dead slot before each step: the same bits everywhere."""
    geometry, runs = GEOMETRIES[0], []
    for poisoned in (False, True):
        torch.manual_seed(1)
        replay = Replay(operator, geometry, window=7, first=(0, 5), dtype=torch.float32)
        bits = []
        for step, count in enumerate((1, 4, 8, 1, 2, 8, 8, 1, 1, 4, 1, 1)):
            if poisoned:
                for ring in replay.rings.values():
                    dead = ~replay.live().unsqueeze(1)
                    ring.masked_fill_(dead if ring.ndim == 3 else dead.unsqueeze(-1), poison)
            bits.append(replay.folded())
            output, _ = replay.append(operator.draw(2, count, geometry, torch.float32))
            bits += [output, replay.state.clone()]
            replay.settle(0, count if step % 3 else count // 2)
            if replay.pending[1] > 4:
                replay.settle(1, replay.pending[1] - 2, 1)
        runs.append(bits)
    assert all(torch.equal(clean, other) for clean, other in zip(*runs, strict=True))
    assert all(tensor.isfinite().all() for tensor in runs[1])


def test_derived_corrections_never_enter_a_fold() -> None:
    """NaN in all of `ring_d`: the flush of a step does not see it, nor does its read-out where nothing else lives."""
    operator, geometry, runs = GATED_DELTA, GEOMETRIES[0], []
    for poisoned in (False, True):
        torch.manual_seed(1)
        replay = Replay(operator, geometry, window=4, first=(3,))
        replay.append(operator.draw(1, 4, geometry))
        replay.settle_all()
        if poisoned:
            replay.rings["ring_d"].fill_(NAN)
        before = replay.state.clone()
        output, _ = replay.append(operator.draw(1, 1, geometry))
        assert not torch.equal(replay.state, before)
        runs.append((output, replay.state, replay.folded()))
    assert all(torch.equal(clean, other) for clean, other in zip(*runs, strict=True))
