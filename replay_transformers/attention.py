"""The other layers of a replay cache: attention (transformers' own, made to outlive `inference_mode`), and none.

Usually all rows have the same number of keys. While the cursor is ``ragged`` each row has as many as it has seen
tokens (`replay_transformers.ragged`).
"""

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer, StaticLayer

from replay_transformers.cursor import Cursor, select_rows
from replay_transformers.ragged import write_behind

__all__ = ["EmptyLayer", "FixedAttentionLayer", "GrowingAttentionLayer"]


class EmptyLayer:
    """A layer with nothing to cache (mlp, experts)."""

    is_compileable = True
    is_croppable = True
    is_initialized = True
    supports_early_init = False
    keys: None = None
    values: None = None

    def update(self, *args: object, **kwargs: object) -> None:
        """Refuse: such a layer has no attention."""
        raise ValueError("this layer of the model holds no keys and values (it is an mlp or expert layer)")

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Nothing to reset."""

    def offload(self) -> None:
        """Nothing to move."""

    def prefetch(self) -> None:
        """Nothing to move."""


class _InOrder:
    """Refuses, before anything is taken in, keys and values that do not fit what the cache holds.

    Args:
        cursor: the cache's. before: state-space layers before this layer. total: state-space layers in the model.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, *args: Any, cursor: Cursor, before: int, total: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cursor, self.before, self.total = cursor, before, total

    def _is_replaceable(self, *states: torch.Tensor) -> bool:
        """Whether buffers of another shape, dtype or device may be dropped for new keys and values."""
        starting = self.cursor.is_starting(self.before, self.total)
        for held, new in zip((self.keys, self.values), states, strict=True):
            if held is None or held.ndim != new.ndim:
                continue
            if (held.shape[0], held.dtype, held.device) == (new.shape[0], new.dtype, new.device):
                continue
            if not starting:
                raise ValueError(self.cursor.mismatch(f"{new.shape[0]} rows of {new.dtype} on {new.device}", held))
            return True
        return False

    def offload(self) -> None:
        """Nothing: the layer stays on its device."""

    def prefetch(self) -> None:
        """Nothing: the layer stays on its device."""

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write ``[B, heads, T, head_dim]`` in place, in every row behind its own tokens."""
        assert self.keys is not None and self.values is not None
        starts = self.cursor.starts_of(self.keys.device, key_states.shape[2], self.is_after_end)
        write_behind(self.keys, key_states, starts)
        write_behind(self.values, value_states, starts)

    @property
    def is_after_end(self) -> bool:
        """Whether the cursor has moved past a forward before this layer takes part in it."""
        return self.before == self.total


class GrowingAttentionLayer(_InOrder, DynamicLayer):
    """Keys and values ``[B, heads, length, head_dim]`` that grow with every forward."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B, heads, T, head_dim]`` keys and values; returns all of them. What is stored is detached.

        Raises:
            ValueError: another number of rows or another dtype than the cache holds. Nothing is changed then.
        """
        if self._is_replaceable(key_states, value_states):
            self.reset()
        if self.cursor.ragged:
            assert self.keys is not None and self.values is not None
            tokens = 0 if self.is_after_end else key_states.shape[2]
            missing = self.cursor.width(tokens) - self.keys.shape[2]
            if missing > 0:  # zeros: what a mask hides must be finite all the same
                self.keys, self.values = (pad(held, (0, 0, 0, missing)) for held in (self.keys, self.values))
            self._write(key_states, value_states)
            return self.keys, self.values
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = keys.detach(), values.detach()
        return keys, values

    def join(self, length: int) -> None:
        """Stop being ragged: every row has ``length`` tokens."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def reset(self) -> None:
        """Drop keys and values; transformers before 5.20 only zeroes them, which keeps their length."""
        self.keys = self.values = None
        self.is_initialized = False

    def select(self, rows: torch.Tensor, in_place: bool) -> None:
        """Keep the given rows (int64 ``[n]``)."""
        if self.keys is not None and self.values is not None and self.keys.ndim == 4:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class FixedAttentionLayer(_InOrder, StaticLayer):
    """Keys and values ``[B, heads, max_cache_len, head_dim]``, allocated once and written in place."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate like `StaticLayer`, as ordinary tensors even under `inference_mode`."""
        if torch.compiler.is_compiling():
            super().lazy_initialization(key_states, value_states)
            return
        with torch.inference_mode(False), torch.no_grad():
            super().lazy_initialization(key_states, value_states)
            # transformers before 5.21 takes the keys' dtype for both
            if self.values is not None and self.values.dtype != value_states.dtype:
                self.values = self.values.to(value_states.dtype)
                torch._dynamo.mark_static_address(self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, heads, T, head_dim]`` keys and values behind the others; returns the whole buffers.

        Raises:
            ValueError: another number of rows or another dtype than the cache holds. Nothing is changed then.
        """
        if self._is_replaceable(key_states, value_states):
            self.lazy_initialization(key_states, value_states)
        if self.cursor.ragged:
            assert self.keys is not None and self.values is not None
            self._write(key_states, value_states)
            return self.keys, self.values
        return super().update(key_states.detach(), value_states.detach(), *args, **kwargs)

    def join(self, length: int) -> None:
        """Stop being ragged: every row has ``length`` tokens."""
        self.cumulative_length.fill_(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (a negative int); transformers has it since 5.21."""
        self.cumulative_length.sub_(abs(tokens_to_remove))

    def select(self, rows: torch.Tensor, in_place: bool) -> None:
        """Keep the given rows (int64 ``[n]``), in place if the addresses have to stay."""
        if self.keys is not None and self.values is not None:
            self.keys = select_rows(self.keys, rows, in_place)
            self.values = select_rows(self.values, rows, in_place)
            self.batch_size = self.keys.shape[0]
