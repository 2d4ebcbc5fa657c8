"""Everything a replay cache holds, to the bit."""

from __future__ import annotations

import torch

from replay_transformers.cache import ReplayCache


def tensors(cache: ReplayCache) -> dict[str, torch.Tensor]:
    """The cache's own tensors by name, not copies: buffers, keys and values, the cursor."""
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "buffers"):
            found |= {f"{index}.{name}": buffer for name, buffer in layer.buffers().items()}
        for name in ("keys", "values", "cumulative_length"):
            if isinstance(value := getattr(layer, name, None), torch.Tensor):
                found[f"{index}.{name}"] = value
        if isinstance(rate := getattr(layer, "rate", None), torch.Tensor):
            found[f"{index}.rate"] = rate
    if cache.cursor.base is not None:
        found |= dict(zip(("base", "committed", "pending"), cache.cursor.tensors(), strict=True))
    if cache.cursor.early is not None:
        found["early"] = cache.cursor.early
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


class Snapshot:
    """What a cache held when the snapshot was taken."""

    def __init__(self, cache: ReplayCache) -> None:
        self._held = {name: (tensor.shape, tensor.dtype, _bits(tensor)) for name, tensor in tensors(cache).items()}
        self._flags = self._flags_of(cache)

    @staticmethod
    def _flags_of(cache: ReplayCache) -> tuple[object, ...]:
        cursor = cache.cursor
        return cursor.recording, cursor.fresh, cursor.plan is None, int(cache.get_seq_length())

    def changes(self, cache: ReplayCache) -> list[str]:
        """Names of what the cache holds now and did not then, or the reverse; NaN equals itself."""
        now = tensors(cache)
        names = [
            name
            for name in self._held.keys() | now.keys()
            if name not in now or name not in self._held or not self._same(name, now[name])
        ]
        return sorted(names) + (["flags"] if self._flags != self._flags_of(cache) else [])

    def _same(self, name: str, tensor: torch.Tensor) -> bool:
        shape, dtype, bits = self._held[name]
        return tensor.shape == shape and tensor.dtype == dtype and torch.equal(_bits(tensor), bits)
