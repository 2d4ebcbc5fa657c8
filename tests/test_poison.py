from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import poison

ALLOCATIONS = {
    "empty": lambda dtype: torch.empty(3, 2, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 2, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((3, 2), (2, 1), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(3, 2),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided((3, 2), (2, 1)),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_floating_memory_is_nan(name: str, dtype: torch.dtype) -> None:
    tensor = ALLOCATIONS[name](dtype)
    assert tensor.shape == (3, 2)
    assert tensor.dtype == dtype
    wide = torch.complex64 if dtype.is_complex else torch.float32
    assert tensor.to(wide).isnan().all()


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integer_memory_is_recognisable(name: str, dtype: torch.dtype) -> None:
    assert (ALLOCATIONS[name](dtype) == poison.fill_value(dtype)).all()


@pytest.mark.no_poison
def test_the_marker_switches_it_off() -> None:
    assert not hasattr(torch.empty, "__wrapped__")
    assert not hasattr(torch.Tensor.new_empty, "__wrapped__")


def test_compiled_code_is_left_alone() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x) + x.new_empty(x.shape).fill_(1) + torch.empty(x.shape).zero_()

    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), torch.full((3,), 2.0))
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), torch.full((3,), 2.0))
    assert len(graphs) == 1
    assert "nan" not in graphs[0].code


def test_inference_mode_gradients_and_copies_keep_working() -> None:
    with torch.inference_mode():
        assert torch.empty(2).isnan().all()
    parameter = torch.empty(2, requires_grad=True)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert copy.deepcopy(torch.nn.Linear(2, 2)).weight.isfinite().all()
    assert torch.empty(2, device="meta").is_meta


@given(st.integers(1, 4))
def test_hypothesis_accepts_the_fixtures(size: int) -> None:
    assert torch.empty(size).isnan().all()


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1
