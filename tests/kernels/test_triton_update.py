"""The eager updates in Triton against the scans of the references, one token per row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replay_transformers.kernels import validation
from replay_transformers.kernels.validation import is_far
from tests.support.kernels import DEVICE, KERNELS, assert_as_good, bits
from tests.support.operators import EVERY_OPERATOR, GEOMETRIES, Geometry, Operator, Tensors

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def make(operator: Operator, geometry: Geometry, dtype: torch.dtype) -> tuple[Tensors, Tensors, torch.Tensor]:
    tokens = {name: tensor.to(DEVICE) for name, tensor in operator.draw(2, 1, geometry, dtype).items()}
    parameters = {name: tensor.to(DEVICE) for name, tensor in operator.parameters(geometry, torch.float32).items()}
    return tokens, parameters, torch.randn(2, *operator.state_shape(geometry), device=DEVICE)


def widened(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


def run(kernel: Any, tokens: Tensors, parameters: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state = state.clone()
    return kernel.update(*tokens.values(), *parameters.values(), state=state), state


@EVERY_OPERATOR
@pytest.mark.parametrize("geometry", GEOMETRIES[:4], ids=str)
@pytest.mark.parametrize("checkpoint", DTYPES)
def test_output_and_state(operator: Operator, geometry: Geometry, checkpoint: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tokens, parameters, state = make(operator, geometry, dtype)
        state = state.to(DTYPES[checkpoint])
        got = run(KERNELS[operator.name], tokens, parameters, state)
        narrow = run(operator.kernel, tokens, parameters, state)
        exact = run(operator.kernel, widened(tokens), widened(parameters), state.double())
        for mine, reference, truth in zip(got, narrow, exact, strict=True):
            assert_as_good(mine, truth, reference)


@EVERY_OPERATOR
def test_several_steps_are_the_recurrence(operator: Operator) -> None:
    geometry = GEOMETRIES[0]
    tokens, parameters, state = make(operator, geometry, torch.float32)
    mine, exact = state.clone(), state.double()
    for step in range(5):
        torch.manual_seed(step)
        tokens = {name: tensor.to(DEVICE) for name, tensor in operator.draw(2, 1, geometry, torch.float32).items()}
        KERNELS[operator.name].update(*tokens.values(), *parameters.values(), state=mine)
        _, exact = operator.scan(widened(tokens), widened(parameters), state=exact)
    assert (mine.double() - exact).norm() <= 5 * 2**-23 * exact.norm()  # one rounding and a few products a step


@EVERY_OPERATOR
def test_strides_do_not_matter(operator: Operator) -> None:
    tokens, parameters, state = make(operator, GEOMETRIES[0], torch.float32)
    strided = {}
    for name, tensor in tokens.items():
        spaced = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), float("nan"), device=DEVICE)
        strided[name] = spaced[..., 1::2][..., : tensor.shape[-1]].copy_(tensor)
    for mine, other in zip(
        run(KERNELS[operator.name], strided, parameters, state),
        run(KERNELS[operator.name], tokens, parameters, state),
        strict=True,
    ):
        assert torch.equal(bits(mine), bits(other))


@EVERY_OPERATOR
def test_counting_in_int64_changes_nothing(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(operator, GEOMETRIES[0], torch.float32)
    near = run(KERNELS[operator.name], *case)
    monkeypatch.setattr(validation, "FAR", 1)
    assert is_far(torch.empty(2))
    assert not is_far(torch.empty(1))
    for mine, other in zip(run(KERNELS[operator.name], *case), near, strict=True):
        assert torch.equal(bits(mine), bits(other))


def test_what_is_far() -> None:
    """By the last element's distance, whatever the order of dimensions."""
    row = torch.empty(1, device="meta").expand(2**31 - 1)
    assert not is_far(row, torch.empty(2, 2**30, device="meta"))
    assert is_far(row, torch.empty(2**31 + 1, device="meta"))
    assert is_far(torch.empty(2**16, 2**15 + 1, device="meta").T)


@EVERY_OPERATOR
@pytest.mark.parametrize("fault", ["two tokens", "float64", "strided state"])
def test_refusals_change_nothing(operator: Operator, fault: str) -> None:
    tokens, parameters, state = make(operator, GEOMETRIES[0], torch.float32)
    if fault == "two tokens":
        tokens = {name: tensor.repeat_interleave(2, dim=1) for name, tensor in tokens.items()}
    elif fault == "float64":
        tokens = widened(tokens)
    else:
        state = state.transpose(-1, -2).contiguous().transpose(-1, -2)
    before = state.clone()
    with pytest.raises(ValueError, match="must"):
        KERNELS[operator.name].update(*tokens.values(), *parameters.values(), state=state)
    assert torch.equal(state, before)
