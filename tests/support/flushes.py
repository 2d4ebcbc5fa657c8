"""Whether calls of `generate` kept records and folded them, read off the caches that they give back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from replay_transformers.cache import ReplayCache
from replay_transformers.cursor import SPREAD_ROWS
from replay_transformers.patches.pool import CachePool


@dataclass(frozen=True)
class Pointers:
    """Of a cache that nothing was rejected from: per row, tokens in the checkpoint and records after them."""

    folded: list[int]
    records: list[int]

    @classmethod
    def of(cls, cache: ReplayCache) -> Pointers:
        """Where they stand."""
        base, committed, pending = (tensor.tolist() for tensor in cache.cursor.tensors())
        assert not any(pending)
        return cls(base, committed)

    def check(self, impl: str, prompt: int, window: int, steps: int) -> None:
        """They are where a scanned prompt and so many single tokens leave them, the row's last one in vain or not.

        Args:
            impl: "auto", which writes small states through on a GPU and keeps no record, or one that keeps records.
            prompt, window: in tokens; every row flushes at least once.
        """
        rows = len(self.folded)
        for row, (folded, records) in enumerate(zip(self.folded, self.records, strict=True)):
            taken = folded + records - prompt
            assert taken in (steps, steps + 1)
            first = window - (row * window // rows if rows >= SPREAD_ROWS else 0)
            assert taken > first, "the test is too short"
            flushed = first + (taken - first - 1) // window * window
            assert records == (0 if impl == "auto" else taken - flushed), f"row {row}"


@contextmanager
def given_back() -> Iterator[list[Pointers]]:
    """Grows by the pointers of every cache that a call within gives back, at its end."""
    found, original = list[Pointers](), CachePool.give_back

    def give_back(self: CachePool, model: Any, key: Any, cache: ReplayCache) -> None:
        found.append(Pointers.of(cache))
        original(self, model, key, cache)

    with mock.patch.object(CachePool, "give_back", give_back):
        yield found
