"""Attention of few tokens on a replay cache: transformers' results, without a copy of the keys per query head."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from transformers.integrations import sdpa_attention
from transformers.models.qwen3_5 import modeling_qwen3_5

import replay_transformers as rt
from replay_transformers.patches import attention
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import ALL_FAMILIES, FAMILIES, greedy_without_cache, prompt

# several query heads per key head, several key heads
HEADS = {
    "qwen3_5": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "nemotron_h": {"num_attention_heads": 6, "num_key_value_heads": 2},
}
GENERATE = {"do_sample": False, "max_new_tokens": 12}
REPLAY = {"cache_config": {"window": 3}, **GENERATE}


@pytest.fixture
def unexpanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of new tokens of every attention that ran without expanded keys."""
    calls: list[int] = []
    decide = attention._would_expand

    def counted(module: Any, query: torch.Tensor, *args: Any) -> bool:
        if decided := decide(module, query, *args):
            calls.append(query.shape[2])
        return decided

    monkeypatch.setattr(attention, "_would_expand", counted)
    return calls


def _forbid_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("keys or values were expanded")

    for name in ("repeat_kv", "pack_gqa"):
        if hasattr(sdpa_attention, name):
            monkeypatch.setattr(sdpa_attention, name, refuse)


def _operands(tokens: int, groups: int, length: int, mask: str) -> tuple[Any, ...]:
    query = torch.randn(3, tokens, 2 * groups, 8, dtype=torch.float64).transpose(1, 2)  # strided, as models pass it
    key, value = (torch.randn(3, 2, length, width, dtype=torch.float64) for width in (8, 12))
    keep = torch.rand(3, 1, tokens, length) < 0.6
    keep[..., 0] = True
    if mask == "float":
        return query, key, value, torch.zeros(keep.shape, dtype=torch.float64).masked_fill_(~keep, -1e9)
    if mask == "one row":
        return query, key, value, keep[:1]
    if mask == "one query":
        return query, key, value, keep[:, :, :1]
    return query, key, value, keep if mask == "bool" else None


