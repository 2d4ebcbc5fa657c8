"""Fixed shapes: one compiled graph for decoding, replayed over flushes and calls."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import replay_transformers as rt
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, build_nemotron_h, greedy_without_cache, prompt

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]


def _compile_config(backend: str) -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend=backend, mode=None, dynamic=False)
    config._compile_all_devices = True
    return config


def _check_one_graph(model: Any, backend: str, window: int) -> None:
    """64 compiled steps over several flushes, and two more calls: one graph, and the right tokens."""
    arguments = {
        "max_new_tokens": 65,
        "do_sample": False,
        "cache_implementation": "replay_static",
        "cache_config": {"window": window},
        "compile_config": _compile_config(backend),
    }
    for call in range(3):
        inputs = prompt(2, 9, [0, 3], seed=call)
        with torch._dynamo.config.patch(error_on_recompile=True):
            output = model.generate(**inputs, **arguments)
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 65))
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_one_graph_without_recompilation(family: str) -> None:
    _check_one_graph(FAMILIES[family](), "aot_eager", window=7)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_on_both_families(family: str) -> None:
    _check_one_graph(FAMILIES[family](), "inductor", window=7)


def test_inductor_once() -> None:
    _check_one_graph(build_nemotron_h("M*"), "inductor", window=7)


def test_buffer_addresses_are_constant() -> None:
    model, inputs = FAMILIES["qwen3_5"](), prompt(2, 9, [0, 3])
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4), max_cache_len=64)
    arguments = {"max_new_tokens": 20, "do_sample": False, CACHE_ARGUMENT: cache}
    model.generate(**inputs, **arguments, num_beams=1)
    before = _addresses(cache)
    cache.reset()
    model.generate(**inputs, **arguments)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.flush()
    cache.reset()
    assert _addresses(cache) == before


def _addresses(cache: rt.ReplayCache) -> list[int]:
    tensors = [b for layer in cache.replay_layers for b in layer.buffers().values()]
    tensors += [b for layer in cache.attention_layers for b in (layer.keys, layer.values, layer.cumulative_length)]
    return [tensor.data_ptr() for tensor in [*tensors, *cache.cursor.tensors(), cache.cursor.early]]


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_prefill_in_compiled_chunks(family: str) -> None:
    model, inputs = FAMILIES[family](), prompt(2, 23, [0, 6])
    output = model.generate(
        **inputs,
        max_new_tokens=12,
        do_sample=False,
        cache_implementation="replay_static",
        cache_config={"window": 4},
        prefill_chunk_size=10,
        compile_config=_compile_config("aot_eager"),
    )
    assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12))


@pytest.mark.parametrize("implementation", [pytest.param("replay", marks=pytest.mark.slow), "replay_static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_users_own_compiled_model(family: str, implementation: str) -> None:
    model, inputs = FAMILIES[family](), prompt(2, 9, [0, 3])
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 20)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    output = model.generate(
        **inputs, max_new_tokens=20, do_sample=False, cache_implementation=implementation, cache_config={"window": 4}
    )
    assert torch.equal(output, truth)
    assert counters["stats"]["unique_graphs"] <= 4, "a Python counter in the cache would recompile at every step"
