"""What `generate` builds for a model is kept for its next call of the same shape: no allocation, no new graph."""

import threading
import weakref
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from replay_transformers.cache import ReplayCache

__all__ = ["CachePool", "Pool"]

Kept = TypeVar("Kept")


class Pool(Generic[Kept]):
    """Idle things by model and shape. Each is either in the pool or in the hands of one running call.

    Args:
        per_model: how many are kept per model; the least recently used one beyond that is freed. None of them may
            refer to the model, which would then never be freed.
    """

    def __init__(self, per_model: int = 2) -> None:
        self.per_model = per_model
        self._lock = threading.Lock()
        self._idle: weakref.WeakKeyDictionary[Any, dict[Hashable, Kept]] = weakref.WeakKeyDictionary()

    def take(self, model: Any, key: Hashable) -> Kept | None:
        """Remove and return what is idle of this model and shape.

        None if there is nothing: what would have to go for the one that is built instead is freed before that.
        """
        with self._lock:
            idle = self._idle.get(model, {})
            kept = idle.pop(key, None)
            if kept is None:
                self._drop(idle, self.per_model - 1)
            return kept

    def give_back(self, model: Any, key: Hashable, kept: Kept) -> None:
        """Make it available to later calls."""
        with self._lock:
            idle = self._idle.setdefault(model, {})
            idle.pop(key, None)
            idle[key] = kept
            self._drop(idle, self.per_model)

    @staticmethod
    def _drop(idle: dict[Hashable, Kept], most: int) -> None:
        while len(idle) > most:
            del idle[next(iter(idle))]

    def clear(self) -> None:
        """Free everything that is idle."""
        with self._lock:
            self._idle.clear()


class CachePool(Pool[ReplayCache]):
    """Idle caches."""

    def take(self, model: Any, key: Hashable) -> ReplayCache | None:
        """Remove and return an idle cache of this model and shape, reset; None if there is none."""
        cache = super().take(model, key)
        if cache is not None:
            cache.reset()
        return cache

    def give_back(self, model: Any, key: Hashable, kept: ReplayCache) -> None:
        """Make a cache available to later calls. Growing attention layers are emptied at once."""
        if kept.max_cache_len is None:
            for layer in kept.attention_layers:
                layer.reset()
        super().give_back(model, key, kept)
