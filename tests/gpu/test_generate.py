"""`generate` with replay caches on a GPU: the same tokens as without a cache, compiled with CUDA graphs as well.

States of tiny models are written through by "auto"; "triton" keeps records and folds them.
"""

from typing import Any

import pytest
import torch
from transformers.generation import utils

import replay_transformers as rt
from tests.support.flushes import given_back
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, build_nemotron_h, greedy_without_cache, prompt

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]

EVERY_IMPL = pytest.mark.parametrize("impl", ["auto", "triton"])
PROMPT = 9


def _inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompt(3, PROMPT, [0, 1, 5], seed=seed).items()}


@EVERY_IMPL
@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_decoding_without_a_cache(family: str, window: int, impl: str) -> None:
    model, inputs = FAMILIES[family]().cuda(), _inputs()
    arguments = {"cache_implementation": "replay", "cache_config": {"window": window, "impl": impl}}
    with given_back() as pointers:
        output = model.generate(**inputs, max_new_tokens=48, do_sample=False, **arguments)
    assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 48))
    assert len(pointers) == 1
    pointers[0].check(impl, PROMPT, window, 47)


@EVERY_IMPL
@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_shapes_under_cuda_graphs_and_another_prompt(family: str, impl: str) -> None:
    """Compiled as `generate` compiles by itself on a GPU; the second call replays the graphs of the first."""
    model = (
        build_nemotron_h("M*") if family == "nemotron_h" else FAMILIES[family](["linear_attention", "full_attention"])
    )
    model = model.cuda()
    arguments = {"cache_implementation": "replay_static", "cache_config": {"window": 7, "impl": impl}}
    for seed in range(2):
        inputs = _inputs(seed)
        with given_back() as pointers:
            output = model.generate(**inputs, max_new_tokens=40, do_sample=False, **arguments)
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 40))
        assert len(pointers) == 1
        pointers[0].check(impl, PROMPT, 7, 39)


@EVERY_IMPL
def test_memory_is_flat_over_calls_and_freed(impl: str) -> None:
    model = FAMILIES["qwen3_5"]().cuda()
    arguments = {"cache_implementation": "replay", "cache_config": {"window": 4, "impl": impl}}
    allocated = []
    for _ in range(6):
        model.generate(**_inputs(), max_new_tokens=20, do_sample=False, **arguments)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] == allocated[1]
    rt.disable()
    assert torch.cuda.memory_allocated() < allocated[-1]


@EVERY_IMPL
@pytest.mark.parametrize("steps", [0, 7])
def test_rollback_on_the_device(steps: int, impl: str) -> None:
    """Right after the prompt, and after single steps of which the oldest have been folded."""
    model, length = FAMILIES["nemotron_h"]("MM").cuda(), PROMPT + steps
    ids = prompt(3, length)["input_ids"].cuda()
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, max_draft=4, impl=impl))
    cache.activate_past_recording()
    with torch.no_grad():
        model(input_ids=ids[:, :PROMPT], **{CACHE_ARGUMENT: cache})
        scanned = cache.cursor.tensors()[0].clone()
        for place in range(PROMPT, length):
            model(input_ids=ids[:, place : place + 1], **{CACHE_ARGUMENT: cache})
        assert bool((cache.cursor.tensors()[0] > scanned).all()) == (steps > 0)
        cache.crop(torch.tensor([0, -1, -3], device="cuda"))
        expected = []
        for row, keep in enumerate((length, length - 1, length - 3)):
            fresh = rt.ReplayCache(model.config)
            model(input_ids=ids[row : row + 1, :keep], **{CACHE_ARGUMENT: fresh})
            expected.append(fresh.state(0))
    torch.testing.assert_close(cache.state(0), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not hasattr(utils, "DeferredStopCheck"), reason="transformers reads it at once before 5.24")
@EVERY_IMPL
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
def test_rows_that_end_early(implementation: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all rows are finished is read a step late, but not where the cache is returned: the tokens are equal."""
    made: list[str] = []
    for check in (utils.StopCheck, utils.DeferredStopCheck):
        monkeypatch.setattr(utils, check.__name__, _counted(check, made))
    model, inputs = build_nemotron_h("M*").cuda(), _inputs()
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
    arguments |= {"cache_implementation": implementation, "cache_config": {"window": 4, "impl": impl}}
    plain = model.generate(**inputs, **arguments)
    arguments |= {"eos_token_id": [int(plain[row, PROMPT + 7 * row + 3]) for row in range(3)], "pad_token_id": 0}
    made.clear()
    at_once = model.generate(**inputs, **arguments, return_dict_in_generate=True).sequences
    late = model.generate(**inputs, **arguments)
    assert made == ["StopCheck", "DeferredStopCheck"]
    assert torch.equal(late, at_once)
    assert late.shape[1] < plain.shape[1]


def _counted(check: type, made: list[str]) -> type:
    def build(self: Any, *arguments: Any) -> None:
        made.append(check.__name__)
        check.__init__(self, *arguments)

    return type(check.__name__, (check,), {"__init__": build})
