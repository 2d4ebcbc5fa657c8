"""Forwards that end in the middle of a model: an error in a layer, memory that runs out, a keyboard interrupt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replay_transformers as rt
from tests.support import models
from tests.support.cached import assert_logits, feed, ids, model_for, new_cache
from tests.support.snapshots import Snapshot

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("enabled")]

TOKENS = ids(2, 12)
GROWING_AND_FIXED = pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])


class BreakdownError(Exception):
    """Raised in the middle of a forward."""


def empty(model: Any, fixed: bool) -> rt.ReplayCache:
    return new_cache(model, max_draft=2, max_cache_len=32 if fixed else None)


def used(model: Any, fixed: bool) -> rt.ReplayCache:
    """A cache in mid-ring that has seen seven tokens."""
    cache = empty(model, fixed)
    feed(model, cache, TOKENS[:, :7], 5, 1, 1)
    return cache


def break_off(model: Any, cache: rt.ReplayCache, layer: int) -> None:
    """A forward of one token, of which only the layers before ``layer`` run."""

    def fail(*_: Any) -> None:
        raise BreakdownError

    hook = model.model.layers[layer].register_forward_pre_hook(fail)
    try:
        with pytest.raises(BreakdownError):
            models.cached_forward(model, cache, TOKENS[:, 7:8])
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h-M*M"])
@GROWING_AND_FIXED
def test_a_forward_that_broke_off(name: str, fixed: bool) -> None:
    """Every use says so and changes nothing; `reset` makes the cache as good as new, to the bit."""
    model = model_for(name)
    cache = used(model, fixed)
    cache.activate_past_recording()
    break_off(model, cache, len(model.model.layers) - 1)
    before = Snapshot(cache)
    uses = {
        "fork": cache.fork,
        "flush": cache.flush,
        "read a state": lambda: cache.state(0),
        "crop": lambda: cache.crop(0),
        "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
        "repeat rows": lambda: cache.batch_repeat_interleave(2),
        "select rows": lambda: cache.batch_select_indices(torch.tensor([0])),
    }
    for what, use in uses.items():
        with pytest.raises(ValueError, match=f"cannot {what}: .* broke off half-way; call reset"):
            use()
    assert before.changes(cache) == []
    with pytest.raises(ValueError, match=r"cannot begin a forward: .* broke off half-way; call reset"):
        models.cached_forward(model, cache, TOKENS[:, 7:8])

    cache.reset()
    new = empty(model, fixed)
    splits = [5, 1, 1, 3, 1, 1]
    assert torch.equal(feed(model, cache, TOKENS, *splits), feed(model, new, TOKENS, *splits))


@pytest.mark.parametrize("name", ["qwen3_5-attention-first", "qwen3_5-attention-last"])
@GROWING_AND_FIXED
def test_between_attention_and_the_state_space_layers(name: str, fixed: bool) -> None:
    """One kind of layer has taken the token in and the other has not: no later forward may go on from there."""
    model = model_for(name)
    cache = used(model, fixed)
    break_off(model, cache, 1)
    with pytest.raises(ValueError, match="broke off half-way"):
        models.cached_forward(model, cache, TOKENS[:, 7:8])


@pytest.mark.parametrize("name", ["qwen3_5-attention-first", "nemotron_h-M*M"])
@GROWING_AND_FIXED
def test_without_the_patches(name: str, fixed: bool) -> None:
    """The first state-space layer refuses; where attention has come before it, the cache says so later on."""
    model = model_for(name)
    for cache in (used(model, fixed), empty(model, fixed)):
        before = Snapshot(cache)
        rt.disable()
        with pytest.raises(ValueError, match="is not patched: call"):
            models.cached_forward(model, cache, TOKENS[:, 7:8])
        rt.enable()
        if name == "qwen3_5-attention-first":
            with pytest.raises(ValueError, match="broke off half-way"):
                models.cached_forward(model, cache, TOKENS[:, 7:8])
        else:
            assert before.changes(cache) == []
            models.cached_forward(model, cache, TOKENS[:, 7:8])


@pytest.mark.parametrize("name", ["qwen3_5-attention-first", "nemotron_h-M*M", "nemotron_h-M"])
@GROWING_AND_FIXED
def test_before_the_first_layer(name: str, fixed: bool) -> None:
    """Nothing was taken in: the cache is as it was and goes on."""
    model = model_for(name)
    cache = used(model, fixed)
    before = Snapshot(cache)
    break_off(model, cache, 0)
    assert before.changes(cache) == []
    assert_logits(feed(model, cache, TOKENS[:, 7:]), models.full_logits(model, TOKENS)[:, 7:])


@pytest.mark.parametrize("name", ["qwen3_5-attention-first", "qwen3_5-attention-last"])
def test_more_tokens_than_fixed_shapes_hold(name: str) -> None:
    """Refused before anything is taken in."""
    model = model_for(name)
    cache = new_cache(model, max_cache_len=8)
    feed(model, cache, TOKENS[:, :7], 5, 1, 1)
    before = Snapshot(cache)
    with pytest.raises(ValueError, match="max_cache_len=8"):
        models.cached_forward(model, cache, TOKENS[:, 7:9])
    assert before.changes(cache) == []
    feed(model, cache, TOKENS[:, 7:8])
