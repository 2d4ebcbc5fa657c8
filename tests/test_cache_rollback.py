"""`crop`: what it takes back, for every number of tokens; what it refuses, leaving every bit alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import replay_transformers as rt
from tests.support import models
from tests.support.cached import (
    MODELS,
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
from tests.support.snapshots import Snapshot

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("enabled")]

WINDOW, MAX_DRAFT = 4, 6
EVERY_FAMILY = pytest.mark.parametrize("family", models.FAMILIES)
# how the tokens after a prompt of 5 came in: all at once, one at a time, mixed, and in a block that is scanned
ROUNDS = {"block": [7], "singles": [1] * 7, "mixed": [1, 4, 2], "scanned": [3, 11]}


def recorded(model: Any, splits: list[int], rows: int = 2, **settings: Any) -> tuple[rt.ReplayCache, torch.Tensor]:
    """A cache that has committed a prompt of 5 and recorded the splits; its tokens and as many new ones."""
    cache, tokens = new_cache(model, WINDOW, MAX_DRAFT, **settings), ids(rows, 5 + sum(splits) + 8)
    feed(model, cache, tokens[:, :5], 5)
    cache.activate_past_recording()
    feed(model, cache, tokens[:, 5 : 5 + sum(splits)], *splits)
    return cache, tokens


@EVERY_FAMILY
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_every_number_of_tokens(family: str, rounds: str, fixed: bool) -> None:
    """0 to max_draft, as int or tensor: states and logits as if the rejected tokens had never been there."""
    model, splits = model_for(family), ROUNDS[rounds]
    original, tokens = recorded(model, splits, max_cache_len=40 if fixed else None)
    seen, later = tokens[:, : 5 + sum(splits)], ids(2, WINDOW + 2, seed=3)
    assert original.cursor.pending.tolist() == [MAX_DRAFT] * 2
    for rejected in range(MAX_DRAFT + 1):
        cache = original.fork()
        cache.crop(-rejected if rejected % 2 else torch.tensor([-rejected] * 2))
        kept = seen[:, : seen.shape[1] - rejected]
        assert int(cache.get_seq_length()) == kept.shape[1]
        straight = new_cache(model, WINDOW, MAX_DRAFT)
        feed(model, straight, kept, kept.shape[1])
        for index in layers(cache):
            assert_states(cache.state(index), straight.state(index))
        truth = models.full_logits(model, torch.cat([kept, later], dim=1))[:, kept.shape[1] :]
        assert_logits(feed(model, cache, later), truth)


@EVERY_FAMILY
@pytest.mark.parametrize("rounds", ROUNDS)
def test_states_and_lengths_count_uncommitted_tokens(family: str, rounds: str) -> None:
    model, splits = model_for(family), ROUNDS[rounds]
    cache, tokens = recorded(model, splits)
    stock, seen = stock_cache(model), tokens[:, : 5 + sum(splits)]
    models.cached_forward(model, stock, seen)
    assert cache.cursor.pending.tolist() == [MAX_DRAFT] * 2
    for index in layers(cache):
        assert_states(cache.state(index), stock_state(stock, index))
    assert int(cache.get_seq_length()) == seen.shape[1]


@EVERY_FAMILY
def test_rounds_of_speculation(family: str) -> None:
    """Draft, reject, go on, with every accepted count in turn: a rollback is applied once and only once."""
    model = model_for(family)
    cache, kept = new_cache(model, WINDOW, MAX_DRAFT), ids(1, 5)
    feed(model, cache, kept, 5)
    cache.activate_past_recording()
    for number, accepted in enumerate([6, 0, 3, 1, 0, 5, 2, 4, 0, 6]):
        block = ids(1, MAX_DRAFT + 1, seed=number + 1)
        logits = models.cached_forward(model, cache, block)
        truth = models.full_logits(model, torch.cat([kept, block], dim=1))
        assert_logits(logits, truth[:, -(MAX_DRAFT + 1) :])
        cache.crop(accepted - MAX_DRAFT)
        kept = torch.cat([kept, block[:, : accepted + 1]], dim=1)
        assert int(cache.get_seq_length()) == kept.shape[1]


@EVERY_FAMILY
def test_only_uncommitted_tokens_can_be_rejected(family: str) -> None:
    """Those before the recording started, those that left the horizon, and those that a crop has decided about stay."""
    model = model_for(family)
    cache, tokens = recorded(model, [2])
    with pytest.raises(ValueError, match="cannot reject 3 tokens: only the last 2 are uncommitted"):
        cache.crop(-3)
    feed(model, cache, tokens[:, 7:12], 5)
    with pytest.raises(ValueError, match=rf"only the last {MAX_DRAFT} are uncommitted \(max_draft={MAX_DRAFT}\)"):
        cache.crop(-MAX_DRAFT - 1)
    cache.crop(-1)
    with pytest.raises(ValueError, match="cannot reject 1 tokens: only the last 0 are uncommitted"):
        cache.crop(-1)
    cache.crop(0)
    assert int(cache.get_seq_length()) == 11


REFUSALS: dict[str, tuple[Any, str]] = {
    "beyond": (-MAX_DRAFT - 1, "cannot reject 7 tokens"),
    "beyond in one row": (torch.tensor([0, -MAX_DRAFT - 1]), "cannot reject"),
    "positive": (1, "0 or a negative int, got 1"),
    "positive in one row": (torch.tensor([-1, 2]), "0 or a negative int, got 2"),
    "int32": (torch.tensor([-1, -1], dtype=torch.int32), "int64 tensor .* got torch.int32"),
    "float tensor": (torch.tensor([-1.0, -1.0]), "int64 tensor .* got torch.float32"),
    "matrix": (torch.tensor([[-1], [-1]]), r"of shape \(2, 1\)"),
    "wrong length": (torch.tensor([-1, -1, -1]), "3 values for the 2 rows"),
    "no rows": (torch.zeros(0, dtype=torch.int64), "0 values for the 2 rows"),
    "float": (-1.0, "an int or an int64 tensor .* got float"),
    "bool": (False, "an int or an int64 tensor .* got bool"),
    "list": ([-1, -1], "an int or an int64 tensor .* got list"),
    "nothing": (None, "an int or an int64 tensor .* got NoneType"),
}


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5", "nemotron_h-M"])
def test_refusals_change_nothing(family: str) -> None:
    """Every bit of every buffer, the cursor, and the attention's keys; the cache goes on as if nothing was asked."""
    model = model_for(family)
    cache, _ = recorded(model, [7])
    before = Snapshot(cache)
    for name, (amount, message) in REFUSALS.items():
        with pytest.raises(ValueError, match=message):
            cache.crop(amount)
        assert before.changes(cache) == [], name
    cache.crop(-MAX_DRAFT)
    assert before.changes(cache) != []


