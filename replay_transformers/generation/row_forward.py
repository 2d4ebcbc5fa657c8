"""Forwards of a drafter on a `RowCache`, of which those that every round repeats may be recorded and replayed."""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from replay_transformers.generation.row_cache import RowCache

__all__ = ["RowForward", "weakly"]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method of an object that it does not keep alive."""
    reference = weakref.WeakMethod(method)

    def run_weakly(*operands: Any, **named: Any) -> Any:
        alive = reference()
        assert alive is not None
        return alive(*operands, **named)

    return run_weakly


class RowForward:
    """Takes in what comes behind the rows of a cache.

    Args:
        cache: the rows' keys and values.
        run: ``run(tokens, *others, mask, positions, cache)``, one tensor: the model.
        implementation: transformers' name of its attention. dtype: of its queries.
        record: makes a function of tensors, which gives a tuple of them, one that is recorded once and replayed then.
            The cache must be of a fixed width for that.
        lengths: numbers of tokens per row whose forwards are recorded.
    """

    def __init__(
        self,
        cache: RowCache,
        run: Callable[..., torch.Tensor],
        implementation: str,
        dtype: torch.dtype,
        record: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        lengths: Collection[int] = (),
    ) -> None:
        if record is not None and not cache.is_fixed:
            raise ValueError("forwards can only be recorded on a RowCache of a fixed width, got one that grows")
        self.cache, self.run, self.implementation, self.dtype = cache, run, implementation, dtype
        self.record, self.lengths = record, frozenset(lengths)
        self._recorded: dict[int, Callable[..., Any]] = {}

    def __call__(self, tokens: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Advance every row by the tokens, int64 ``[B, T]``; what the model makes of them."""
        count, rows = tokens.shape[1], self.cache.rows
        self.cache.advance(count)
        pointers = rows.starts, rows.padding, rows.first
        if self.record is None or not rows.before or count not in self.lengths:
            return self._run(tokens, *others, *pointers)[0]
        if count not in self._recorded:  # a cycle would keep buffers and graphs alive
            self._recorded[count] = self.record(weakly(self._run))
        result = self._recorded[count](tokens, *others, *pointers)[0]
        rows.starts, rows.padding, rows.first = pointers
        return result

    def _run(self, tokens: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor]:
        """The last three operands are the pointers: a recorded forward has them in places of its own."""
        *inputs, starts, padding, first = others
        rows = self.cache.rows
        rows.starts, rows.padding, rows.first, rows.copies = starts, padding, first, {}
        mask, positions = self.cache.mask(self.implementation, self.dtype), self.cache.positions()
        result = self.run(tokens, *inputs, mask, positions, self.cache)
        rows.copies = {}
        return (result,)
