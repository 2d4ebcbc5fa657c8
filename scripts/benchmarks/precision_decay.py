"""How long heads remember and how often a decay threshold is passed, read from the rings of a cache between steps."""

import math
from typing import Any

import torch

from replay_transformers.cache import ReplayCache
from replay_transformers.layers import Mamba2ReplayLayer, ReplayLayer

from .precision_grid import short
from .timing import quantile

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class DecayReader:
    """Reads the log-decay of every token of every head out of a cache that takes in one token per forward.

    A ring holds the last tokens, folded or not, so that a look at it every few steps sees all of them; nothing on the
    way of a step is touched. Sums stay on the device: the host is not waited for.

    Call `before` and `after` around each step and `close` at the end.

    Args:
        cache: after its prompt, not recording.
        seen: tokens of the prompt.
        threshold: of decays that are counted; 0 counts none.
    """

    def __init__(self, cache: ReplayCache, seen: int, threshold: float = 0.0) -> None:
        self.cache, self.seen, self.threshold = cache, seen, threshold
        config = cache.replay_config
        self.capacity, self.unread = config.capacity, 0
        # steps whose records, and the committed ones before them, are in the ring at once
        self.most = config.capacity - max(config.window, config.max_step)
        self.phases: list[torch.Tensor] = []
        self.forgotten: list[Any] = [0.0 for _ in cache.replay_layers]  # per layer, [heads]: sum of 1 - decay
        self.count = 0
        self.under: list[Any] = [0.0 for _ in cache.replay_layers]  # per layer, [2]: plain steps, flushes
        self.steps: Any = 0.0  # [2]: (row, step) pairs that were plain steps and flushes

    def before(self) -> None:
        """Note how many records each row has, which is its phase in the window."""
        self.phases.append(self._committed().clone())

    def after(self) -> None:
        """Read the rings if they could overrun before the next look."""
        self.unread += 1
        self.seen += 1
        if self.unread == self.most:
            self._read()

    def close(self) -> None:
        """Read what is left."""
        if self.unread:
            self._read()

    def _committed(self) -> torch.Tensor:
        committed = self.cache.cursor.committed
        assert committed is not None
        return committed

    def _read(self) -> None:
        held = torch.stack([*self.phases, self._committed()])  # [n + 1, B]
        records, flushed = held[:-1], held[1:] <= held[:-1]
        # as indices into sums over the ring's tokens, of which the step's own is number `own`
        own = torch.arange(self.capacity - self.unread, self.capacity, device=held.device)[:, None]
        begin, end = own - records, torch.where(flushed, own, own + 1)
        first = self.seen - self.capacity
        slots = torch.arange(first, self.seen, device=held.device) % self.capacity
        kinds = torch.stack([~flushed, flushed]).to(torch.float64)  # [2, n, B]
        self.steps = self.steps + kinds.sum((1, 2))
        self.count += self.unread * held.shape[1]
        for index, layer in enumerate(self.cache.replay_layers):
            # slots that were never written hold zeros, and no live record
            logs = log_decay(layer).to(held.device)[:, :, slots].double()  # [B, heads, capacity]
            new = logs[:, :, self.capacity - self.unread :]
            self.forgotten[index] = self.forgotten[index] - torch.expm1(new).sum((0, 2))
            if self.threshold:
                sums = torch.nn.functional.pad(logs.cumsum(2), (1, 0)).permute(2, 0, 1)  # [capacity + 1, B, heads]
                total = _at(sums, end) - _at(sums, begin)
                is_under = (total < math.log(self.threshold)).double().mean(2)
                self.under[index] = self.under[index] + (kinds * is_under).sum((1, 2))
        self.phases, self.unread = [], 0

    def memory(self) -> dict[str, Any]:
        """Quantiles over heads of the mean decay per token, and of the memory ``1 / (1 - decay)`` in tokens."""
        layers = [(sums / self.count).tolist() for sums in self.forgotten]
        window = self.cache.replay_config.window
        everything = [value for layer in layers for value in layer]
        return {
            "heads": len(everything),
            "window": window,
            "decay": _quantiles([1 - value for value in everything]),
            "memory_tokens": _quantiles([_memory(value) for value in everything]),
            "memory_windows": _quantiles([_memory(value) / window for value in everything]),
            "memory_tokens_by_layer": [_quantiles([_memory(value) for value in layer]) for layer in layers],
        }

    def skipped(self) -> dict[str, Any]:
        """Which part of all (row, head, step) had a decay under the threshold.

        A plain step is tested with the decay of all its records up to its own token, a flush with that of the records
        it folds.
        """
        counts = torch.stack(self.under)  # [layers, 2]
        plain, flush = (counts.mean(0) / self.steps.clamp(min=1)).tolist()
        return {
            "skipped": short(counts.sum(1).mean() / self.steps.sum()),
            "skipped_plain": short(plain),
            "skipped_flush": short(flush),
            "skipped_by_layer": [short(value) for value in counts.sum(1) / self.steps.sum()],
        }


def log_decay(layer: ReplayLayer) -> torch.Tensor:
    """What the layer's ring holds of it, ``[B, heads, slots]``."""
    if isinstance(layer, Mamba2ReplayLayer):
        return layer.rings["dt"] * layer.rate[:, None]
    return layer.rings["g"]


def _at(sums: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of ``[slots, B, heads]``, the entries ``[n, B]``: ``[n, B, heads]``."""
    return sums.gather(0, index[..., None].expand(*index.shape, sums.shape[2]))


def _memory(forgotten: float) -> float:
    return 1 / max(forgotten, 1e-12)


def _quantiles(values: list[float]) -> dict[str, float]:
    return {f"{q:g}": short(quantile(values, q), 9) for q in QUANTILES}
