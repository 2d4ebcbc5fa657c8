"""Large batches flush row by row: when, how often, and that neither the outputs nor the ring's records suffer."""

from __future__ import annotations

import copy
import math
import pickle
import random
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from replay_transformers import ReplayConfig
from replay_transformers.cursor import SPREAD_ROWS, Cursor
from tests.support import models
from tests.support.cached import EPSILON, assert_logits, layers, model_for, new_cache

CPU = torch.device("cpu")
LARGE = SPREAD_ROWS


def forward(cursor: Cursor, rows: int, tokens: int = 1) -> list[int]:
    """One forward through the cursor; what each row folded in it."""
    folds = cursor.begin(rows, tokens, CPU).folds
    cursor.end()
    return [0] * rows if folds is None else folds.tolist()


def prefilled(rows: int, window: int = 16, max_draft: int = 0) -> Cursor:
    """After a prompt that was scanned."""
    cursor = Cursor(ReplayConfig(window=window, max_draft=max_draft))
    forward(cursor, rows, 100)
    return cursor


def early(cursor: Cursor) -> list[int]:
    assert cursor.early is not None
    return cursor.early.tolist()


def spread(rows: int, window: int = 16) -> list[int]:
    """By how much each row's first window is shorter."""
    return [row * window // rows for row in range(rows)]


@pytest.mark.parametrize(("rows", "window"), [(256, 16), (LARGE, 16), (100, 16), (33, 7), (40, 64), (32, 2)])
def test_few_rows_flush_in_each_step(rows: int, window: int) -> None:
    """In every step of the steady state, after a long prompt; and no row ever holds more than a window."""
    cursor = prefilled(rows, window)
    flushed, history = [0] * rows, []
    for _ in range(4 * window):
        folds = forward(cursor, rows)
        history.append(sum(fold > 0 for fold in folds))
        for row, fold in enumerate(folds):
            if fold:
                assert fold == (window if flushed[row] else window - spread(rows, window)[row])
                flushed[row] += 1
        assert int(cursor.tensors()[1].max()) <= window
    assert max(history) <= math.ceil(rows / window)
    assert min(history[window:]) >= rows // window, "the work is not even"
    assert min(flushed) >= 3


@pytest.mark.parametrize("rows", [1, 4, LARGE - 1])
@pytest.mark.parametrize("recording", [False, True])
def test_small_batches_flush_together_by_the_rule_alone(rows: int, recording: bool) -> None:
    cursor = prefilled(rows, window=5, max_draft=2)
    cursor.recording = recording
    committed, pending = 0, 0
    for tokens in [1, 1, 1, 1, 1, 1, 2, 3, 1, 1, 3, 3, 3, 1, 1, 1, 1]:
        due = committed + pending + tokens > 5
        assert forward(cursor, rows, tokens) == [committed if due else 0] * rows
        committed, pending = (0 if due else committed), pending + tokens
        leaving = max(0, pending - (2 if recording else 0))
        committed, pending = committed + leaving, pending - leaving
    assert early(cursor) == [0] * rows


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_window_of_one_flushes_in_every_step(tokens: int) -> None:
    cursor = prefilled(LARGE, window=1, max_draft=8)
    assert early(cursor) == [0] * LARGE
    forward(cursor, LARGE, tokens)
    assert [forward(cursor, LARGE) for _ in range(3)] == [[tokens] * LARGE, [1] * LARGE, [1] * LARGE]


def test_undecided_tokens_are_not_folded_early() -> None:
    """Rows that are due and have nothing committed fold nothing, and stay due until they have."""
    cursor = prefilled(LARGE, window=16, max_draft=8)
    cursor.recording = True
    for _ in range(8):
        assert forward(cursor, LARGE) == [0] * LARGE
    assert early(cursor) == spread(LARGE)
    cursor.commit(0)
    folds = forward(cursor, LARGE)
    assert folds == [8 if 8 + 1 + e > 16 else 0 for e in spread(LARGE)]
    assert early(cursor) == [0 if fold else e for fold, e in zip(folds, spread(LARGE), strict=True)]


def test_the_spread_returns_when_all_rows_start_anew() -> None:
    cursor = prefilled(LARGE)
    assert cursor.early is not None
    address = cursor.early.data_ptr()
    for again in (lambda: forward(cursor, LARGE, 30), cursor.flushed, cursor.reset):
        for _ in range(20):
            forward(cursor, LARGE)
        assert early(cursor) == [0] * LARGE
        again()
        assert early(cursor) == spread(LARGE)
    assert cursor.early.data_ptr() == address
    assert cursor.early.dtype == torch.int64
    cursor.begin(4, 1, CPU)  # another batch after the reset
    assert early(cursor) == [0] * 4


def test_rows_take_their_first_window_along() -> None:
    cursor = prefilled(LARGE)
    for _ in range(8):
        forward(cursor, LARGE)
    before = early(cursor)
    assert 0 < before.count(0) < LARGE
    address = cursor.early.data_ptr()  # type: ignore[union-attr]
    backwards = list(range(LARGE))[::-1]
    cursor.select(torch.tensor(backwards), in_place=True)
    assert early(cursor) == before[::-1]
    assert cursor.early.data_ptr() == address  # type: ignore[union-attr]
    folds = forward(cursor, LARGE)
    assert folds == [8 if 8 + 1 + e > 16 and e else 0 for e in before[::-1]]

    for other in (copy.deepcopy(cursor), pickle.loads(pickle.dumps(cursor))):
        assert early(other) == early(cursor)
        rows = [5, 5, 31, 0]
        chosen = [early(cursor)[row] for row in rows]
        other.select(torch.tensor(rows), in_place=False)
        assert early(other) == chosen
        forward(other, 4, 30)
        assert early(other) == [0] * 4
    assert len(early(cursor)) == LARGE


class Row:
    """One row of a cache as plain lists: what lies in its ring, and what of it is alive."""

    def __init__(self, early: int, config: ReplayConfig) -> None:
        self.config, self.early = config, early
        self.committed: list[int] = []
        self.pending: list[int] = []
        self.end = 100
        self.ring: dict[int, int] = {}

    def forward(self, tokens: int) -> int:
        """Appends; the number of records folded."""
        live = self.committed + self.pending
        assert len(live) + tokens <= self.config.capacity
        due = len(live) + tokens + self.early > self.config.window
        new = list(range(self.end, self.end + tokens))
        for position in new:  # while the launch may still fold the old ones
            slot = position % self.config.capacity
            assert self.ring.get(slot) not in live, "a live record was overwritten"
            self.ring[slot] = position
        self.end += tokens
        folded = len(self.committed) if due else 0
        self.committed, self.pending = self.committed[folded:], self.pending + new
        self.early = 0 if folded else self.early
        self.settle(max(0, len(self.pending) - self.config.max_draft))
        return folded

    def settle(self, count: int) -> None:
        """Commits the oldest pending records."""
        self.committed, self.pending = self.committed + self.pending[:count], self.pending[count:]

    def crop(self, rejected: int) -> None:
        self.settle(len(self.pending) - rejected)
        self.pending, self.end = [], self.end - rejected

    def pointers(self) -> list[int]:
        first = (self.committed + self.pending or [self.end])[0]
        return [first, len(self.committed), len(self.pending), self.early]


@pytest.mark.parametrize("window", [2, 7, 16])
@pytest.mark.parametrize("max_draft", [4, 8])
def test_speculation_keeps_every_live_record(window: int, max_draft: int) -> None:
    """Blocks of 2 to 5 tokens and single ones, random verdicts by row, some rounds of several forwards."""
    config = ReplayConfig(window=window, max_draft=max_draft)
    cursor, generator = prefilled(LARGE, window, max_draft), random.Random(window)
    cursor.recording = True
    rows = [Row(e, config) for e in spread(LARGE, window)]
    apart = 0
    for _ in range(120):
        for _ in range(generator.choice([1, 1, 2, 3])):
            tokens = generator.choice([1, 2, 3, 4, 5])
            folds = [row.forward(tokens) for row in rows]
            assert forward(cursor, LARGE, tokens) == folds
            apart += 0 < sum(fold > 0 for fold in folds) < LARGE
            assert all(len(row.committed) + len(row.pending) <= max(window, max_draft + 5) for row in rows)
        rejected = [generator.randint(0, len(row.pending)) for row in rows]
        cursor.commit(torch.tensor(rejected))
        for row, count in zip(rows, rejected, strict=True):
            row.crop(count)
        where = torch.stack([*cursor.tensors(), cursor.early], dim=1).tolist()  # type: ignore[list-item]
        assert where == [row.pointers() for row in rows]
    assert apart > 60


def test_compiled_steps_take_the_same_decisions() -> None:
    """One graph over the first windows and the later ones, at constant addresses."""
    eager, traced = prefilled(LARGE, window=5), prefilled(LARGE, window=5)
    for cursor in (eager, traced):
        forward(cursor, LARGE)
    counter = CompileCounterWithBackend("aot_eager")

    def step() -> torch.Tensor | None:
        folds = traced.begin(LARGE, 1, CPU).folds
        traced.end()
        return folds

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for _ in range(14):
        folds = compiled()
        assert isinstance(folds, torch.Tensor), "a graph must not depend on what is due"
        assert folds.tolist() == forward(eager, LARGE)
        assert torch.stack(traced.tensors()).equal(torch.stack(eager.tensors()))
        assert early(traced) == early(eager)
    assert counter.frame_count == 1


def tiny_model(family: str) -> Any:
    """Shared where there is one; its output depends on its state."""
    if family in models.FAMILIES:
        return model_for(family)
    model = models.ALL_FAMILIES[family](**EPSILON)
    models.assert_state_matters(model)
    return model


@pytest.mark.core
@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("family", models.ALL_FAMILIES)
def test_outputs_equal_a_forward_without_cache(family: str) -> None:
    """32 rows, most of them padded, over four windows: rows at every phase side by side."""
    model, window, length, steps = tiny_model(family), 4, 14, 17
    batch = models.prompt(LARGE, length + steps, pads=[row % 7 for row in range(LARGE)])
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    cache, outputs, flushing = new_cache(model, window), [], []
    end = 0
    for count in (length, *[1] * steps):
        end += count
        before = [layer.checkpoint.clone() for layer in layers(cache).values() if end > length]
        outputs.append(models.cached_forward(model, cache, tokens[:, end - count : end], mask[:, :end]))
        changed = [
            (layer.checkpoint != old).flatten(1).any(1).sum().item()
            for layer, old in zip(layers(cache).values(), before, strict=end > length)
        ]
        flushing += changed[:1]
        assert len(set(changed)) <= 1, "the layers flushed different rows"
    real = mask.bool()
    assert_logits(torch.cat(outputs, dim=1)[real], models.full_logits(model, tokens, mask)[real])
    assert flushing == [0] + [LARGE // window] * (steps - 1)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_spread_survives_row_operations_of_a_cache(family: str) -> None:
    """Reordered, repeated and selected in the middle of the first windows; outputs as without a cache."""
    model = model_for(family)
    tokens = models.prompt(LARGE, 24)["input_ids"]
    cache = new_cache(model, 8)
    models.cached_forward(model, cache, tokens[:, :10])
    end = 10
    order = torch.randperm(LARGE)
    operations = {
        13: (lambda: cache.reorder_cache(order), order),
        16: (lambda: cache.batch_repeat_interleave(2), torch.arange(LARGE).repeat_interleave(2)),
        19: (lambda: cache.batch_select_indices(torch.arange(0, 2 * LARGE, 3)), torch.arange(0, 2 * LARGE, 3)),
    }
    while end < 24:
        if end in operations:
            expected = cache.cursor.early[operations[end][1]]
            operations[end][0]()
            tokens = tokens[operations[end][1]]
            assert torch.equal(cache.cursor.early, expected)
            assert (expected > 0).any() == (end < 18)
        got = models.cached_forward(model, cache, tokens[:, end : end + 1])
        end += 1
        assert_logits(got, models.full_logits(model, tokens[:, :end])[:, -1:])
    assert len(set(cache.cursor.committed.tolist())) > 1