@EVERY_FAMILY
def test_nothing_is_rejected_without_recording(family: str) -> None:
    model = model_for(family)
    cache = new_cache(model, WINDOW, MAX_DRAFT)
    feed(model, cache, ids(2, 9), 5, 2, 1, 1)
    before = Snapshot(cache)
    for amount in (-1, torch.tensor([-1, -1]), torch.tensor([0, -1])):
        with pytest.raises(ValueError, match="activate_past_recording"):
            cache.crop(amount)
        assert before.changes(cache) == []
    cache.crop(0)
    cache.crop(torch.tensor([0, 0]))
    assert before.changes(cache) == []


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_every_row_for_itself(family: str, rounds: str, fixed: bool) -> None:
    """Rows reject different numbers, drift apart, flush apart, and do so again, past the first width of the keys."""
    model, splits = model_for(family), ROUNDS[rounds]
    cache, tokens = recorded(model, splits, rows=3, max_cache_len=120 if fixed else None)
    seen = [row.tolist() for row in tokens[:, : 5 + sum(splits)]]
    blocks = [3, 1, 2, 4, 5, *[7] * 10]
    for step, rejected in enumerate([[0, 3, 6], [2, 0, 1], [0, 0, 0], [1, 2, 2], [0, 4, 0], *[[0, 2, 1]] * 10]):
        cache.crop(-torch.tensor(rejected))
        seen = [row[: len(row) - count] for row, count in zip(seen, rejected, strict=True)]
        block = ids(3, blocks[step], seed=step + 1)
        logits = models.cached_forward(model, cache, block)
        seen = [row + new for row, new in zip(seen, block.tolist(), strict=True)]
        for row, got in zip(seen, logits, strict=True):
            assert_logits(got, models.full_logits(model, torch.tensor([row]))[0, -block.shape[1] :])
        assert int(cache.get_seq_length()) == max(len(row) for row in seen)
        assert cache.row_lengths().tolist() == [len(row) for row in seen]


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@EVERY_FAMILY
def test_rows_that_differ_with_left_padding(family: str, implementation: str, fixed: bool) -> None:
    """A 2-D mask has a column per slot: padding stays hidden and does not count as a position."""
    model = copy.deepcopy(model_for(family))
    model.config._attn_implementation = implementation
    inputs = models.prompt(3, 9, [0, 4, 2])
    cache = new_cache(model, WINDOW, MAX_DRAFT, max_cache_len=40 if fixed else None)
    cache.activate_past_recording()
    models.cached_forward(model, cache, inputs["input_ids"], mask=inputs["attention_mask"])
    seen = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    for step, rejected in enumerate([[1, 0, 3], [0, 2, 1], [2, 2, 2], [1, 0, 1]]):
        cache.crop(-torch.tensor(rejected))
        seen = [row[: len(row) - count] for row, count in zip(seen, rejected, strict=True)]
        block = ids(3, 3, seed=step + 1)
        logits = models.cached_forward(model, cache, block, mask=inputs["attention_mask"])
        seen = [row + new for row, new in zip(seen, block.tolist(), strict=True)]
        for row, got in zip(seen, logits, strict=True):
            assert_logits(got, models.full_logits(model, torch.tensor([row]))[0, -3:])


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@EVERY_FAMILY
def test_rows_that_are_joined_again(family: str, fixed: bool) -> None:
    """Rows of one length are an ordinary cache again; of different lengths they refuse and nothing changes."""
    model = model_for(family)
    cache, tokens = recorded(model, [7], max_cache_len=40 if fixed else None)
    cache.crop(torch.tensor([-2, -3]))
    before = Snapshot(cache)
    with pytest.raises(ValueError, match=r"different numbers of tokens: \[9, 10\]"):
        cache.join_rows()
    assert before.changes(cache) == []
    later = ids(2, 2, seed=4)
    models.cached_forward(model, cache, later)
    cache.crop(torch.tensor([-1, 0]))
    cache.join_rows()
    assert not cache.cursor.ragged
    kept = torch.stack([torch.cat([tokens[0, :10], later[0, :1]]), torch.cat([tokens[1, :9], later[1]])])
    after = ids(2, WINDOW + 2, seed=5)
    assert_logits(feed(model, cache, after), models.full_logits(model, torch.cat([kept, after], dim=1))[:, 11:])
    assert int(cache.get_seq_length()) == 11 + WINDOW + 2
    cache.reset()
    assert_logits(feed(model, cache, after), models.full_logits(model, after))


def test_an_empty_cache_has_nothing_to_reject() -> None:
    model = model_for("nemotron_h-M")
    cache = new_cache(model, WINDOW, MAX_DRAFT)
    with pytest.raises(ValueError, match="has not seen any"):
        cache.crop(-1)
    feed(model, cache, ids(2, 3))
    cache.reset()
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="has not seen any"):
        cache.crop(torch.tensor([0, -1]))


@pytest.mark.parametrize("operation", ["select", "repeat"])
def test_rows_change_after_everything_was_rejected(operation: str) -> None:
    model = model_for("nemotron_h-M*")
    cache = new_cache(model, WINDOW, MAX_DRAFT)
    cache.activate_past_recording()
    feed(model, cache, ids(2, 3))
    cache.crop(-3)
    if operation == "select":
        cache.batch_select_indices(torch.tensor([1]))
    else:
        cache.batch_repeat_interleave(2)
    later = ids(cache.batch_size, 3, seed=1)
    assert_logits(feed(model, cache, later), models.full_logits(model, later))
