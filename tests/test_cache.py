"""A replay cache in the middle of its ring: states, flushes, copies, rows; against stock caches and full forwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import replay_transformers as rt
from tests.support import models
from tests.support.cached import (
    assert_logits,
    assert_states,
    feed,
    ids,
    layers,
    model_for,
    new_cache,
    stock_cache,
    stock_state,
)
from tests.support.generation import CACHE_ARGUMENT
from tests.support.snapshots import Snapshot, tensors

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("enabled")]

WINDOW = 4
PROMPT = 5
PHASES = range(WINDOW + 3)  # single tokens after the prompt: an empty ring, every filling, and past the first flush
EVERY_FAMILY = pytest.mark.parametrize("family", models.FAMILIES)
COPIES: dict[str, Callable[[rt.ReplayCache], rt.ReplayCache]] = {
    "fork": lambda cache: cache.fork(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


def at_phase(model: Any, phase: int, rows: int = 2, **settings: Any) -> tuple[rt.ReplayCache, torch.Tensor]:
    """A cache that has seen a prompt and ``phase`` single tokens; these, and as many tokens again as may follow."""
    cache, tokens = new_cache(model, WINDOW, **settings), ids(rows, PROMPT + phase + 3 * WINDOW)
    feed(model, cache, tokens[:, : PROMPT + phase], PROMPT, *[1] * phase)
    return cache, tokens


def rest(tokens: torch.Tensor, phase: int) -> torch.Tensor:
    """The tokens that `at_phase` has not fed."""
    return tokens[:, PROMPT + phase :]


@EVERY_FAMILY
@pytest.mark.parametrize("window", [1, WINDOW, 16])
def test_state_equals_the_eagerly_updated_one(family: str, window: int) -> None:
    """At every phase, and looking changes nothing. Window 1 is eager decoding, one token behind."""
    model, tokens = model_for(family), ids(2, PROMPT + window + 3)
    replay, stock = new_cache(model, window), stock_cache(model)
    for part in tokens.split([PROMPT, *[1] * (window + 3)], dim=1):
        assert_logits(models.cached_forward(model, replay, part), models.cached_forward(model, stock, part))
        before = Snapshot(replay)
        for index in layers(replay):
            assert replay.state(index).dtype == torch.float32
            assert_states(replay.state(index), stock_state(stock, index))
        assert replay.cursor.committed.max() <= window
        assert before.changes(replay) == []
        assert replay.get_seq_length() == stock.get_seq_length()


@EVERY_FAMILY
@pytest.mark.parametrize("phase", PHASES)
def test_flush_at_any_phase(family: str, phase: int) -> None:
    """It empties the ring into the checkpoint, changes no bit of any state, and no later logit beyond rounding."""
    model = model_for(family)
    cache, tokens = at_phase(model, phase)
    untouched = cache.fork()
    states = {index: cache.state(index) for index in layers(cache)}
    checkpoints = {index: layer.checkpoint.clone() for index, layer in layers(cache).items()}
    in_ring = int(cache.cursor.committed[0])
    cache.flush()
    assert not cache.cursor.committed.any()
    for index, layer in layers(cache).items():
        assert torch.equal(cache.state(index), states[index])
        assert torch.equal(layer.checkpoint, checkpoints[index]) == (in_ring == 0)
    again = Snapshot(cache)
    cache.flush()
    assert again.changes(cache) == []
    assert cache.get_seq_length() == PROMPT + phase
    assert_logits(feed(model, cache, rest(tokens, phase)), feed(model, untouched, rest(tokens, phase)))


@EVERY_FAMILY
def test_flush_leaves_uncommitted_tokens_rejectable(family: str) -> None:
    model, tokens = model_for(family), ids(1, 12)
    cache = new_cache(model, WINDOW, max_draft=3)
    cache.activate_past_recording()
    feed(model, cache, tokens[:, :8], 4, 1, 3)
    cache.flush()
    assert cache.cursor.pending.tolist() == [3]
    cache.crop(-2)
    kept = torch.cat([tokens[:, :6], tokens[:, 8:]], dim=1)
    assert_logits(feed(model, cache, tokens[:, 8:]), models.full_logits(model, kept)[:, 6:])


@EVERY_FAMILY
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_copies_are_independent(family: str, how: str, fixed: bool) -> None:
    model = model_for(family)
    cache, tokens = at_phase(model, 2, max_cache_len=32 if fixed else None)
    other = COPIES[how](cache)
    mine, its = tensors(cache), tensors(other)
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    storages = [{t.untyped_storage().data_ptr() for t in held.values()} for held in (mine, its)]
    assert not storages[0] & storages[1]
    assert {id(layer.cursor) for layer in other.replay_layers} == {id(other.cursor)}

    before = Snapshot(cache)
    ahead = feed(model, other, rest(tokens, 2))
    other.reset()
    assert before.changes(cache) == []
    assert torch.equal(feed(model, cache, rest(tokens, 2)), ahead)


@EVERY_FAMILY
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_reset_in_mid_ring(family: str, fixed: bool) -> None:
    """As good as new, to the bit, whatever the dead slots hold; and in the same memory."""
    model = model_for(family)
    cache, tokens = at_phase(model, 2, max_cache_len=32 if fixed else None, max_draft=2)
    cache.activate_past_recording()
    own = {name: t.data_ptr() for name, t in tensors(cache).items() if "keys" not in name and "values" not in name}
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.cursor.recording
    for layer in cache.replay_layers:
        for ring in (layer.conv_ring, *layer.rings.values()):
            ring.fill_(float("nan"))
    with pytest.raises(ValueError, match="not seen any tokens"):
        cache.state(next(iter(layers(cache))))
    new = new_cache(model, WINDOW, max_draft=2, max_cache_len=32 if fixed else None)
    splits = [2, 1, 1, 3, *[1] * 8]
    assert torch.equal(feed(model, cache, tokens[:, :15], *splits), feed(model, new, tokens[:, :15], *splits))
    assert own.items() <= {name: t.data_ptr() for name, t in tensors(cache).items()}.items()


@EVERY_FAMILY
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("operation", ["reorder", "select", "mask", "repeat"])
def test_rows_change_in_mid_ring(family: str, operation: str, fixed: bool) -> None:
    """At the phases around a flush; every row goes on from its own tokens."""
    model = model_for(family)
    for phase in (0, 1, WINDOW - 1, WINDOW):
        cache, tokens = at_phase(model, phase, rows=3, max_cache_len=32 if fixed else None)
        if operation == "reorder":
            rows = [2, 0, 0]
            cache.reorder_cache(torch.tensor(rows))
        elif operation == "select":
            rows = [1, 2, 1, 0]
            cache.batch_select_indices(torch.tensor(rows))
        elif operation == "mask":
            rows = [0, 2]
            cache.batch_select_indices(torch.tensor([True, False, True]))
        else:
            rows = [0, 0, 1, 1, 2, 2]
            cache.batch_repeat_interleave(2)
        assert cache.batch_size == len(rows)
        later = ids(len(rows), WINDOW + 2, seed=7)
        seen = torch.cat([tokens[rows, : PROMPT + phase], later], dim=1)
        truth = models.full_logits(model, seen)[:, PROMPT + phase :]
        assert_logits(feed(model, cache, later), truth)
        for index in layers(cache):
            assert cache.state(index).shape[0] == len(rows)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_reordering_keeps_every_address(fixed: bool) -> None:
    """Compiled graphs rely on it; attention that grows has no address to keep."""
    cache, _ = at_phase(model_for("nemotron_h"), 2, max_cache_len=32 if fixed else None)
    held = {name: t.data_ptr() for name, t in tensors(cache).items() if fixed or not name.endswith(("keys", "values"))}
    cache.reorder_cache(torch.tensor([1, 0]))
    assert held.items() <= {name: t.data_ptr() for name, t in tensors(cache).items()}.items()


@EVERY_FAMILY
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_from_inference_mode_to_gradients(family: str, fixed: bool) -> None:
    """A cache may change hands between modes; what it keeps never carries gradients."""
    model, tokens = model_for(family), ids(1, 16)
    cache = new_cache(model, WINDOW, max_cache_len=32 if fixed else None)
    with torch.inference_mode():
        first = feed(model, cache, tokens[:, :6], 4, 1, 1)
    second = feed(model, cache, tokens[:, 6:11])
    third = model(tokens[:, 11:12], use_cache=True, **{CACHE_ARGUMENT: cache}).logits
    assert third.requires_grad
    assert not any(t.requires_grad for t in tensors(cache).values())
    third.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
    model.zero_grad(set_to_none=True)
    last = feed(model, cache, tokens[:, 12:])
    assert not any(t.requires_grad or t.is_inference() for t in tensors(cache).values())
    assert_logits(torch.cat([first, second, third.detach(), last], dim=1), models.full_logits(model, tokens))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_copies_made_in_inference_mode(how: str, fixed: bool) -> None:
    """Are ordinary caches outside it."""
    model = model_for("nemotron_h")
    cache, tokens = at_phase(model, 2, max_cache_len=32 if fixed else None)
    with torch.inference_mode():
        other = COPIES[how](cache)
    assert torch.equal(feed(model, other, rest(tokens, 2)), feed(model, cache, rest(tokens, 2)))
