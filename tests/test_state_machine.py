"""Any order of forwards, verdicts, flushes and row operations, against lists of tokens recomputed from scratch.

The truth about a row is its list of tokens: a forward of all of them without a cache, and the state of a new cache that
is fed with all of them at once. Tolerances are in tests/support/cached.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import replay_transformers as rt
from tests.support import models
from tests.support.cached import assert_logits, assert_states, layers, model_for, new_cache
from tests.support.snapshots import Snapshot

EXAMPLES = 120
MOST_TOKENS, MOST_ROWS = 40, 3
THEN = st.integers(0, 3)  # single tokens appended after an operation


@dataclass(frozen=True)
class Setup:
    """A model and the settings of its cache."""

    model: str
    window: int
    max_draft: int
    fixed: bool = False
    spread: bool = False  # rows flush in turn, as they would in a large batch
    precision: tuple[tuple[str, Any], ...] = ()  # other settings of the cache

    def __str__(self) -> str:
        kind = f"{'fixed' if self.fixed else 'growing'}{'-spread' if self.spread else ''}"
        others = "".join(f"-{value}" for _, value in self.precision)
        return f"{self.model}-L{self.window}-draft{self.max_draft}-{kind}{others}"

    def new_cache(self) -> rt.ReplayCache:
        most = MOST_TOKENS if self.fixed else None
        return new_cache(model_for(self.model), self.window, self.max_draft, max_cache_len=most)


SETUPS = [
    Setup("nemotron_h-M*", 1, 0),
    Setup("nemotron_h-M*", 3, 2, fixed=True),
    Setup("nemotron_h-M*M", 16, 8),
    Setup("nemotron_h-M", 3, 8),
    Setup("qwen3_5-attention-last", 1, 2),
    Setup("qwen3_5", 3, 8),
    Setup("qwen3_5-attention-last", 16, 2, fixed=True),
    Setup("qwen3_5-no-attention", 3, 2),
    Setup("nemotron_h-M", 7, 2, spread=True),
    Setup("qwen3_5-no-attention", 5, 3, spread=True),
]


class Row(list[int]):
    """Tokens that a row should have seen.

    For machines that need it: ``folds`` has the places up to which the row was folded, and whether by a scan; ``read``
    by token the place up to which it was folded when the token was read, and whether it was in a block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folds: list[tuple[int, bool]] = []
        self.read: list[tuple[int, bool]] = []


