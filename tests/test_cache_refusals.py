"""What a replay cache refuses, and that it is left as it was: other models, batches, dtypes, modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support import models
from tests.support.cached import assert_logits, feed, ids, layers, model_for, new_cache
from tests.support.generation import CACHE_ARGUMENT
from tests.support.snapshots import Snapshot

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("enabled")]

EVERY_FAMILY = pytest.mark.parametrize("family", models.FAMILIES)
GROWING_AND_FIXED = pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])


def used(model: Any, rows: int = 2, fixed: bool = False) -> rt.ReplayCache:
    """A cache in mid-ring."""
    cache = new_cache(model, max_draft=2, max_cache_len=32 if fixed else None)
    feed(model, cache, ids(rows, 7), 5, 1, 1)
    return cache


def assert_refused_unchanged(model: Any, cache: rt.ReplayCache, tokens: torch.Tensor, message: str) -> None:
    before = Snapshot(cache)
    with pytest.raises(ValueError, match=message):
        models.cached_forward(model, cache, tokens)
    assert before.changes(cache) == []


@pytest.mark.parametrize("value", [{"window": 3}, "float32", 16], ids=repr)
def test_settings_of_another_type(value: Any) -> None:
    hint = r": write ReplayConfig\(\*\*settings\)" if isinstance(value, dict) else ""
    with pytest.raises(ValueError, match=f"must be a ReplayConfig or None, got {type(value).__name__}{hint}$"):
        rt.ReplayCache(model_for("nemotron_h").config, value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"], ids=repr)
def test_a_length_that_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match=f"must be a positive int or None, got {value!r}"):
        rt.ReplayCache(model_for("nemotron_h").config, max_cache_len=value)


def test_unknown_models() -> None:
    with pytest.raises(NotImplementedError, match=r"model type 'llama'; it supports .*'nemotron_h'.*'qwen3_5_text'"):
        rt.ReplayCache(transformers.LlamaConfig())
    with pytest.raises(NotImplementedError, match="no state-space layer"):
        rt.ReplayCache(models.qwen3_5_config(["full_attention"]))
    with pytest.raises(ValueError, match="expected a transformers model configuration, got dict"):
        rt.ReplayCache({"model_type": "nemotron_h"})
    config = models.qwen3_5_config(["linear_attention"])
    for name, value in (("linear_num_key_heads", 0), ("linear_num_key_heads", 3), ("linear_key_head_dim", 0)):
        wrong = copy.deepcopy(config)
        setattr(wrong, name, value)
        with pytest.raises(ValueError, match="gated_delta layer needs sizes of at least 1, and heads that"):
            rt.ReplayCache(wrong)


@EVERY_FAMILY
def test_states_of_layers_that_have_none(family: str) -> None:
    cache = used(model_for(family))
    known = list(layers(cache))
    for index in (1, -1, len(cache.layers)):
        with pytest.raises(ValueError, match=rf"layer {index} has no recurrent state; .* are \[{known[0]}"):
            cache.state(index)
    with pytest.raises(ValueError, match="not seen any tokens"):
        new_cache(model_for(family)).state(known[0])


@pytest.mark.parametrize("model", ["nemotron_h-M*", "nemotron_h-M", "qwen3_5-attention-last"])
@GROWING_AND_FIXED
def test_another_batch_size(model: str, fixed: bool) -> None:
    cache = used(model_for(model), rows=2, fixed=fixed)
    for rows in (1, 3):
        assert_refused_unchanged(model_for(model), cache, ids(rows, 1), "holds 2 rows .* got")
    feed(model_for(model), cache, ids(2, 2))


@EVERY_FAMILY
@GROWING_AND_FIXED
def test_a_forward_of_no_tokens(family: str, fixed: bool) -> None:
    """As after a call that passes again what the cache holds already: it says how many tokens those are."""
    model, cache = model_for(family), new_cache(model_for(family), max_cache_len=32 if fixed else None)
    message = "needs at least one row and one new token, got 2 rows of 0"
    assert_refused_unchanged(model, cache, ids(2, 0), f"{message}$")
    feed(model, cache, ids(2, 7), 5, 1, 1)
    more = ": the cache holds 7 tokens, so pass more than those, or call reset"
    assert_refused_unchanged(model, cache, ids(2, 0), message + more)
    feed(model, cache, ids(2, 2))


@pytest.mark.parametrize("model", ["nemotron_h-M*", "nemotron_h-M", "qwen3_5-attention-last"])
@GROWING_AND_FIXED
def test_another_dtype(model: str, fixed: bool) -> None:
    cache = used(model_for(model), fixed=fixed)
    other = copy.deepcopy(model_for(model)).bfloat16()
    assert_refused_unchanged(other, cache, ids(2, 1), "of torch.float32 .* got .* of torch.bfloat16")
    feed(model_for(model), cache, ids(2, 2))


@GROWING_AND_FIXED
@pytest.mark.parametrize("what", ["batch", "dtype"])
def test_another_batch_or_dtype_with_attention_first(what: str, fixed: bool) -> None:
    model = model_for("qwen3_5-attention-first")
    cache = used(model, fixed=fixed)
    other = copy.deepcopy(model).bfloat16() if what == "dtype" else model
    assert_refused_unchanged(other, cache, ids(3 if what == "batch" else 2, 1), "this replay cache holds 2 rows")


@pytest.mark.parametrize(
    ("fixed", "family"),
    [
        (False, "nemotron_h"),
        (False, "qwen3_5"),
        (True, "nemotron_h-M*"),
        (True, "nemotron_h-M"),
    ],
)
def test_another_batch_after_the_reset(family: str, fixed: bool) -> None:
    """What the refusal advises."""
    model = model_for(family)
    cache = used(model, rows=2, fixed=fixed)
    for rows in (3, 1):
        cache.reset()
        tokens = ids(rows, 8)
        assert_logits(feed(model, cache, tokens, 5, 1, 1, 1), models.full_logits(model, tokens))


def test_another_dtype_after_the_reset() -> None:
    """Every buffer is made anew in the other dtype, the checkpoint stays float32."""
    cache = used(model_for("nemotron_h-M"))
    cache.reset()
    feed(copy.deepcopy(model_for("nemotron_h-M")).bfloat16(), cache, ids(2, 3))
    layer = cache.replay_layers[0]
    assert layer.checkpoint.dtype == torch.float32
    assert {layer.conv_ring.dtype, layer.rings["x"].dtype, layer.rings["b"].dtype} == {torch.bfloat16}


@pytest.mark.parametrize("order", [["full_attention", "linear_attention"], ["linear_attention", "full_attention"]])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
@GROWING_AND_FIXED
def test_a_cache_of_another_model(order: list[str], fresh: bool, fixed: bool) -> None:
    """Same attention, other state-space layers: refused, with everything the attention took in taken back."""
    name = "attention-first" if order[0] == "full_attention" else "attention-last"
    mine = model_for(f"qwen3_5-{name}")
    other = models.build_qwen3_5(order, linear_value_head_dim=16)
    cache = new_cache(mine, max_cache_len=32 if fixed else None) if fresh else used(mine, fixed=fixed)
    length = int(cache.get_seq_length())
    held = [t.clone() for layer in cache.attention_layers if not fresh for t in (layer.keys, layer.values)]
    with pytest.raises(ValueError, match=r"belongs to another model: .*head_dim=12.*head_dim=16.*ReplayCache\(model"):
        models.cached_forward(other, cache, ids(2, 3))
    assert int(cache.get_seq_length()) == length
    now = [t for layer in cache.attention_layers if not fresh for t in (layer.keys, layer.values)]
    assert all(torch.equal(one[:, :, :length], two[:, :, :length]) for one, two in zip(held, now, strict=True))
    tokens = torch.cat([ids(2, 7)[:, :length], ids(2, 2, seed=1)], dim=1)
    assert_logits(feed(mine, cache, tokens[:, length:]), models.full_logits(mine, tokens)[:, length:])


@pytest.mark.parametrize(("mine", "other"), [("M*", "M*M"), ("M*M", "M*"), ("M*M", "MM*")])
def test_a_cache_of_a_model_with_other_layers(mine: str, other: str) -> None:
    """More layers, fewer layers, another order: refused before anything is taken in."""
    model = models.build_nemotron_h(mine)
    cache = used(model)
    assert_refused_unchanged(models.build_nemotron_h(other), cache, ids(2, 1), "another model")
    feed(model, cache, ids(2, 2))


def test_training_mode_with_gradients() -> None:
    model = copy.deepcopy(model_for("qwen3_5-attention-first")).train()
    cache = new_cache(model)
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        model(ids(1, 3), use_cache=True, **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 0
    feed(model, cache, ids(1, 3))


def test_without_the_patches() -> None:
    """An unpatched layer fails loudly instead of keeping a state of its own."""
    model, cache = model_for("nemotron_h"), new_cache(model_for("nemotron_h"))
    rt.disable()
    with pytest.raises(ValueError, match=r"replay_transformers.enable\(\)"):
        models.cached_forward(model, cache, ids(1, 3))
