"""`generate` with replay caches on a GPU: the same tokens as without a cache, compiled with CUDA graphs as well."""

import pytest
import torch

import replay_transformers as rt
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, build_nemotron_h, greedy_without_cache, prompt

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]


def _inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompt(3, 9, [0, 1, 5], seed=seed).items()}


@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_decoding_without_a_cache(family: str, window: int) -> None:
    model, inputs = FAMILIES[family]().cuda(), _inputs()
    output = model.generate(
        **inputs, max_new_tokens=48, do_sample=False, cache_implementation="replay", cache_config={"window": window}
    )
    assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 48))


@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_shapes_under_cuda_graphs_and_another_prompt(family: str) -> None:
    """Compiled as `generate` compiles by itself on a GPU; the second call replays the graphs of the first."""
    model = (
        build_nemotron_h("M*") if family == "nemotron_h" else FAMILIES[family](["linear_attention", "full_attention"])
    )
    model = model.cuda()
    for seed in range(2):
        inputs = _inputs(seed)
        output = model.generate(
            **inputs,
            max_new_tokens=40,
            do_sample=False,
            cache_implementation="replay_static",
            cache_config={"window": 7},
        )
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 40))


def test_memory_is_flat_over_calls_and_freed() -> None:
    model = FAMILIES["qwen3_5"]().cuda()
    allocated = []
    for _ in range(6):
        model.generate(**_inputs(), max_new_tokens=20, do_sample=False, cache_implementation="replay")
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] == allocated[1]
    rt.disable()
    assert torch.cuda.memory_allocated() < allocated[-1]


def test_rollback_on_the_device() -> None:
    model = FAMILIES["nemotron_h"]("MM").cuda()
    ids = _inputs()["input_ids"]
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, max_draft=4))
    cache.activate_past_recording()
    with torch.no_grad():
        model(input_ids=ids, **{CACHE_ARGUMENT: cache})
        cache.crop(torch.tensor([0, -1, -3], device="cuda"))
        expected = []
        for row, keep in enumerate((9, 8, 6)):
            fresh = rt.ReplayCache(model.config)
            model(input_ids=ids[row : row + 1, :keep], **{CACHE_ARGUMENT: fresh})
            expected.append(fresh.state(0))
    torch.testing.assert_close(cache.state(0), torch.cat(expected), rtol=1e-5, atol=1e-5)