@pytest.mark.core
@pytest.mark.parametrize("mask", ["bool", "float", "one row", "one query"])
@pytest.mark.parametrize("groups", [2, 5])
@pytest.mark.parametrize("tokens", [1, 2, 5, attention.MAX_TOKENS, attention.MAX_TOKENS + 1])
def test_equals_the_original(
    tokens: int, groups: int, mask: str, unexpanded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    operands = _operands(tokens, groups, 19, mask)
    truth, _ = sdpa_attention.sdpa_attention_forward(module, *operands, scaling=0.3)
    few = tokens <= attention.MAX_TOKENS
    if few:
        _forbid_expansion(monkeypatch)
    got, weights = attention.few_query_attention(module, *operands, scaling=0.3, **{attention.REPLAY_FLAG: True})
    assert unexpanded == [tokens] * few
    assert weights is None
    assert got.is_contiguous()
    # float64: sums of 19 products of numbers near 1
    torch.testing.assert_close(got, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "head_dim", "expands"), [(1, 8, False), (1, 264, True), (4, 8, False), (4, 264, False)]
)
def test_without_a_mask(tokens: int, head_dim: int, expands: bool, unexpanded: list[int]) -> None:
    """The original takes `enable_gqa` up to 256; several tokens need its causal mask."""
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    query = torch.randn(2, 6, tokens, head_dim, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 4, head_dim, dtype=torch.float64)
    truth, _ = sdpa_attention.sdpa_attention_forward(module, query, key, value, None)
    got, _ = attention.few_query_attention(module, query, key, value, None, **{attention.REPLAY_FLAG: True})
    assert unexpanded == [tokens] * expands
    torch.testing.assert_close(got, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("unusual", ["position_bias", "mask per head", "groups of one"])
def test_what_is_left_to_the_original(unusual: str, unexpanded: list[int]) -> None:
    groups = 1 if unusual == "groups of one" else 2
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    query, key, value, mask = _operands(2, groups, 7, "bool")
    extra = {"position_bias": torch.randn(1, 4, 2, 7, dtype=torch.float64)} if unusual == "position_bias" else {}
    mask = mask.expand(-1, 4, -1, -1) if unusual == "mask per head" else mask
    truth, _ = sdpa_attention.sdpa_attention_forward(module, query, key, value, mask, **extra)
    flag = {attention.REPLAY_FLAG: True}
    got, _ = attention.few_query_attention(module, query, key, value, mask, **extra, **flag)
    assert not unexpanded
    assert torch.equal(got, truth)


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_does_not_expand(
    family: str, implementation: str, unexpanded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES[family](**HEADS[family])
    inputs = prompt(3, attention.MAX_TOKENS + 4, [0, 5, 2])
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    stock = model.generate(**inputs, **GENERATE)
    assert torch.equal(stock, truth)
    expand = sdpa_attention.repeat_kv
    expanded = []
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda states, n: expanded.append(1) or expand(states, n))
    with rt.enable():
        output = model.generate(**inputs, cache_implementation=implementation, **REPLAY)
    assert torch.equal(output, truth)
    assert unexpanded == [1] * 11
    assert len(expanded) == 2, "keys and values of the prompt, and nothing after it"


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_blocks_of_tokens(family: str, unexpanded: list[int]) -> None:
    """As a verification of drafts: several tokens behind a padded prompt, in every family."""
    model = ALL_FAMILIES[family]()
    inputs = prompt(2, 14, [0, 3])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, max_draft=4), max_cache_len=32)
    got = []
    with rt.enable(), torch.no_grad():
        truth = model(**inputs, position_ids=position_ids, use_cache=False).logits
        for start, stop in ((0, 8), (8, 13), (13, 14)):
            block = {"attention_mask": mask[:, :stop], "position_ids": position_ids[:, start:stop]}
            got.append(model(ids[:, start:stop], **block, **{CACHE_ARGUMENT: cache}).logits)
    assert unexpanded == [8, 5, 1]
    # of padded tokens nothing is promised
    real = mask.bool()
    torch.testing.assert_close(torch.cat(got, 1)[real], truth[real], rtol=0, atol=2e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_implementations_and_the_configuration_are_left_alone(
    implementation: str, unexpanded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = FAMILIES["qwen3_5"](), prompt(2, 7, [0, 2])
    model.set_attn_implementation(implementation)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    seen = []
    eager = modeling_qwen3_5.eager_attention_forward
    monkeypatch.setattr(
        modeling_qwen3_5, "eager_attention_forward", lambda *args, **kw: seen.append(kw.keys()) or eager(*args, **kw)
    )
    with rt.enable():
        assert torch.equal(model.generate(**inputs, cache_implementation="replay", **REPLAY), truth)
        assert model.config._attn_implementation == implementation
    assert bool(unexpanded) is (implementation == "sdpa")
    assert bool(seen) is (implementation == "eager")
    assert not any(attention.REPLAY_FLAG in keywords for keywords in seen)


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_other_caches_never_come_here(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = FAMILIES[family](), prompt(2, 7, [0, 2])

    def refuse(*args: Any) -> None:
        raise AssertionError("asked about a cache that is not a replay cache")

    monkeypatch.setattr(attention, "_would_expand", refuse)
    for implementation in ("static", None):
        arguments = {**inputs, **GENERATE, "cache_implementation": implementation}
        arguments |= {"return_dict_in_generate": True, "output_logits": True}
        before = torch.stack(model.generate(**arguments).logits)
        with rt.enable():
            during = torch.stack(model.generate(**arguments).logits)
        assert torch.equal(before, during)


def test_an_attention_function_of_the_users_own(monkeypatch: pytest.MonkeyPatch, unexpanded: list[int]) -> None:
    """Registered under the name `sdpa`, before or after `enable`."""
    model, inputs = FAMILIES["qwen3_5"](), prompt(2, 7, [0, 2])
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return sdpa_attention.sdpa_attention_forward(*args, **kwargs)

    with rt.enable():
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", own)
        assert torch.equal(model.generate(**inputs, cache_implementation="replay", **REPLAY), truth)
    with rt.enable():
        assert torch.equal(model.generate(**inputs, cache_implementation="replay", **REPLAY), truth)
        monkeypatch.undo()
        table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        table["sdpa"] = own
        try:
            assert torch.equal(model.generate(**inputs, cache_implementation="replay", **REPLAY), truth)
        finally:
            del table["sdpa"]
    assert len(calls) == 3 * 12
    assert not unexpanded


def test_threads_do_not_tell_each_other(unexpanded: list[int]) -> None:
    """One thread decodes on a replay cache while another one uses a stock cache."""
    models = [FAMILIES["qwen3_5"](seed=seed) for seed in (0, 1)]
    inputs = prompt(2, 7, [0, 2])
    alone = [model.generate(**inputs, **GENERATE, cache_implementation="static") for model in models]
    outputs: list[torch.Tensor | None] = [None, None]
    start = threading.Barrier(2)

    def work(index: int, arguments: dict[str, Any]) -> None:
        for _ in range(3):
            start.wait(timeout=60)
            outputs[index] = models[index].generate(**inputs, **arguments)

    with rt.enable():
        threads = [
            threading.Thread(target=work, args=(0, {**REPLAY, "cache_implementation": "replay"})),
            threading.Thread(target=work, args=(1, {**GENERATE, "cache_implementation": "static"})),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(output, truth) for output, truth in zip(outputs, alone, strict=True))
    assert len(unexpanded) == 3 * 12


@pytest.mark.core
def test_disable_puts_the_table_back() -> None:
    before = modeling_qwen3_5.ALL_ATTENTION_FUNCTIONS
    assert before is transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    with rt.enable():
        assert modeling_qwen3_5.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is attention.few_query_attention
        assert list(modeling_qwen3_5.ALL_ATTENTION_FUNCTIONS) == list(before)
        assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS is before
    assert modeling_qwen3_5.ALL_ATTENTION_FUNCTIONS is before
    assert before.get_interface("sdpa", None) is sdpa_attention.sdpa_attention_forward


@pytest.mark.no_poison
@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_whole_and_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES[family](**HEADS[family])
    inputs = prompt(2, 9, [0, 3])
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    _forbid_expansion(monkeypatch)
    compiled = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None, dynamic=False)
    compiled._compile_all_devices = True
    with rt.enable(), torch._dynamo.config.patch(error_on_recompile=True):
        arguments = {**REPLAY, "cache_implementation": "replay_static", "compile_config": compiled}
        assert torch.equal(model.generate(**inputs, **arguments), truth)
    assert counters["stats"]["unique_graphs"] == 1
