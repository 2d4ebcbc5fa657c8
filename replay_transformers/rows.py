"""What a `ReplayCache` does with its rows: choose and repeat them, and let them differ in length."""

from typing import Any

import torch

from replay_transformers.cursor import Cursor
from replay_transformers.layers import ReplayLayer

__all__ = ["RowsOfCache"]


class RowsOfCache:
    """Methods of `ReplayCache` about rows."""

    cursor: Cursor

    @property
    def batch_size(self) -> int:
        """Rows."""
        raise NotImplementedError

    @property
    def replay_layers(self) -> list[ReplayLayer]:
        """The state-space layers."""
        raise NotImplementedError

    @property
    def attention_layers(self) -> list[Any]:
        """The attention layers."""
        raise NotImplementedError

    def _require_between_forwards(self, what: str) -> None:
        raise NotImplementedError

    def row_lengths(self) -> torch.Tensor:
        """Tokens that each row has seen, padding and uncommitted tokens included: int64 ``[B]``, a new tensor.

        Raises:
            ValueError: nothing seen yet.
        """
        if self.cursor.fresh:
            raise ValueError("the cache has not seen any tokens yet")
        return self.cursor.lengths()

    def separate_rows(self) -> None:
        """From now on the rows may have seen different numbers of tokens, until `join_rows` or `reset`.

        Raises:
            ValueError: nothing seen yet.
        """
        if self.cursor.fresh:
            raise ValueError("the cache has not seen any tokens yet")
        if not self.cursor.ragged:
            self.cursor.longest = int(self.cursor.lengths().max())
            self.cursor.ragged = True

    def join_rows(self) -> None:
        """Go back to rows of one length, in place.

        Raises:
            ValueError: the rows have seen different numbers of tokens. Nothing is changed then.
        """
        if not self.cursor.ragged:
            return
        lengths = set(self.cursor.lengths().tolist())
        if len(lengths) > 1:
            raise ValueError(f"the rows of this cache have seen different numbers of tokens: {sorted(lengths)}")
        for layer in self.attention_layers:
            layer.join(*lengths)
        self.cursor.ragged = False

    def reject_rows(self, rejected: torch.Tensor, longest: int | None = None) -> None:
        """`crop` for a loop that knows what it does, unchecked. The cache must be one with separate rows.

        Args:
            rejected: int64 ``[B]``, of each row's uncommitted tokens. The others are committed.
            longest: tokens that the longest row has seen then, or more, if known: saves waiting for the GPU.
        """
        self.cursor.commit(rejected.to(self.cursor.tensors()[0].device))
        self.cursor.longest = int(self.cursor.lengths().max()) if longest is None else longest

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace row i by row ``beam_idx[i]`` (int64 ``[B]``), in place."""
        self._require_between_forwards("reorder")
        self._select_rows(beam_idx, in_place=len(beam_idx) == self.batch_size)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, next to each other."""
        self._require_between_forwards("repeat rows")
        if repeats < 1:
            raise ValueError(f"rows can be repeated 1 or more times, got {repeats}")
        rows = torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats)
        self._select_rows(rows, in_place=False)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the given rows (int64 or bool ``[n]``), in the given order."""
        self._require_between_forwards("select rows")
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        if not len(indices):
            raise ValueError("cannot select no rows at all; use reset() to empty the cache")
        self._select_rows(indices, in_place=False)

    def _select_rows(self, rows: torch.Tensor, in_place: bool) -> None:
        if self.cursor.base is None:
            return
        copies = {device: rows.to(device) for device in self._devices()}
        rows = copies[self.cursor.base.device]
        for layer in (*self.replay_layers, *self.attention_layers):
            held = layer.conv_ring if isinstance(layer, ReplayLayer) else layer.keys
            if held is not None:
                layer.select(copies[held.device], in_place)
        self.cursor.select(rows, in_place)

    def _devices(self) -> set[torch.device]:
        held = [layer.conv_ring for layer in self.replay_layers] + [layer.keys for layer in self.attention_layers]
        return {buffer.device for buffer in (self.cursor.base, *held) if buffer is not None}
