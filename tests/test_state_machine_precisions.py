"""Any order of operations on caches with narrow states, separate copies and decay skip, to the stored bit.

What such a cache stores depends on where it was folded and on nothing else: not on rejected drafts, other rows, blocks,
or copies of the cache. The truth about a row is a new cache of that row alone, fed with its tokens one by one and
flushed where the row's records were folded; where the row scanned a long forward, so does it. How a format rounds and
what decay skip leaves out is the same in both, and tested elsewhere. Models have one layer, whose operands depend on
the tokens alone, and compute in float64: the two then differ by too little to be rounded apart.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import replay_transformers as rt
from tests.support import models
from tests.support.cached import assert_logits, assert_states, model_for
from tests.support.precision import assert_copies_are_fresh, stored
from tests.test_state_machine import MOST_TOKENS, CacheMachine, Row, Setup, drive

EXAMPLES = [4, pytest.param(30, marks=pytest.mark.slow)]
MAMBA2, GATED_DELTA = "nemotron_h-M", "qwen3_5-no-attention"
FP8_COPY, NVFP4 = ("readout", "fp8"), ("checkpoint", "nvfp4")
# some heads of the Mamba-2 model forget one part in a thousand within a token, the Gated DeltaNet one part in forty
MAMBA2_SKIP, DELTA_SKIP = ("decay_skip", 0.999), ("decay_skip", 0.97)
SETUPS = [
    Setup(MAMBA2, 3, 2, precision=(FP8_COPY,)),
    Setup(GATED_DELTA, 5, 3, precision=(FP8_COPY,), fixed=True),
    Setup(MAMBA2, 5, 3, precision=(NVFP4,), fixed=True),
    Setup(GATED_DELTA, 3, 2, precision=(NVFP4,)),
    Setup(MAMBA2, 5, 2, precision=(MAMBA2_SKIP,)),
    Setup(GATED_DELTA, 16, 2, precision=(DELTA_SKIP,), spread=True),
    Setup(GATED_DELTA, 3, 4, precision=(NVFP4, FP8_COPY, DELTA_SKIP)),
]


@functools.cache
def double(name: str) -> Any:
    """A shared model in float64."""
    return copy.deepcopy(model_for(name)).double()


def cache_for(setup: Setup, **settings: Any) -> rt.ReplayCache:
    """An empty cache of this precision."""
    most = MOST_TOKENS if setup.fixed else None
    config = rt.ReplayConfig(**dict(setup.precision), **settings)
    return rt.ReplayCache(double(setup.model).config, config, max_cache_len=most)


Folds = tuple[tuple[int, bool], ...]


@functools.lru_cache(maxsize=4096)
def truth(setup: Setup, ids: tuple[int, ...], folds: Folds) -> tuple[rt.ReplayCache, tuple[torch.Tensor, ...]]:
    """A cache of one row that folded its records, or scanned tokens, up to these places; its logits by token."""
    if not ids:
        return cache_for(setup, window=2 * MOST_TOKENS, max_draft=0), ()
    (place, scanned), before = folds[-1] if folds else (0, False), folds[:-1]
    if len(ids) > place:
        start = len(ids) - 1
        cache, logits = truth(setup, ids[:start], folds)
    else:
        assert len(ids) == place
        start = (before[-1][0] if before else 0) if scanned else place
        cache, logits = truth(setup, ids[:start], before)
    cache = cache.fork()
    if start == len(ids):
        cache.flush()
        return cache, logits
    new = models.cached_forward(double(setup.model), cache, torch.tensor([ids[start:]]))
    return cache, (*logits, *new[0])


class PreciseMachine(CacheMachine):
    """Compares what is stored, to the bit."""

    def __init__(self, setup: Setup, moved: list[float]) -> None:
        super().__init__(setup)
        self.model, self.moved = double(setup.model), moved
        self.skips = "decay_skip" in dict(setup.precision)
        self.cache = cache_for(setup, window=setup.window, max_draft=setup.max_draft)

    def note_folds(self) -> None:
        bases = self.cache.cursor.tensors()[0].tolist()
        for row, base, end in zip(self.tokens, bases, self.ends, strict=True):
            known = row.folds[-1][0] if row.folds else 0
            if base > end > known:
                row.folds.append((end, False))  # before a scan
            if base > known:
                row.folds.append((base, base > end))
            row.read[end:] = [(base, len(row) > end + 1)] * (len(row) - end)
        self.ends = [len(row) for row in self.tokens]

    def append(self, count: int) -> None:
        self.ends = [len(row) for row in self.tokens]
        super().append(count)

    def true(self, row: Row) -> tuple[rt.ReplayCache, tuple[torch.Tensor, ...]]:
        return truth(self.setup, tuple(row), tuple(row.folds))

    def check_logits(self, row: Row, got: torch.Tensor) -> None:
        """Where all live records were read from the present state, and with decay skip one by one, as in the truth.

        Of the others Gated DeltaNet's corrections are derived from another rounding of the state.
        """
        want = torch.stack(self.true(row)[1][-len(got) :])
        place = row.folds[-1][0] if row.folds else 0
        if all(base == place and not (block and self.skips) for base, block in row.read[place:]):
            assert_logits(got, want)

    def check_state(self, row: int, ids: Row) -> None:
        if not ids:
            return
        true, _ = self.true(ids)
        assert_states(self.cache.state(0)[row], true.state(0)[0])
        for name, tensor in stored(true).items():
            mine = stored(self.cache)[name][row]
            assert torch.equal(mine.view(torch.uint8), tensor[0].view(torch.uint8)), name
        if self.cache.replay_config.readout is not None:
            assert_copies_are_fresh(self.cache)

    def teardown(self) -> None:
        """How far the logits are from those of an exact state."""
        for row in self.tokens:
            if row:
                exact = models.full_logits(self.model, torch.tensor([row]))[0]
                self.moved.append((torch.stack(self.true(row)[1]) - exact).abs().max().item())


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_any_sequence_of_operations(setup: Setup, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if setup.spread:
        monkeypatch.setattr("replay_transformers.cursor.SPREAD_ROWS", 2)
    moved: list[float] = []
    drive(lambda: PreciseMachine(setup, moved), SETUPS.index(setup), examples)
    assert max(moved) > 0.01, "the setting has no effect: the test could not fail"
