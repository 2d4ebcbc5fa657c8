"""A cache for models whose layers are all attention, in which every row of the batch has its own length."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from replay_transformers.ragged import as_attention_takes_it, visible, width_for, write_behind

__all__ = ["RowCache", "RowLayer"]


@dataclass
class RowPointers:
    """Where the rows stand, shared by the layers of a cache.

    Args:
        padding: int64 ``[B]``, slots at the beginning of each row that hold padding.
        first: int64 ``[B]``, position of the token in the slot behind the padding.
        starts: int64 ``[B]``, the slot of each row's first token in the latest forward.
        lengths: int64 ``[B]``, filled slots of each row, padding included.
        before: at least as many as the longest row had before the latest forward.
        longest: at least as many as the longest row has.
        width: slots of the buffers, which never become narrower.
        copies: ``starts`` by device.
    """

    padding: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    first: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    starts: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    lengths: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    before: int = 0
    longest: int = 0
    width: int = 0
    copies: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def starts_on(self, device: torch.device) -> torch.Tensor:
        """``starts``, copied there once per forward."""
        if device not in self.copies:
            self.copies[device] = self.starts.to(device)
        return self.copies[device]

    @property
    def slots(self) -> int:
        """Slots that the latest forward attends to: the first one those of its own tokens only."""
        return self.width if self.before else self.longest


class RowLayer(DynamicLayer):
    """Keys and values ``[B, heads, slots, head_dim]``, each row's from slot 0 on."""

    is_croppable = False

    def __init__(self, rows: RowPointers) -> None:
        super().__init__()
        self.rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, heads, T, head_dim]`` behind every row, detached; returns the buffers.

        The first forward, behind which all rows are as long, gets its own keys and values back.
        """
        self.keys = self._widened(self.keys, key_states)
        self.values = self._widened(self.values, value_states)
        self.is_initialized = True
        starts = self.rows.starts_on(key_states.device)
        write_behind(self.keys, key_states, starts)
        write_behind(self.values, value_states, starts)
        return (self.keys, self.values) if self.rows.before else (key_states, value_states)

    def _widened(self, held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        if held is None:
            held = new.new_zeros(*new.shape[:2], 0, new.shape[3])
        missing = self.rows.width - held.shape[2]
        return pad(held, (0, 0, 0, missing)) if missing > 0 else held

    def reset(self) -> None:
        """Drop keys and values; buffers of a fixed width stay where they are, with zeros in them."""
        if self.rows.width and self.keys is not None and self.values is not None:
            self.keys.zero_()
            self.values.zero_()
            return
        self.keys = self.values = None
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Slots of the longest row before the latest forward."""
        return self.rows.before

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that the latest forward attends to, and 0."""
        return self.rows.slots, 0


class RowCache(Cache):
    """Keys and values of rows that may have seen different numbers of tokens.

    `begin` starts a sequence, `advance` comes before each forward, and `reject` may follow it. Rejecting moves a row's
    pointer and leaves its keys, which the next forward overwrites.

    Args:
        layers: of the model.
        slots: the buffers have room for so many tokens per row and stay where they are; 0: they grow.
    """

    def __init__(self, layers: int, slots: int = 0) -> None:
        self.is_fixed = slots > 0
        self.rows = RowPointers(width=width_for(slots))
        super().__init__(layers=[RowLayer(self.rows) for _ in range(layers)])

    def begin(self, padding: torch.Tensor, first: torch.Tensor | None = None) -> None:
        """Forget everything.

        Args:
            padding: int64 ``[B]``, slots of padding that the rows of the first forward will have.
            first: int64 ``[B]``, positions of the tokens behind it; 0 by default.
        """
        if not self.is_fixed:
            self.rows.width = 0
        for layer in self.layers:
            layer.reset()
        self.rows.padding, self.rows.lengths = padding, torch.zeros_like(padding)
        self.rows.first = torch.zeros_like(padding) if first is None else first
        self.rows.starts = self.rows.lengths
        self.rows.before = self.rows.longest = 0

    def advance(self, tokens: int) -> None:
        """Make room for so many more tokens in every row.

        Raises:
            ValueError: buffers of a fixed width have none. Nothing is changed then.
        """
        longest = self.rows.longest + tokens
        if self.is_fixed and longest > self.rows.width:
            raise ValueError(
                f"{self.rows.longest} tokens in the longest row and {tokens} new ones exceed the {self.rows.width} "
                "slots of this RowCache: build one with more slots"
            )
        self.rows.starts, self.rows.before, self.rows.copies = self.rows.lengths, self.rows.longest, {}
        self.rows.lengths, self.rows.longest = self.rows.starts + tokens, longest
        self.rows.width = max(self.rows.width, width_for(longest))

    def positions(self) -> torch.Tensor:
        """Of the tokens of the latest `advance`, int64 ``[B, tokens]``; ``first`` for padding."""
        rows = self.rows
        order = torch.arange(rows.longest - rows.before, device=rows.starts.device)
        return ((rows.starts - rows.padding)[:, None] + order).clamp(min=0) + rows.first[:, None]

    def mask(self, implementation: str, dtype: torch.dtype) -> torch.Tensor | None:
        """What the tokens of the latest `advance` see: ``[B, 1, T, slots]``, as the attention takes it.

        None at a beginning without padding where the attention is causal by itself.

        Raises:
            NotImplementedError: an attention implementation that takes no mask per row.
        """
        rows, tokens = self.rows, self.rows.longest - self.rows.before
        if not rows.before and implementation == "sdpa" and not bool(rows.padding.any()):
            return None
        hidden = torch.arange(rows.slots, device=rows.padding.device) < rows.padding[:, None]
        return as_attention_takes_it(visible(rows.starts, tokens, rows.slots, hidden), implementation, dtype)

    def reject(self, rejected: torch.Tensor, longest: int | None = None) -> None:
        """Forget the last ``rejected`` (int64 ``[B]``) tokens of each row.

        Args:
            longest: slots of the longest row then, or more, if known: saves waiting for the GPU.
        """
        self.rows.lengths = self.rows.lengths - rejected
        self.rows.longest = int(self.rows.lengths.max()) if longest is None else longest

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: rows are rolled back one by one."""
        raise NotImplementedError("a RowCache is rolled back by `reject`, each row by its own number of tokens")
