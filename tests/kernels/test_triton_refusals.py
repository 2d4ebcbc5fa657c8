"""What the Triton kernels refuse: the message says what was got and what was expected, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.test_triton_conv import make
from tests.support.kernels import KERNELS, OPERATORS_IN_TRITON, bits, make_case
from tests.support.operators import Geometry, Operator

GEOMETRY = Geometry(2, 1, 5, 6)


def arguments(operator: Operator) -> dict[str, Any]:
    case = make_case(operator, GEOMETRY, 2, folds=[5, 0])
    return {**case.tokens, **case.parameters, **case.buffers, **case.position, "folds": case.folds}


def refused(function: Any, correct: dict[str, Any], name: str, wrong: Any, *words: str) -> None:
    """The call with one argument exchanged raises ValueError with these words and changes none of the others."""
    before = {key: value.clone() for key, value in correct.items() if torch.is_tensor(value)}
    with pytest.raises(ValueError, match=words[0] if wrong is correct[name] else name) as caught:
        function(**{**correct, name: wrong})
    for word in words:
        assert word in str(caught.value)
    assert all(torch.equal(bits(correct[key]), bits(value)) for key, value in before.items())


NAMES = {
    "mamba2": "dt C A D state ring_x ring_b ring_dt base committed pending folds",
    "gated_delta": "k g beta state ring_v ring_g ring_beta ring_d base committed pending folds",
}


def names(operator: Operator) -> list[str]:
    return NAMES[operator.name].split()


@OPERATORS_IN_TRITON
def test_shapes(operator: Operator) -> None:
    correct = arguments(operator)
    for name in names(operator):
        tensor = correct[name]
        wrong = torch.cat([tensor, tensor[-1:]])
        words = (f"shape {list(tensor.shape)}", f"got {list(wrong.shape)}")
        refused(KERNELS[operator.name].replay_step, correct, name, wrong, *words)


@OPERATORS_IN_TRITON
def test_dtypes(operator: Operator) -> None:
    correct = arguments(operator)
    for name in names(operator):
        pointer = name in ("base", "committed", "pending", "folds")
        wrong = correct[name].int() if pointer else correct[name].double()
        expected = "torch.int64" if pointer else "torch.bfloat16"
        refused(KERNELS[operator.name].replay_step, correct, name, wrong, str(wrong.dtype), expected)


@OPERATORS_IN_TRITON
def test_devices(operator: Operator) -> None:
    correct = arguments(operator)
    for name in names(operator):
        refused(KERNELS[operator.name].replay_step, correct, name, correct[name].to("meta"), "got meta")


@OPERATORS_IN_TRITON
def test_buffers_that_are_not_contiguous(operator: Operator) -> None:
    correct = arguments(operator)
    for name in names(operator):
        if name == "state" or name.startswith("ring"):
            wrong = correct[name].transpose(0, -1).contiguous().transpose(0, -1)
            refused(KERNELS[operator.name].replay_step, correct, name, wrong, "contiguous", str(wrong.stride()))


@OPERATORS_IN_TRITON
def test_vectors_with_gaps(operator: Operator) -> None:
    """Their strides are not passed on: they would be read wrongly, without a word."""
    correct = arguments(operator)
    for name in names(operator):
        if correct[name].ndim == 1:
            wrong = torch.stack([correct[name]] * 2, dim=1)[:, 0]
            refused(KERNELS[operator.name].replay_step, correct, name, wrong, "contiguous", "got stride 2")


@OPERATORS_IN_TRITON
def test_heads_that_do_not_make_whole_groups(operator: Operator) -> None:
    """They would be read from beyond the end of the tensors."""
    correct = arguments(operator)
    shared = ("B", "C", "ring_b") if operator.name == "mamba2" else ("q", "k", "ring_k")
    for name in shared:
        dim = 1 if name.startswith("ring") else 2
        correct[name] = torch.cat([correct[name]] * 3, dim=dim)
    refused(KERNELS[operator.name].replay_step, correct, "base", correct["base"], "2 heads", "got 3")


def test_convolutions() -> None:
    correct, step = make(2), KERNELS["causal_conv"].conv_step
    refused(step, correct, "bias", correct["bias"][:-1], "shape [6]", "got [5]")
    refused(step, correct, "position", correct["position"][:1], "shape [2]", "got [1]")
    refused(step, correct, "ring", correct["ring"][:1], "shape [2, 5, 6]", "got [1, 5, 6]")
    refused(step, correct, "weight", correct["weight"][:-1], "shape [6, 4]", "got [5, 4]")
    refused(step, correct, "weight", correct["weight"].double(), "torch.float64", "torch.bfloat16")
    refused(step, correct, "position", correct["position"].int(), "torch.int32", "torch.int64")
    refused(step, correct, "ring", correct["ring"].to("meta"), "got meta")
    wrong = correct["ring"].transpose(1, 2).contiguous().transpose(1, 2)
    refused(step, correct, "ring", wrong, "contiguous", str(wrong.stride()))
    refused(step, correct, "activation", "gelu", "'silu' or None", "'gelu'")
