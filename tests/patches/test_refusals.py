"""Bad calls get a clear error and leave cache and model unchanged."""

from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, build_nemotron_h, build_qwen3_5, cached_forward, prompt

pytestmark = pytest.mark.usefixtures("enabled")


def _generate(model: Any, **arguments: Any) -> Any:
    return model.generate(**(prompt(1, 5) | {"max_new_tokens": 3, "do_sample": False} | arguments))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windw": 8}, r"unknown keys \['windw'\]"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"window": "8"}, "window must be an int"),
        ([("window", 8)], "cache_config must be a dict"),
        (rt.ReplayConfig(), "cache_config must be a dict"),
    ],
    ids=["unknown-key", "out-of-range", "wrong-type", "not-a-dict", "an-object"],
)
def test_bad_cache_config(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _generate(build_qwen3_5(), cache_implementation="replay", cache_config=settings)


def test_cache_config_beside_a_cache_object() -> None:
    model = build_qwen3_5()
    cache = rt.ReplayCache(model.config)
    with pytest.raises(ValueError, match="only for caches that generate builds"):
        _generate(model, cache_config={"window": 4}, **{CACHE_ARGUMENT: cache})


def test_cache_implementation_beside_a_cache_object() -> None:
    model = build_qwen3_5()
    cache = rt.ReplayCache(model.config)
    with pytest.raises(ValueError, match="cache_implementation"):
        _generate(model, cache_implementation="replay", **{CACHE_ARGUMENT: cache})


def test_unsupported_model() -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM .*nemotron_h"):
        _generate(transformers.LlamaForCausalLM(config), cache_implementation="replay")
    with pytest.raises(NotImplementedError, match="does not support model type 'llama'"):
        rt.ReplayCache(config)
    with pytest.raises(ValueError, match="expected a transformers model configuration"):
        rt.ReplayCache("qwen3_5")


def test_cache_of_another_model() -> None:
    model, other = build_nemotron_h("*M"), build_qwen3_5()
    cache = rt.ReplayCache(other.config)
    with pytest.raises(ValueError, match="another model"):
        _generate(model, **{CACHE_ARGUMENT: cache})
    wider = build_nemotron_h("*M", mamba_num_heads=6)
    cache = rt.ReplayCache(model.config)
    cached_forward(model, cache, prompt(1, 5)["input_ids"])
    keys = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match=r"heads=4.*heads=6"):
        cached_forward(wider, cache, prompt(1, 2)["input_ids"])
    assert cache.get_seq_length() == 5
    assert torch.equal(cache.layers[0].keys, keys), "the attention layer before the refusing layer keeps its length"


def test_a_fixed_cache_that_is_too_small() -> None:
    model = build_qwen3_5()
    cache = rt.ReplayCache(model.config, max_cache_len=6)
    with pytest.raises(ValueError, match="max_cache_len=6"):
        _generate(model, **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 0


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_training_mode(family: str) -> None:
    """Refused with gradients; fine without; in eval mode with gradients the cache holds detached values."""
    model = FAMILIES[family]()
    ids = prompt(1, 6)["input_ids"]
    reference = rt.ReplayCache(model.config)
    expected = cached_forward(model, reference, ids)

    model.train()
    cache = rt.ReplayCache(model.config)
    with pytest.raises(ValueError, match=r"training mode with gradients.*model\.eval\(\)"):
        model(input_ids=ids, **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(cached_forward(model, cache, ids), expected)

    model.eval()
    cache = rt.ReplayCache(model.config)
    logits = model(input_ids=ids, **{CACHE_ARGUMENT: cache}).logits
    assert logits.requires_grad
    torch.testing.assert_close(logits.detach(), expected)
    held = [buffer for layer in cache.replay_layers for buffer in layer.buffers().values()]
    held += [layer.keys for layer in cache.attention_layers]
    assert not any(buffer.requires_grad for buffer in held)
    logits.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "conv1d" in n)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences(family: str) -> None:
    model = FAMILIES[family]()
    cache = rt.ReplayCache(model.config)
    with pytest.raises(NotImplementedError, match="packed sequences"), torch.no_grad():
        model(
            input_ids=prompt(1, 6)["input_ids"],
            cu_seq_lens_q=torch.tensor([0, 3, 6]),
            **{CACHE_ARGUMENT: cache},
        )
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_backward_through_a_prompt_longer_than_the_ring(family: str) -> None:
    """The checkpoint is overwritten in place after autograd saved what it read of it."""
    model = FAMILIES[family]()
    ids = prompt(1, 30)["input_ids"]
    gradients = []
    for cache in (None, rt.ReplayCache(model.config, rt.ReplayConfig(window=4))):
        model.zero_grad()
        arguments = {"use_cache": False} if cache is None else {CACHE_ARGUMENT: cache}
        model(input_ids=ids, **arguments).logits.square().mean().backward()
        gradients.append(
            [p.grad.clone() for n, p in model.named_parameters() if "norm" not in n and p.grad is not None]
        )
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["inputs_embeds", "positional"])
def test_the_guard_sees_every_way_to_pass_things(how: str) -> None:
    model = build_qwen3_5(["full_attention", "linear_attention"])
    decoder, ids = model.model, prompt(2, 3)["input_ids"]
    cache = rt.ReplayCache(model.config)
    cached_forward(model, cache, prompt(1, 5)["input_ids"])
    if how == "inputs_embeds":
        args, kwargs = (), {"inputs_embeds": decoder.embed_tokens(ids), CACHE_ARGUMENT: cache}
    else:
        args, kwargs = (ids, None, None, cache), {}
    with pytest.raises(ValueError, match="holds 1 rows"), torch.no_grad():
        decoder(*args, **kwargs)
    assert cache.layers[0].get_seq_length() == 5


def test_forwards_without_tokens_and_changes_to_no_rows() -> None:
    model = build_qwen3_5()
    cache = rt.ReplayCache(model.config)
    cached_forward(model, cache, prompt(1, 5)["input_ids"])
    with pytest.raises(ValueError, match=r"one new token, got 1 rows of 0: the cache holds 5 tokens, .*reset\(\)"):
        cached_forward(model, cache, torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="select no rows"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match="1 or more times, got 0"):
        cache.batch_repeat_interleave(0)
    assert (cache.batch_size, cache.get_seq_length()) == (1, 5)


@pytest.mark.usefixtures("enabled")
def test_settings_that_no_cache_takes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Without the name of a replay cache; with it, or without settings, nothing is said."""
    model, inputs = build_qwen3_5(), prompt(1, 4)
    for arguments in ({}, {"cache_implementation": "replay", "cache_config": {"window": 8}}):
        model.generate(**inputs, max_new_tokens=2, do_sample=False, **arguments)
    assert "cache_config" not in caplog.text
    model.generate(**inputs, max_new_tokens=2, do_sample=False, cache_config={"window": 8})
    assert "cache_config={'window': 8} is not used without a cache_implementation: pass" in caplog.text
    caplog.clear()
    model.generate(**inputs, max_new_tokens=2, do_sample=False, cache_config={"backend": "quanto", "nbits": 4})
    assert "cache_config" not in caplog.text, "for a cache of another kind"
