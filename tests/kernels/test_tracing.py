"""The references under torch.compile: one graph, whatever the cursor says, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from replay_transformers.kernels.causal_conv import reference as causal_conv
from tests.support.operators import EVERY_OPERATOR, GEOMETRIES, Operator, cursor, folds

WINDOW, CAPACITY = 7, 24
# nothing yet, pending only, no row due, some due, all due, wrapped around, positions beyond 32 bits
CURSORS = [
    cursor(*values)
    for values in [
        ([0, 0], [0, 0], [0, 0]),
        ([0, 2], [0, 0], [3, 0]),
        ([4, 2], [5, 1], [0, 4]),
        ([10, 3], [7, 2], [0, 1]),
        ([21, 23], [7, 5], [2, 6]),
        ([2**31 + 5, 2**33], [1, 6], [1, 0]),
    ]
]


@pytest.fixture(params=["eager", "aot_eager"], autouse=True)
def counter(request: pytest.FixtureRequest) -> CompileCounterWithBackend:
    """A backend that counts the graphs it gets."""
    return CompileCounterWithBackend(request.param)


def compare(function: Callable[..., Any], backend: Any, calls: list[dict[str, Any]], buffers: dict[str, Any]) -> None:
    """Every call, compiled and not, on copies of the same buffers: equal results, equal buffers."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for call in calls:
        one, two = ({name: tensor.clone() for name, tensor in buffers.items()} for _ in range(2))
        expected, got = function(**call, **one), compiled(**call, **two)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        for name in buffers:
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-12)
        assert any(not torch.equal(two[name], buffers[name]) for name in buffers)
    assert backend.frame_count == 1


def prepared(operator: Operator) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    geometry = GEOMETRIES[0]
    tokens, parameters = operator.draw(2, 2, geometry), operator.parameters(geometry)
    history = operator.draw(2, CAPACITY, geometry)
    rings = operator.rings(tokens, CAPACITY)
    sources = {"x": "x", "b": "B", "dt": "dt", "k": "k", "v": "v", "g": "g", "beta": "beta", "d": "v"}
    for name, ring in rings.items():
        ring.copy_(history[sources[name.removeprefix("ring_")]].transpose(1, 2))
    state = torch.randn(2, *operator.state_shape(geometry), dtype=torch.float64)
    return {**tokens, **parameters}, rings, {"state": state}


@EVERY_OPERATOR
def test_replay_step(operator: Operator, counter: CompileCounterWithBackend) -> None:
    inputs, rings, state = prepared(operator)
    calls = [{**inputs, **position, "folds": folds(position, 2, WINDOW)} for position in CURSORS]
    compare(operator.kernel.replay_step, counter, calls, {**rings, **state})


@EVERY_OPERATOR
def test_fold(operator: Operator, counter: CompileCounterWithBackend) -> None:
    inputs, rings, state = prepared(operator)
    parameters = {"A": inputs["A"]} if "A" in inputs else {}
    calls = [{**parameters, "base": c["base"], "count": c["committed"]} for c in CURSORS[2:]]
    records = {name: rings[name] for name in operator.ring_names}
    compare(operator.kernel.fold, counter, calls, {**records, **state})


def test_conv_step(counter: CompileCounterWithBackend) -> None:
    weight, bias = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    inputs, ring = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 9, 5, dtype=torch.float64)
    calls = [{"inputs": inputs, "weight": weight, "bias": bias, "position": c["base"]} for c in CURSORS]
    compare(causal_conv.conv_step, counter, calls, {"ring": ring})


@EVERY_OPERATOR
def test_a_compiled_step_flushes(operator: Operator, counter: CompileCounterWithBackend) -> None:
    """What the rows that are due, and only they, show in the checkpoint."""
    inputs, rings, state = prepared(operator)
    before = state["state"].clone()
    compiled = torch.compile(operator.kernel.replay_step, fullgraph=True, backend=counter)
    position = cursor([10, 3], [7, 2], [0, 1])
    compiled(**inputs, **position, **rings, **state, folds=folds(position, 2, WINDOW))
    assert not torch.equal(state["state"][0], before[0])
    assert torch.equal(state["state"][1], before[1])
