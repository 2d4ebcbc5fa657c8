"""Caches with narrow states and separate copies do everything that others do: rows, rollback, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import replay_transformers as rt
from replay_transformers.kernels.formats import FORMATS, StoredState
from replay_transformers.traffic import TrafficCounter, count_steps
from tests.support.cached import assert_logits, assert_states, feed, ids, layers, model_for
from tests.support.precision import (
    BOTH,
    EVERY,
    EVERY_FAMILY,
    SEPARATE,
    SHARED,
    SOME,
    WINDOW,
    assert_copies_are_fresh,
    changed,
    copied,
    label,
    new,
    stored,
)
from tests.support.snapshots import Snapshot, tensors

pytestmark = pytest.mark.usefixtures("enabled")

FIXED = pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
COPIES: dict[str, Callable[[rt.ReplayCache], rt.ReplayCache]] = {
    "fork": lambda cache: cache.fork(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


def filled(model: Any, fixed: bool = False, rows: int = 3, **settings: Any) -> rt.ReplayCache:
    """After a prompt and two flushes, in mid-window; whatever it stores is not zero."""
    cache = new(model, fixed, **settings)
    feed(model, cache, ids(rows, 17), 7, *[1] * 10)
    assert 0 < int(cache.cursor.committed[0]) < WINDOW
    assert all(tensor.any() for tensor in stored(cache).values())
    return cache


# -- rollback ---------------------------------------------------------------------------------------------------------


@EVERY
@EVERY_FAMILY
def test_a_rollback_writes_no_state(family: str, settings: dict[str, Any]) -> None:
    """By a number, none at all, or row by row."""
    model = model_for(family)
    for amount in (-2, 0, -torch.tensor([1, 2, 0])):
        cache = filled(model, **settings)
        cache.activate_past_recording()
        feed(model, cache, ids(3, 2, seed=1), 2)
        assert cache.cursor.committed.all(), "there are records that could be folded"
        before = copied(stored(cache))
        cache.crop(amount)
        assert not any(rows.any() for rows in changed(before, stored(cache)).values())
        feed(model, cache, ids(3, 6, seed=2), 3, 3)
        assert any(rows.any() for rows in changed(before, stored(cache)).values()), "a flush does"


@EVERY
@EVERY_FAMILY
def test_rejected_tokens_leave_no_trace(family: str, settings: dict[str, Any]) -> None:
    """A cache that has never seen them stores the same and goes on alike, if both flush at the same tokens."""
    model = model_for(family)
    cache, never = (new(model, window=8, **settings) for _ in range(2))
    tokens, wrong = ids(2, 16), ids(2, 2, seed=9)
    for one in (cache, never):
        feed(model, one, tokens[:, :9], 7, 1, 1)
        one.activate_past_recording()
    feed(model, cache, torch.cat([tokens[:, 9:11], wrong], dim=1), 4)
    feed(model, never, tokens[:, 9:11], 2)
    cache.crop(-2)
    never.crop(0)
    assert not any(rows.any() for rows in changed(stored(never), stored(cache)).values())
    for index in layers(cache):
        assert_states(cache.state(index), never.state(index))
    assert_logits(feed(model, cache, tokens[:, 11:15]), feed(model, never, tokens[:, 11:15]))


# -- rows, copies, memory ---------------------------------------------------------------------------------------------


@SOME
@pytest.mark.parametrize("how", COPIES)
@FIXED
@EVERY_FAMILY
def test_copies_share_no_part(family: str, how: str, settings: dict[str, Any], fixed: bool) -> None:
    model = model_for(family)
    cache = filled(model, fixed, **settings)
    other = COPIES[how](cache)
    before = Snapshot(cache)
    assert before.changes(other) == []
    storages = [{t.untyped_storage().data_ptr() for t in tensors(one).values()} for one in (cache, other)]
    assert not storages[0] & storages[1]
    ahead = feed(model, other, ids(3, 9, seed=3))
    other.reset()
    assert before.changes(cache) == []
    assert torch.equal(feed(model, cache, ids(3, 9, seed=3)), ahead)


@FIXED
@EVERY
@EVERY_FAMILY
def test_a_cache_that_was_reset_is_as_good_as_new(family: str, settings: dict[str, Any], fixed: bool) -> None:
    """Its states decode to zero, in the same memory; then the same bits as from a new one, random ones included."""
    model = model_for(family)
    cache = filled(model, fixed, **settings)
    addresses = {name: tensor.data_ptr() for name, tensor in stored(cache).items()}
    cache.reset()
    for layer in cache.replay_layers:
        for state in (layer.checkpoint, layer.readout):
            if state is not None:
                values = state.read() if isinstance(state, StoredState) else state
                assert torch.equal(values, torch.zeros_like(values))
        for ring in (layer.conv_ring, *layer.rings.values()):
            ring.fill_(float("nan"))
    fresh, splits = new(model, fixed, **settings), [1, 1, 2, 6, *[1] * 10]
    assert torch.equal(feed(model, cache, ids(3, 20), *splits), feed(model, fresh, ids(3, 20), *splits))
    assert not any(rows.any() for rows in changed(stored(fresh), stored(cache)).values())
    assert {name: tensor.data_ptr() for name, tensor in stored(cache).items()} == addresses


@FIXED
@SOME
@pytest.mark.parametrize("how", ["reorder", "select", "repeat"])
@EVERY_FAMILY
def test_rows_take_all_their_parts_along(family: str, how: str, settings: dict[str, Any], fixed: bool) -> None:
    """And go on from there as they would have where they came from, up to the next flush."""
    model = model_for(family)
    cache = filled(model, fixed, **settings)
    original, before = cache.fork(), copied(stored(cache))
    rows = {"reorder": [2, 0, 0], "select": [1, 2], "repeat": [0, 0, 1, 1, 2, 2]}[how]
    if how == "reorder":
        cache.reorder_cache(torch.tensor(rows))
    elif how == "select":
        cache.batch_select_indices(torch.tensor(rows))
    else:
        cache.batch_repeat_interleave(2)
    for name, tensor in stored(cache).items():
        assert torch.equal(tensor, before[name][rows]), name
    token = torch.full((3, 1), 5)
    assert_logits(feed(model, cache, token[:1].expand(len(rows), 1)), feed(model, original, token)[rows])


@EVERY
@EVERY_FAMILY
def test_only_rows_that_flush_are_written(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch whose rows flush in turn; and the copy is as fresh as the checkpoint at any time."""
    monkeypatch.setattr("replay_transformers.cursor.SPREAD_ROWS", 2)
    model, flushed = model_for(family), set()
    cache = new(model, **settings)
    feed(model, cache, ids(4, 7), 7)
    for step in range(9):
        before, base = copied(stored(cache)), cache.cursor.base.clone()
        feed(model, cache, ids(4, 1, seed=step))
        due = cache.cursor.base > base
        flushed.add(tuple(due.tolist()))
        for name, rows in changed(before, stored(cache)).items():
            if name.endswith("values"):
                assert torch.equal(rows, due), name
            assert not (rows & ~due).any(), name
        if "readout" in settings:
            assert_copies_are_fresh(cache)
    assert len(flushed) > 3


