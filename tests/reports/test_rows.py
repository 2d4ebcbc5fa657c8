"""Batches and beams: padding, and rows that change places while tokens are undecided."""

from __future__ import annotations

import pytest
import torch

from tests.reports.phases import EVERY_FAMILY, EVERY_PHASE, WINDOW, assert_holds, at_phase
from tests.support import models
from tests.support.cached import assert_logits, feed, ids, model_for, new_cache

pytestmark = pytest.mark.usefixtures("enabled")

LENGTH = 80
SCAN_CHUNK = 64  # tokens that the references scan at once


@EVERY_FAMILY
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("pads", [[3], [SCAN_CHUNK + 6], [SCAN_CHUNK + 6, 0, 1, 40]], ids=str)
@pytest.mark.parametrize("splits", [[LENGTH], [SCAN_CHUNK + 2, 14], [5, 61, 14]], ids=str)
def test_padding_is_never_seen(family: str, pads: list[int], splits: list[int], fixed: bool) -> None:
    """Fault: left padding, in one row or longer than a chunk or filling a row's first chunk, moves state or output."""
    model = model_for(family)
    inputs = models.prompt(len(pads), LENGTH, pads)
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = new_cache(model, WINDOW, max_cache_len=LENGTH + 10 if fixed else None)
    done, parts = 0, []
    for part in tokens.split(splits, dim=1):
        done += part.shape[1]
        parts.append(models.cached_forward(model, cache, part, mask[:, :done]))
    later = ids(len(pads), WINDOW + 2, seed=1)  # every phase, and past the first flush
    for token in later.split(1, dim=1):
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        parts.append(models.cached_forward(model, cache, token, mask))
    logits, whole = torch.cat(parts, dim=1), torch.cat([tokens, later], dim=1)
    for row, count in enumerate(pads):  # against the row alone and without padding
        assert_logits(logits[row, count:], models.full_logits(model, whole[row : row + 1, count:])[0])


@EVERY_FAMILY
@EVERY_PHASE
@pytest.mark.parametrize("rejected", [0, 2, 5])
def test_rows_change_places_before_the_verdict(family: str, phase: int, rejected: int) -> None:
    """Fault: beams are reordered, repeated or selected while tokens are undecided, and a rollback mixes the rows up."""
    model = model_for(family)
    drafted, tokens = at_phase(model, phase, rows=3, max_draft=5)
    draft = ids(3, 5, seed=50)
    feed(model, drafted, draft, 2, 3)
    seen = torch.cat([tokens, draft[:, : 5 - rejected]], dim=1)
    for operation, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = drafted.fork()
        operation(cache)
        cache.crop(-rejected)
        assert_holds(model, cache, seen[rows])
