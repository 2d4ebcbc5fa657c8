"""Ring and flush: long runs, far positions, and a flush between a draft and its verdict."""

from __future__ import annotations

import math

import pytest
import torch

from replay_transformers import ReplayConfig
from replay_transformers.cursor import Cursor
from replay_transformers.geometry import LayerGeometry
from replay_transformers.layers import LAYER_CLASSES
from tests.reports.phases import EVERY_FAMILY, EVERY_PHASE, assert_holds, at_phase
from tests.support.cached import feed, ids, model_for
from tests.support.operators import EVERY_OPERATOR, Geometry, Operator, Tensors, part

STEPS, REPORTS = 4000, 4
GEOMETRY = Geometry(heads=4, groups=2, head_dim=8, state_dim=16)


def state_errors(operator: Operator, checkpoint: str, tokens: Tensors, parameters: Tensors, every: int) -> list[float]:
    """A layer of the cache steps through bfloat16 tokens; its state's relative error after every so many."""
    geometry = LayerGeometry(operator.name, GEOMETRY.heads, GEOMETRY.groups, GEOMETRY.head_dim, GEOMETRY.state_dim, 4)
    config = ReplayConfig(window=16, max_draft=0, checkpoint=checkpoint)
    cursor = Cursor(config)
    layer = LAYER_CLASSES[operator.name](geometry, config, cursor)
    layer.allocate(1, torch.bfloat16, torch.device("cpu"))
    truth, errors = torch.zeros_like(layer.checkpoint, dtype=torch.float64), []
    for start in range(0, tokens[operator.log_decay].shape[1], every):
        piece = part(tokens, start, start + every)
        for step in range(every):
            cursor.begin(1, 1, torch.device("cpu"))
            layer.step(*part(piece, step, step + 1).values(), *parameters.values())
        _, truth = operator.oracle(piece, parameters, truth)
        state = layer.state()
        errors.append(((state - truth).norm() / truth.norm()).item())
    return errors


@pytest.mark.no_poison
@EVERY_OPERATOR
def test_the_state_drifts_no_faster_than_eager_decoding(operator: Operator) -> None:
    """Fault: over thousands of steps with narrow records the state's error grows faster than the eager path's."""
    tokens, parameters = operator.draw(1, STEPS, GEOMETRY, torch.bfloat16), operator.parameters(GEOMETRY, torch.float32)
    slow = parameters["A"] if operator.name == "mamba2" else tokens["g"]
    slow.mul_(0.005)  # so little is forgotten that errors add up
    every = STEPS // REPORTS
    errors = state_errors(operator, "float32", tokens, parameters, every)
    state = torch.zeros(1, *operator.state_shape(GEOMETRY))
    eager, truth, eager_errors = state, state.double(), []
    for start in range(0, STEPS, every):
        piece = part(tokens, start, start + every)
        _, truth = operator.oracle(piece, parameters, truth)
        _, eager = operator.oracle(piece, parameters, eager, torch.float32)
        eager_errors.append(((eager - truth).norm() / truth.norm()).item())
    # both are float32 sums of the same terms; 1.5 is for the luck of rounding
    assert all(error <= 1.5 * its for error, its in zip(errors, eager_errors, strict=True)), (errors, eager_errors)
    assert errors[-1] / errors[0] <= 1.5 * eager_errors[-1] / eager_errors[0], (errors, eager_errors)
    # what a rounded checkpoint would do: the test can tell
    assert state_errors(operator, "bfloat16", part(tokens, 0, 200), parameters, 200)[0] > 100 * max(errors)


@pytest.mark.usefixtures("enabled")
@EVERY_FAMILY
@EVERY_PHASE
def test_positions_may_be_beyond_32_bits(family: str, phase: int) -> None:
    """Fault: position arithmetic in 32 bits picks other slots once a sequence, or an offset, is long enough."""
    model = model_for(family)
    cache, _ = at_phase(model, phase, rows=2, max_draft=5)
    slots, inputs = cache.replay_config.capacity, cache.replay_layers[0].conv_ring.shape[1]
    rounds = math.lcm(slots, inputs)  # every slot of both rings stays where it was
    far = cache.fork()
    far.cursor.base.add_(torch.tensor([2**31 // rounds, 2**33 // rounds]) * rounds)
    for number, rejected in enumerate([0, 5, 2, 1, 5, 0, 3, 4]):  # around every ring more than twice
        draft = ids(2, 6, seed=number)
        one, two = (feed(model, each, draft, *([6] if number % 2 else [1] * 6)) for each in (cache, far))
        assert torch.equal(one, two)
        cache.crop(-rejected)
        far.crop(-rejected)
    assert far.cursor.lengths().min() > 2**31 - rounds
    assert cache.cursor.base.min() > 2 * slots


@pytest.mark.usefixtures("enabled")
@EVERY_FAMILY
@EVERY_PHASE
@pytest.mark.parametrize("rejected", [0, 1, 5])
def test_a_flush_before_the_verdict(family: str, phase: int, rejected: int) -> None:
    """Fault: a flush that is forced at some phase folds undecided tokens, or makes them decided."""
    model = model_for(family)
    cache, seen = at_phase(model, phase, max_draft=5)
    draft = ids(1, 5, seed=50)
    for piece in draft.split([2, 3], dim=1):
        feed(model, cache, piece, piece.shape[1])
        cache.flush()
    assert cache.cursor.pending.tolist() == [5]
    cache.crop(-rejected)
    assert_holds(model, cache, torch.cat([seen, draft[:, : 5 - rejected]], dim=1))