class CacheMachine(RuleBasedStateMachine):
    """Drives one cache; ``tokens`` holds per row what the cache should have seen."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.model = model_for(setup.model)
        self.cache = setup.new_cache()
        self.tokens: list[Row] = []
        self.pending = 0
        self.recording = False
        self.forwards = 0
        self.aside: list[tuple[rt.ReplayCache, Snapshot, tuple[Any, ...]]] = []

    @property
    def room(self) -> int:
        """Tokens that may still be appended."""
        return MOST_TOKENS - max((len(row) for row in self.tokens), default=0)

    # -- forwards -----------------------------------------------------------------------------------------------------

    def append(self, count: int) -> None:
        count = min(count, self.room)
        if count == 0 or not self.tokens:
            return
        self.forwards += 1
        new = models.prompt(len(self.tokens), count, seed=self.forwards)["input_ids"]
        logits = models.cached_forward(self.model, self.cache, new)
        for row, ids in zip(self.tokens, new.tolist(), strict=True):
            row.extend(ids)
        self.pending = min(self.pending + count, self.setup.max_draft) if self.recording else 0
        self.note_folds()
        for row, got in zip(self.tokens, logits, strict=True):
            self.check_logits(row, got)

    def check_logits(self, row: Row, got: torch.Tensor) -> None:
        """Of the row's last tokens ``[n, vocabulary]``."""
        assert_logits(got, models.full_logits(self.model, torch.tensor([row]))[0, -len(got) :])

    def note_folds(self) -> None:
        """Keep in mind what the cache has folded since the last call."""

    def append_single(self, count: int) -> None:
        for _ in range(count):
            self.append(1)

    @initialize(rows=st.integers(1, MOST_ROWS), count=st.integers(1, 8), record=st.booleans())
    def start(self, rows: int, count: int, record: bool) -> None:
        """A prompt, with or without recording from the first token on."""
        self.tokens = [Row() for _ in range(rows)]
        if record:
            self.record(0)
        self.append(count)

    @rule(count=st.integers(1, 5))
    def append_one_by_one(self, count: int) -> None:
        self.append_single(count)

    @rule(count=st.integers(2, 13))
    def append_several(self, count: int) -> None:
        self.append(count)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    @rule(then=THEN)
    def record(self, then: int) -> None:
        self.cache.activate_past_recording()
        self.recording = True
        self.append_single(then)

    @rule(data=st.data(), as_tensor=st.booleans(), then=THEN)
    def crop(self, data: st.DataObject, as_tensor: bool, then: int) -> None:
        """As many as may be rejected, or fewer; with a tensor every row for itself."""
        each = st.integers(0, self.pending)
        rejected = [self.pending - data.draw(each)] * len(self.tokens)
        if as_tensor and rejected:
            rejected = [self.pending - data.draw(each) for _ in self.tokens]
            self.cache.crop(-torch.tensor(rejected))
        else:
            self.cache.crop(-rejected[0] if rejected else 0)
        for row, count in zip(self.tokens, rejected, strict=True):
            del row[len(row) - count :]
        self.pending = 0
        self.append_single(then)

    @rule(data=st.data(), draft=st.integers(1, 9), block=st.booleans(), then=THEN)
    def speculate(self, data: st.DataObject, draft: int, block: bool, then: int) -> None:
        """A round: a draft, as one block or one at a time, and the verdict."""
        self.record(0)
        if block:
            self.append(draft)
        else:
            self.append_single(draft)
        self.crop(data, True, then)

    @rule(then=THEN)
    def join(self, then: int) -> None:
        """Rows of one length are an ordinary cache again; others are refused."""
        if len({len(row) for row in self.tokens}) > 1:
            before = Snapshot(self.cache)
            with pytest.raises(ValueError, match="different numbers of tokens"):
                self.cache.join_rows()
            assert before.changes(self.cache) == []
        else:
            self.cache.join_rows()
            assert not self.cache.cursor.ragged
        self.append_single(then)

    @rule(beyond=st.integers(1, 5), per_row=st.booleans())
    def crop_too_far(self, beyond: int, per_row: bool) -> None:
        before, rows = Snapshot(self.cache), len(self.tokens)
        amount: Any = -(self.pending + beyond)
        if per_row and rows:
            amount = torch.tensor([amount, *[0] * (rows - 1)])
        with pytest.raises(ValueError, match="cannot reject"):
            self.cache.crop(amount)
        assert before.changes(self.cache) == []

    @rule(then=THEN)
    def flush(self, then: int) -> None:
        self.cache.flush()
        assert self.cache.cursor.committed is not None
        assert not self.cache.cursor.committed.any()
        self.note_folds()
        self.append_single(then)

    # -- rows ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.tokens))
    @rule(data=st.data(), how=st.sampled_from(["reorder", "select", "mask", "repeat"]), then=THEN)
    def choose_rows(self, data: st.DataObject, how: str, then: int) -> None:
        count = len(self.tokens)
        indices = st.integers(0, count - 1)
        if how == "reorder":
            chosen = data.draw(st.lists(indices, min_size=count, max_size=count))
            self.cache.reorder_cache(torch.tensor(chosen))
        elif how == "repeat":
            repeats = data.draw(st.integers(1, MOST_ROWS // count))
            chosen = [row for row in range(count) for _ in range(repeats)]
            self.cache.batch_repeat_interleave(repeats)
        elif how == "select":
            chosen = data.draw(st.lists(indices, min_size=1, max_size=MOST_ROWS))
            self.cache.batch_select_indices(torch.tensor(chosen))
        else:
            chosen = sorted(data.draw(st.sets(indices, min_size=1)))
            self.cache.batch_select_indices(torch.tensor([row in chosen for row in range(count)]))
        self.tokens = [copy.deepcopy(self.tokens[row]) for row in chosen]
        self.append_single(then)

    # -- copies -------------------------------------------------------------------------------------------------------

    @rule(then=THEN)
    def fork(self, then: int) -> None:
        """Go on with the fork; the original stays aside."""
        known = (copy.deepcopy(self.tokens), self.pending, self.recording)
        self.aside.append((self.cache, Snapshot(self.cache), known))
        self.cache = self.cache.fork()
        self.append_single(then)

    @precondition(lambda self: self.aside)
    @rule(then=THEN)
    def back_to_the_original(self, then: int) -> None:
        self.cache, _, (self.tokens, self.pending, self.recording) = self.aside.pop()
        self.append_single(then)

    @rule(pickled=st.booleans(), then=THEN)
    def replace_by_a_copy(self, pickled: bool, then: int) -> None:
        before = Snapshot(self.cache)
        self.cache = pickle.loads(pickle.dumps(self.cache)) if pickled else copy.deepcopy(self.cache)
        assert before.changes(self.cache) == []
        self.append_single(then)

    @rule(rows=st.integers(1, MOST_ROWS), count=st.integers(1, 8), record=st.booleans())
    def reset(self, rows: int, count: int, record: bool) -> None:
        """And start anew, with other rows."""
        self.cache.reset()
        self.tokens, self.pending, self.recording = [], 0, False
        self.lengths_are_counted()
        self.start(rows, count, record)

    # -- what holds after each of them --------------------------------------------------------------------------------

    @invariant()
    def lengths_are_counted(self) -> None:
        assert int(self.cache.get_seq_length()) == max((len(row) for row in self.tokens), default=0)

    @invariant()
    def states_are_what_the_tokens_make(self) -> None:
        for row, ids in enumerate(self.tokens):
            self.check_state(row, ids)

    def check_state(self, row: int, ids: Row) -> None:
        new = self.setup.new_cache()
        if ids:
            models.cached_forward(self.model, new, torch.tensor([ids]))
        for index in layers(self.cache):
            state = self.cache.state(index)[row]
            assert_states(state, new.state(index)[0] if ids else torch.zeros_like(state))

    @invariant()
    def originals_stay_as_they_were(self) -> None:
        for cache, before, _ in self.aside:
            assert before.changes(cache) == []


def drive(machine: Callable[[], CacheMachine], seed: int, examples: int) -> None:
    """So many random sequences of operations."""
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=16,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with rt.enable():
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)


@pytest.mark.core
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_any_sequence_of_operations(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    if setup.spread:
        monkeypatch.setattr("replay_transformers.cursor.SPREAD_ROWS", 2)
    drive(lambda: CacheMachine(setup), SETUPS.index(setup), EXAMPLES // len(SETUPS))