@pytest.mark.parametrize("settings", [*SEPARATE, *BOTH], ids=label)
@FIXED
@EVERY_FAMILY
def test_the_copy_is_made_anew_whenever_the_checkpoint_is(family: str, settings: dict[str, Any], fixed: bool) -> None:
    """By prompts, in one piece or in several, by blocks longer than the ring, by steps, by flush()."""
    model, tokens = model_for(family), ids(2, 60)
    cache, start, written = new(model, fixed, **settings), 0, 0
    for count in (3, 9, 1, 1, 1, 1, 1, 2, 4, 1, 13, 1, 1):
        before = copied(stored(cache))
        feed(model, cache, tokens[:, start : start + count], count)
        start += count
        assert_copies_are_fresh(cache)
        written += bool(before) and changed(before, stored(cache))["0.readout.values"].any().item()
    assert written >= 4
    before = copied(stored(cache))
    cache.flush()
    assert_copies_are_fresh(cache)
    assert changed(before, stored(cache))["0.readout.values"].all()


@EVERY
@EVERY_FAMILY
def test_memory_is_that_of_the_formats(family: str, settings: dict[str, Any]) -> None:
    model = model_for(family)
    cache = filled(model, rows=2, **settings)
    footprint, config = cache.memory_footprint(), cache.replay_config
    shapes = [layer.geometry for layer in cache.replay_layers]
    for kind, name in (("checkpoint", config.checkpoint), ("readout", config.readout)):
        heads = [s.heads * FORMATS[name].head_bytes(s.head_dim, s.state_dim) for s in shapes] if name else []
        assert footprint[kind] == 2 * sum(heads)
    plain = filled(model, rows=2).memory_footprint()
    assert {kind: footprint[kind] for kind in ("ring", "convolution")} == {k: plain[k] for k in ("ring", "convolution")}


@pytest.mark.parametrize("settings", [*SHARED, *SEPARATE], ids=label)
@EVERY_FAMILY
def test_steps_read_the_copy_alone_and_flushes_write_both_once(family: str, settings: dict[str, Any]) -> None:
    """Counted operator by operator. NVFP4 is unpacked by two operators, which read the bytes of its values twice."""
    model = model_for(family)
    cache = filled(model, **settings)
    sizes = cache.memory_footprint()
    kinds = {kind: [t for name, t in stored(cache).items() if kind in name] for kind in ("checkpoint", "readout")}
    read = "readout" if "readout" in settings else "checkpoint"
    twice = sum(t.nbytes for name, t in stored(cache).items() if name.endswith(f"{read}.values"))
    for step in range(WINDOW + 1):
        due = int(cache.cursor.committed[0]) + 1 > WINDOW
        with TrafficCounter(kinds) as counter:
            feed(model, cache, ids(3, 1, seed=step))
        if due:
            assert counter.writes == {kind: sizes[kind] for kind in kinds}
            assert counter.reads["checkpoint"] >= sizes["checkpoint"]
        else:
            assert counter.writes == {"checkpoint": 0, "readout": 0}
            extra = twice if settings.get(read) == "nvfp4" else 0
            assert counter.reads == {"checkpoint": 0, "readout": 0} | {read: sizes[read] + extra}
    with count_steps(model) as steps:
        feed(model, cache, ids(3, 2 * WINDOW))
    writes = [step.writes["state"] for step in steps]
    assert sorted(set(writes)) == [0, sizes["checkpoint"] + sizes["readout"]]
    assert sum(step.wrote_state for step in steps) == 2


@pytest.mark.parametrize("settings", [{"readout": "nvfp4"}, {"checkpoint": "fp8_sr"}], ids=label)
@EVERY_FAMILY
def test_a_bfloat16_model_keeps_the_formats(family: str, settings: dict[str, Any]) -> None:
    model = copy.deepcopy(model_for(family)).bfloat16()
    cache = filled(model, **settings)
    assert feed(model, cache, ids(3, 6)).isfinite().all()
    of_float32 = {name: tensor.dtype for name, tensor in stored(filled(model_for(family), **settings)).items()}
    assert {name: tensor.dtype for name, tensor in stored(cache).items()} == of_float32
