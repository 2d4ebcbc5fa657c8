"""Continuation: blocks, copies, resets and turns that meet the ring at every phase."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import replay_transformers as rt
from tests.reports.phases import EVERY_FAMILY, EVERY_PHASE, WINDOW, assert_holds, at_phase, poison
from tests.support import models
from tests.support.cached import assert_logits, feed, ids, model_for, new_cache
from tests.support.generation import CACHE_ARGUMENT, returned_cache

pytestmark = pytest.mark.usefixtures("enabled")

GROWING_AND_FIXED = pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])


@EVERY_FAMILY
@EVERY_PHASE
@GROWING_AND_FIXED
def test_a_block_on_top_of_any_ring(family: str, phase: int, fixed: bool) -> None:
    """Fault: a cached forward of several tokens ignores or repeats what lies unfolded in the ring."""
    model = model_for(family)
    start, seen = at_phase(model, phase, fixed=fixed, max_draft=8)
    for tokens in (2, 3, WINDOW, WINDOW + 1, 9, 10, 23):  # up to 9 go through the ring, longer ones are scanned
        cache, block = start.fork(), ids(1, tokens, seed=50)
        whole = torch.cat([seen, block], dim=1)
        logits = models.cached_forward(model, cache, block)
        assert_logits(logits, models.full_logits(model, whole)[:, seen.shape[1] :])
        assert_holds(model, cache, whole)


@EVERY_FAMILY
@EVERY_PHASE
@pytest.mark.parametrize("how", ["fork", "deepcopy", "pickle"])
def test_a_copy_decides_for_itself(family: str, phase: int, how: str) -> None:
    """Fault: a copy made between draft and verdict shares the cursor, and one's rollback is the other's."""
    model = model_for(family)
    cache, seen = at_phase(model, phase, max_draft=5)
    draft = ids(1, 5, seed=50)
    feed(model, cache, draft, 4, 1)
    copies = {"fork": rt.ReplayCache.fork, "deepcopy": copy.deepcopy, "pickle": lambda c: pickle.loads(pickle.dumps(c))}
    other = copies[how](cache)
    other.crop(-4)
    assert_holds(model, other, torch.cat([seen, draft[:, :1]], dim=1))
    cache.crop(-1)
    assert_holds(model, cache, torch.cat([seen, draft[:, :4]], dim=1))


@EVERY_FAMILY
@EVERY_PHASE
@GROWING_AND_FIXED
def test_a_used_cache_starts_again_as_a_new_one(family: str, phase: int, fixed: bool) -> None:
    """Fault: a slot or cache that is used again keeps a cursor, a state or a verdict from its former life."""
    model = model_for(family)
    cache, _ = at_phase(model, phase, max_draft=3, fixed=fixed)
    feed(model, cache, ids(1, 3, seed=50), 2, 1)  # undecided
    cache.reset()
    poison(cache)
    new = new_cache(model, WINDOW, 3, max_cache_len=64 if fixed else None)
    tokens, splits = ids(1, 14, seed=51), [3, 1, 1, 1, 6, 1, 1]
    assert torch.equal(feed(model, cache, tokens, *splits), feed(model, new, tokens, *splits))
    assert torch.stack(cache.cursor.tensors()).equal(torch.stack(new.cursor.tensors()))


@EVERY_FAMILY
@EVERY_PHASE
def test_a_second_and_third_turn(family: str, phase: int) -> None:
    """Fault: a later turn with the returned cache loses or repeats a token where the turns meet."""
    model, length = model_for(family), 13
    cache: rt.ReplayCache | None = rt.ReplayCache(model.config, rt.ReplayConfig(window=WINDOW))
    tokens = ids(1, length)
    for turn in range(3):
        mask = torch.ones_like(tokens)
        output = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            max_new_tokens=phase + 1,  # the last one is not fed
            do_sample=False,
            return_dict_in_generate=True,
            **{CACHE_ARGUMENT: cache},
        )
        assert torch.equal(output.sequences, models.greedy_without_cache(model, tokens, mask, phase + 1))
        cache = returned_cache(output)
        assert cache is not None
        assert int(cache.get_seq_length()) == output.sequences.shape[1] - 1
        if turn == 0:
            assert cache.cursor.committed.tolist() == [phase]
        tokens = torch.cat([output.sequences, ids(1, 2 + turn, seed=turn)], dim=1)
