"""CUDA graphs without inductor: captured once, replayed over flushes, other prompts and later calls.

States of tiny models are written through by "auto"; "triton" keeps records and folds them.
"""

import gc
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers.cursor import SPREAD_ROWS
from replay_transformers.patches.capture import recorded
from tests.support.flushes import Pointers, given_back
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import WITHOUT_EXPERTS, greedy_without_cache, prompt

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]

EVERY_IMPL = pytest.mark.parametrize("impl", ["auto", "triton"])
EVERY_MODEL = pytest.mark.parametrize("family", WITHOUT_EXPERTS)
PROMPT = 9


def _inputs(seed: int = 0, pads: tuple[int, ...] = (0, 1, 5)) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompt(len(pads), PROMPT, [*pads], seed=seed).items()}


def _arguments(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 40, "do_sample": False, "compile_config": CompileConfig(backend="cudagraphs"), **more}


@EVERY_IMPL
@EVERY_MODEL
def test_one_graph_for_all_steps_and_calls(family: str, impl: str, captures: list[torch.device]) -> None:
    model = WITHOUT_EXPERTS[family]().cuda()
    arguments = _arguments(cache_implementation="replay_static", cache_config={"window": 7, "impl": impl})
    allocated = []
    for seed in range(4):
        inputs = _inputs(seed)
        with given_back() as pointers:
            output = model.generate(**inputs, **arguments)
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 40))
        assert len(pointers) == 1
        pointers[0].check(impl, PROMPT, 7, 39)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert len(captures) == 1
    assert allocated[-1] == allocated[-2]


@EVERY_MODEL
def test_rows_that_flush_in_turn(family: str, captures: list[torch.device]) -> None:
    """In a large batch: one graph for steps in which other rows flush each time, and for the next call."""
    model, window, rows = WITHOUT_EXPERTS[family]().cuda(), 5, SPREAD_ROWS + 3
    arguments = _arguments(cache_implementation="replay_static", cache_config={"window": window, "impl": "triton"})
    arguments["max_new_tokens"] = 20
    for seed in (0, 3):  # of some others the two best logits are once as close as rounding
        inputs = _inputs(seed, tuple(row % 7 for row in range(rows)))
        with given_back() as pointers:
            output = model.generate(**inputs, **arguments)
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 20))
        assert len(pointers) == 1
        pointers[0].check("triton", PROMPT, window, 19)
        assert len(set(pointers[0].records)) == window
    assert len(captures) == 1


@EVERY_IMPL
@EVERY_MODEL
def test_the_state_advances_once_per_step(family: str, impl: str, captures: list[torch.device]) -> None:
    model, inputs = WITHOUT_EXPERTS[family]().cuda(), _inputs()
    states, kept = [], []
    for compiled in (True, False):
        config = rt.ReplayConfig(window=5, max_draft=0, impl=impl)
        cache = rt.ReplayCache(model.config, config, max_cache_len=64)
        arguments = _arguments(**{CACHE_ARGUMENT: cache}, return_dict_in_generate=True, output_logits=True)
        if not compiled:
            arguments |= {"compile_config": None, "disable_compile": True}
        kept.append(torch.stack(model.generate(**inputs, **arguments).logits))
        assert int(cache.get_seq_length()) == PROMPT + 39
        Pointers.of(cache).check(impl, PROMPT, 5, 39)
        states.append(cache.state(0))
    assert len(captures) == 1
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=2e-4)
    torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draws", [False, True], ids=["plain", "random"])
def test_a_capture_that_fails(draws: bool, captures: list[torch.device], caplog: pytest.LogCaptureFixture) -> None:
    """A forward that waits for the GPU runs as it is; random numbers and the next capture are as before."""

    def waits(values: torch.Tensor) -> tuple[torch.Tensor]:
        noise = torch.rand_like(values) if draws else 0.5
        return (values * (values.sum().item() + noise),)

    def doubles(values: torch.Tensor) -> tuple[torch.Tensor]:
        return (2 * values + 0 * torch.rand_like(values),)

    function, other = recorded(waits), recorded(doubles)
    for count in range(1, 5):
        values = torch.full((3,), float(count), device="cuda")
        (result,) = function(values)
        least = count * 3 * count
        assert ((result >= least) & (result <= least + count)).all()
    assert "cannot be captured" in caplog.text
    torch.manual_seed(0)
    first = torch.multinomial(torch.ones(50, device="cuda"), 20, replacement=True)
    torch.manual_seed(0)
    assert torch.equal(torch.multinomial(torch.ones(50, device="cuda"), 20, replacement=True), first)
    before = len(captures)
    for count in range(1, 5):
        values = torch.full((3,), float(count), device="cuda")
        assert torch.equal(other(values)[0], 2 * values)
    assert len(captures) == before + 1


def test_workspaces_of_products(captures: list[torch.device]) -> None:
    """A graph outlives an older one, also where somebody clears the workspaces that torch keeps."""
    torch.manual_seed(0)
    weight = torch.randn(8192, 96, device="cuda") / 90  # few sums of many terms: cuBLAS sums parts of them separately

    def product(values: torch.Tensor) -> tuple[torch.Tensor]:
        return (values @ weight,)

    values = torch.randn(4, 8192, device="cuda")
    expected = values @ weight
    older, newer = recorded(product), recorded(product)
    for step in (older, newer):
        for _ in range(2):
            torch.testing.assert_close(step(values)[0], expected, rtol=1e-4, atol=1e-4)
    assert len(captures) == 2
    del older, step
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    bystander = torch.zeros(2**25, device="cuda")  # more than a workspace
    torch.testing.assert_close(newer(values)[0], expected, rtol=1e-4, atol=1e-4)
    torch.cuda.synchronize()
    assert not bystander.any()
