"""Speculation and rollback: what is left of rejected tokens, whatever the ring held when they came."""

from __future__ import annotations

import pytest
import torch

from tests.reports.phases import EVERY_FAMILY, EVERY_PHASE, WITHOUT_ATTENTION, assert_holds, at_phase, poison
from tests.support import models
from tests.support.cached import assert_logits, assert_states, feed, ids, layers, model_for, new_cache
from tests.support.snapshots import Snapshot

pytestmark = pytest.mark.usefixtures("enabled")

DRAFT = 6  # more than the window and more than the convolution's context, so a flush happens among the drafted tokens


@EVERY_FAMILY
@EVERY_PHASE
@pytest.mark.parametrize("splits", [[DRAFT], [1] * DRAFT, [2, 1, 3]], ids=["block", "singles", "mixed"])
def test_state_and_convolution_go_back_together(family: str, phase: int, splits: list[int]) -> None:
    """Fault: a rollback restores the convolution and leaves the recurrent state after the block, or the reverse."""
    model = model_for(family)
    drafted, seen = at_phase(model, phase, max_draft=DRAFT)
    draft = ids(1, DRAFT, seed=50)
    feed(model, drafted, draft, *splits)
    for accepted in range(DRAFT + 1):
        cache = drafted.fork()
        cache.crop(accepted - DRAFT)
        assert_holds(model, cache, torch.cat([seen, draft[:, :accepted]], dim=1))


@EVERY_FAMILY
@EVERY_PHASE
def test_rejecting_every_draft_commits_nothing_unwritten(family: str, phase: int) -> None:
    """Fault: a round whose drafts are all rejected commits slots that nobody wrote, or that the drafts left behind."""
    model = model_for(family)
    cache, seen = at_phase(model, phase, max_draft=DRAFT)
    for number in range(3):
        poison(cache)
        feed(model, cache, ids(1, DRAFT, seed=60 + number), *([DRAFT], [1] * DRAFT, [3, 3])[number])
        cache.crop(-DRAFT)
        poison(cache)
    assert_holds(model, cache, seen)


@EVERY_FAMILY
@EVERY_PHASE
def test_a_rollback_is_applied_once(family: str, phase: int) -> None:
    """Fault: the number of rejected tokens is never cleared and is taken back again at every later step."""
    model = model_for(family)
    cache, seen = at_phase(model, phase, max_draft=DRAFT)
    draft, later = ids(1, 3, seed=50), ids(1, 4, seed=51)
    feed(model, cache, draft, 3)
    cache.crop(-2)
    for token in later.split(1, dim=1):
        feed(model, cache, token)
        cache.crop(0)
    assert_holds(model, cache, torch.cat([seen, draft[:, :1], later], dim=1))


@EVERY_FAMILY
@EVERY_PHASE
@pytest.mark.parametrize("drafted", [0, 1, 5])
def test_going_back_further_than_the_history_is_refused(family: str, phase: int, drafted: int) -> None:
    """Fault: a rollback beyond what is retained takes whatever happens to lie there, committed records included."""
    model = model_for(family)
    cache, seen = at_phase(model, phase, max_draft=DRAFT)
    draft = ids(1, 5, seed=50)[:, :drafted]
    if drafted:
        feed(model, cache, draft)
    before = Snapshot(cache)
    for amount in (drafted + 1, drafted + phase + 1, 1000):
        with pytest.raises(ValueError, match="cannot reject"):
            cache.crop(-amount)
    assert before.changes(cache) == []
    cache.crop(-drafted)
    assert_holds(model, cache, seen)


@WITHOUT_ATTENTION
@EVERY_PHASE
def test_placeholders_of_short_drafts_leave_no_trace(model: str, phase: int) -> None:
    """Fault: in a batch whose rows draft different numbers of tokens, the fillers of short rows reach the state."""
    built, lengths, accepted = model_for(model), [1, 3, 6, 5], [1, 0, 6, 2]
    start, seen = at_phase(built, phase, rows=4, max_draft=DRAFT)
    draft, states = ids(4, DRAFT, seed=50), []
    rows = [[*row, *new[:count]] for row, new, count in zip(seen.tolist(), draft.tolist(), accepted, strict=True)]
    for filler in (models.PAD, 17):
        cache, block = start.fork(), draft.clone()
        for row, length in enumerate(lengths):
            block[row, length:] = filler
        feed(built, cache, block, DRAFT)
        cache.crop(torch.tensor(accepted) - DRAFT)
        assert cache.cursor.lengths().tolist() == [len(row) for row in rows]
        states.append([cache.state(index) for index in layers(cache)])
    assert all(torch.equal(one, two) for one, two in zip(*states, strict=True))
    later = ids(4, 7, seed=51)
    logits = feed(built, cache, later, 1, 1, 3, 1, 1)
    for number, row in enumerate(rows):
        alone = new_cache(built)
        models.cached_forward(built, alone, torch.tensor([row]))
        assert_states(states[0][0][number], alone.state(0)[0])
        truth = models.full_logits(built, torch.tensor([row + later[number].tolist()]))
        assert_logits(logits[number], truth[0, len(row) :])
