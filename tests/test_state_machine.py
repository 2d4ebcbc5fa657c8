"""Any order of forwards, verdicts, flushes and row operations, against lists of tokens recomputed from scratch.

The truth about a row is its list of tokens: a forward of all of them without a cache, and the state of a new cache that
is fed with all of them at once. Tolerances are in tests/support/cached.py.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import replay_transformers as rt
from tests.support import models
from tests.support.cached import assert_logits, assert_states, layers, model_for, new_cache
from tests.support.snapshots import Snapshot

EXAMPLES = 200
MOST_TOKENS, MOST_ROWS = 40, 3


@dataclass(frozen=True)
class Setup:
    """A model and the settings of its cache."""

    model: str
    window: int
    max_draft: int
    fixed: bool = False

    def __str__(self) -> str:
        return f"{self.model}-L{self.window}-draft{self.max_draft}-{'fixed' if self.fixed else 'growing'}"

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
]


class CacheMachine(RuleBasedStateMachine):
    """Drives one cache; ``tokens`` holds per row what the cache should have seen."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.model = model_for(setup.model)
        self.cache = setup.new_cache()
        self.attention = bool(self.cache.attention_layers)
        self.tokens: list[list[int]] = []
        self.pending = 0
        self.recording = False
        self.aside: list[tuple[rt.ReplayCache, Snapshot, tuple[Any, ...]]] = []

    @property
    def room(self) -> int:
        """Tokens that may still be appended."""
        return MOST_TOKENS - max((len(row) for row in self.tokens), default=0)

    # -- forwards -----------------------------------------------------------------------------------------------------

    def append(self, count: int, rows: int, seed: int) -> None:
        count = min(count, self.room)
        if count == 0:
            return
        if not self.tokens:
            if self.setup.fixed and self.cache.batch_size > 0:
                rows = self.cache.batch_size
            self.tokens = [[] for _ in range(rows)]
        new = models.prompt(len(self.tokens), count, seed=seed)["input_ids"]
        logits = models.cached_forward(self.model, self.cache, new)
        for row, ids in zip(self.tokens, new.tolist(), strict=True):
            row.extend(ids)
        self.pending = min(self.pending + count, self.setup.max_draft) if self.recording else 0
        for row, got in zip(self.tokens, logits, strict=True):
            truth = models.full_logits(self.model, torch.tensor([row]))[0, -count:]
            assert_logits(got, truth)

    @rule(rows=st.integers(1, MOST_ROWS), seed=st.integers(0, 99))
    def append_one(self, rows: int, seed: int) -> None:
        self.append(1, rows, seed)

    @rule(count=st.integers(2, 20), rows=st.integers(1, MOST_ROWS), seed=st.integers(0, 99))
    def append_several(self, count: int, rows: int, seed: int) -> None:
        self.append(count, rows, seed)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    @rule()
    def record(self) -> None:
        self.cache.activate_past_recording()
        self.recording = True

    @rule(data=st.data(), as_tensor=st.booleans())
    def crop(self, data: st.DataObject, as_tensor: bool) -> None:
        if self.attention or not self.tokens or not as_tensor:
            rejected = [data.draw(st.integers(0, self.pending))] * len(self.tokens)
            amount = rejected[0] if rejected else 0
            self.cache.crop(torch.tensor([-n for n in rejected]) if as_tensor and rejected else -amount)
        else:
            each = st.integers(0, self.pending)
            rejected = data.draw(st.lists(each, min_size=len(self.tokens), max_size=len(self.tokens)))
            self.cache.crop(-torch.tensor(rejected))
        for row, count in zip(self.tokens, rejected, strict=True):
            del row[len(row) - count :]
        self.pending = 0

    @rule(beyond=st.integers(1, 5), per_row=st.booleans())
    def crop_too_far(self, beyond: int, per_row: bool) -> None:
        before, rows = Snapshot(self.cache), len(self.tokens)
        amount: Any = -(self.pending + beyond)
        if per_row and rows:
            amount = torch.tensor([amount, *[0] * (rows - 1)])
        with pytest.raises(ValueError, match="cannot reject"):
            self.cache.crop(amount)
        assert before.changes(self.cache) == []

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        if self.tokens:
            assert self.cache.cursor.committed is not None
            assert not self.cache.cursor.committed.any()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def choose(self, rows: list[int]) -> None:
        self.tokens = [list(self.tokens[row]) for row in rows]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = len(self.tokens)
        order = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
        self.cache.reorder_cache(torch.tensor(order))
        self.choose(order)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), as_mask=st.booleans())
    def select(self, data: st.DataObject, as_mask: bool) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(self.tokens) - 1), min_size=1, max_size=MOST_ROWS))
        if as_mask:
            chosen = sorted(set(chosen))
            self.cache.batch_select_indices(torch.tensor([row in chosen for row in range(len(self.tokens))]))
        else:
            self.cache.batch_select_indices(torch.tensor(chosen))
        self.choose(chosen)

    @precondition(lambda self: self.tokens)
    @rule(repeats=st.integers(1, MOST_ROWS))
    def repeat(self, repeats: int) -> None:
        if len(self.tokens) * repeats <= MOST_ROWS:
            self.cache.batch_repeat_interleave(repeats)
            self.choose([row for row in range(len(self.tokens)) for _ in range(repeats)])

    # -- copies -------------------------------------------------------------------------------------------------------

    @rule()
    def fork(self) -> None:
        """Go on with the fork; the original stays aside."""
        known = (copy.deepcopy(self.tokens), self.pending, self.recording)
        self.aside.append((self.cache, Snapshot(self.cache), known))
        self.cache = self.cache.fork()

    @precondition(lambda self: self.aside)
    @rule()
    def back_to_the_original(self) -> None:
        self.cache, _, (self.tokens, self.pending, self.recording) = self.aside.pop()

    @rule(how=st.sampled_from([copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]))
    def replace_by_a_copy(self, how: Any) -> None:
        before = Snapshot(self.cache)
        self.cache = how(self.cache)
        assert before.changes(self.cache) == []

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.tokens, self.pending, self.recording = [], 0, False

    # -- what holds after each of them --------------------------------------------------------------------------------

    @invariant()
    def lengths_are_counted(self) -> None:
        assert int(self.cache.get_seq_length()) == max((len(row) for row in self.tokens), default=0)

    @invariant()
    def states_are_what_the_tokens_make(self) -> None:
        for row, ids in enumerate(self.tokens):
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


@pytest.mark.core
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_any_sequence_of_operations(setup: Setup) -> None:
    settings = hypothesis.settings(
        max_examples=EXAMPLES // len(SETUPS),
        stateful_step_count=12,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with rt.enable():
        machine = hypothesis.seed(SETUPS.index(setup))(lambda: CacheMachine(setup))
        run_state_machine_as_test(machine, settings=settings)
