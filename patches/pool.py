"""Caches that `generate` builds are kept for its next call of the same shape: no allocation, no new compiled graph."""

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from replay_transformers.cache import ReplayCache

__all__ = ["CachePool"]


class CachePool:
    """Idle caches by model and shape. A cache is either in the pool or in the hands of one running call.

    Args:
        per_model: idle caches kept per model; the least recently used one beyond that is freed.
    """

    def __init__(self, per_model: int = 2) -> None:
        self.per_model = per_model
        self._lock = threading.Lock()
        self._idle: weakref.WeakKeyDictionary[Any, dict[Hashable, ReplayCache]] = weakref.WeakKeyDictionary()

    def take(self, model: Any, key: Hashable) -> ReplayCache | None:
        """Remove and return an idle cache of this model and shape, reset; None if there is none."""
        with self._lock:
            cache = self._idle.get(model, {}).pop(key, None)
        if cache is not None:
            cache.reset()
        return cache

    def give_back(self, model: Any, key: Hashable, cache: ReplayCache) -> None:
        """Make a cache available to later calls. Growing attention layers are emptied at once."""
        if cache.max_cache_len is None:
            for layer in cache.attention_layers:
                layer.reset()
        with self._lock:
            idle = self._idle.setdefault(model, {})
            idle.pop(key, None)
            idle[key] = cache
            while len(idle) > self.per_model:
                del idle[next(iter(idle))]

    def clear(self) -> None:
        """Free every idle cache."""
        with self._lock:
            self._idle.clear()
