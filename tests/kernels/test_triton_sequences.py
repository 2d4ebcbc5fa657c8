"""Sequences of steps in Triton against the recurrence; compiled steps; what the operators declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from replay_transformers.kernels.launch import Launch, override
from tests.support.kernels import DEVICE, KERNELS, OPERATORS_IN_TRITON, Case, assert_as_good, make_case, with_triton
from tests.support.operators import Geometry, Operator, folds
from tests.support.replay import Replay

SMALL = Geometry(1, 1, 5, 6)


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    with override("mamba2", Launch(16, 1, 4)), override("gated_delta", Launch(16, 1, 4)):
        yield


# tokens of a step, and how many of what is pending then each row accepts and leaves pending; the others are rejected
STEPS = [
    (1, [(1, 0), (1, 0)]),
    (2, [(2, 0), (1, 1)]),
    (1, [(1, 0), (0, 2)]),
    (4, [(1, 0), (3, 1)]),
    (1, [(1, 0), (2, 0)]),
    (1, [(1, 0), (1, 0)]),
    (2, [(0, 2), (2, 0)]),
    (4, [(6, 0), (0, 0)]),
    (2, [(1, 0), (2, 0)]),
]


@pytest.mark.skipif(DEVICE == "cuda", reason="steps on the CPU, in the interpreter")
@OPERATORS_IN_TRITON
@pytest.mark.parametrize(("window", "dtype"), [(1, torch.float32), (4, torch.bfloat16), (5, torch.float32)], ids=str)
def test_steps_equal_the_recurrence(operator: Operator, window: int, dtype: torch.dtype) -> None:
    """Over three windows and more, rows apart from each other, with rejections: outputs and the state behind them."""
    results = {}
    for name, stepped in (("triton", with_triton(operator)), ("reference", operator)):
        torch.manual_seed(3)
        both = (torch.float64, torch.float32)
        replay = Replay(stepped, SMALL, window, first=(0, 2**31 - 3), dtype=dtype, oracle_dtypes=both)
        outputs, truths, eager = [], [], []
        flushes = [0, 0]
        for count, verdicts in STEPS:
            flushes = [n + due for n, due in zip(flushes, replay.due(count), strict=True)]
            output, truth = replay.append(operator.draw(2, count, SMALL, dtype))
            outputs.append(output.flatten())
            truths.append(truth[torch.float64].flatten())
            eager.append(truth[torch.float32].flatten())
            for row, verdict in enumerate(verdicts):
                replay.settle(row, *verdict)
        assert min(flushes) >= 3
        states = (replay.true_state(), replay.true_state(torch.float32))
        results[name] = (torch.cat(outputs), replay.folded(), torch.cat(truths), torch.cat(eager).to(dtype), *states)
    output, state, truth, eager, true_state, eager_state = results["triton"]
    assert_as_good(output, truth, results["reference"][0], eager)
    assert_as_good(state, true_state, results["reference"][1], eager_state)


def two_steps(operator: Operator, count: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function of buffers that steps twice, the second time with its rows due; and its buffers."""
    case = make_case(operator, SMALL, count, committed=(5, 2), pending=(0, 3), capacity=24, folds=None)
    kernel = KERNELS[operator.name]

    def function(base: Any, committed: Any, pending: Any, **buffers: Any) -> Any:
        operands = [*case.tokens.values(), *case.parameters.values()]
        position = {"base": base, "committed": committed, "pending": pending}
        first = kernel.replay_step(*operands, **buffers, **position, folds=None, max_records=20)
        position["committed"] = committed + count
        due = folds(position, count, window=12)
        buffers["state"].mul_(0.5)
        second = kernel.replay_step(*operands, **buffers, **position, folds=due, max_records=20)
        return first, second, buffers["state"].sum()

    return function, {**case.position, **case.buffers}


@OPERATORS_IN_TRITON
def test_compiled_steps_write_the_same_bits(operator: Operator) -> None:
    """Two steps and a change of the state between them in one graph, functionalised; another cursor, the same graph."""
    function, buffers = two_steps(operator, 1)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    states = []
    for committed, expected in ([5, 2], [False, False]), ([11, 2], [True, False]):
        one, two = ({name: tensor.clone() for name, tensor in buffers.items()} for _ in range(2))
        for copy in (one, two):
            copy["committed"].copy_(torch.tensor(committed))
            copy |= {name: tensor.nan_to_num_(1.0) for name, tensor in copy.items() if tensor.is_floating_point()}
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            for got, wanted in zip(compiled(**two), function(**one), strict=True):
                assert torch.equal(got, wanted)
        assert all(torch.equal(two[name], one[name]) for name in one)
        flushed = [not torch.equal(two["state"][row], buffers["state"][row] * 0.5) for row in range(2)]
        assert flushed == expected
        states.append(two["state"])


def operands(case: Case) -> tuple[Any, ...]:
    """As the registered operators take them."""
    fixed = [*case.tokens.values(), *case.parameters.values(), *case.buffers.values(), *case.position.values()]
    return (*(tensor.nan_to_num() for tensor in fixed), case.folds, 20)


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("due", [[5, 0], None], ids=["folds", "no folds"])
def test_the_registered_operator_is_as_declared(operator: Operator, due: list[int] | None) -> None:
    """What it mutates, and its fake, which knows shape, dtype and layout of the output."""
    case = make_case(operator, SMALL, 1, folds=due, dtype=torch.bfloat16)
    torch.library.opcheck(KERNELS[operator.name]._operator, operands(case))


def test_the_registered_convolution_is_as_declared() -> None:
    inputs, ring = torch.randn(2, 3, 5, device=DEVICE), torch.randn(2, 9, 5, device=DEVICE)
    weight, position = torch.randn(5, 4, device=DEVICE), torch.tensor([1, 40], device=DEVICE)
    for bias in (None, torch.randn(5, device=DEVICE)):
        torch.library.opcheck(KERNELS["causal_conv"]._operator, (inputs, weight, bias, ring, position, True))


def test_a_compiled_convolution_writes_its_ring() -> None:
    weight, kernel = torch.randn(5, 4, device=DEVICE), KERNELS["causal_conv"]

    def function(inputs: torch.Tensor, ring: torch.Tensor, position: torch.Tensor) -> Any:
        first = kernel.conv_step(inputs, weight, None, ring=ring, position=position)
        return first, kernel.conv_step(first, weight, None, ring=ring, position=position + 2), ring.sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    inputs, ring = torch.randn(2, 2, 5, device=DEVICE), torch.randn(2, 9, 5, device=DEVICE)
    for start in ([0, 7], [1, 2**33]):
        one, two, position = ring.clone(), ring.clone(), torch.tensor(start, device=DEVICE)
        for got, wanted in zip(compiled(inputs, two, position), function(inputs, one, position), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(one, two)
        assert not torch.equal(one, ring)
