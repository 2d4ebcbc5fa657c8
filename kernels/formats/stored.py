"""A batch of recurrent states in a format of more than a dtype."""

from collections.abc import Iterator
from typing import Any

import torch

from replay_transformers.kernels.formats.base import Format
from replay_transformers.kernels.formats.rounding import state_bits
from replay_transformers.kernels.saturate import bounded

__all__ = ["State", "StoredState", "readable", "refresh", "store_rows"]

MOST_VALUES = 2**24  # that are encoded or decoded at once


class StoredState:
    """States of ``B`` rows and ``H`` heads, stored channel by channel.

    Args:
        format: how.
        parts: the format's tensors by name, ``[B, H, ...]``, **mutated** by `write`.
        states: states of a channel.
        transposed: `read` and `write` deal in ``[B, H, states, channels]`` (Gated DeltaNet in transformers) instead of
            ``[B, H, channels, states]``.
        key: 64 bits, of stochastic rounding.
    """

    def __init__(
        self, format: Format, parts: dict[str, torch.Tensor], states: int, transposed: bool = False, key: int = 0
    ) -> None:
        self.format, self.parts, self.states, self.transposed, self.key = format, parts, states, transposed, key

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.parts["values"].device

    def read(self) -> torch.Tensor:
        """The states in float32, in memory of their own."""
        rows, heads, channels = self.parts["values"].shape[:3]
        values = torch.empty(rows, heads, channels, self.states, device=self.device)
        for part in self._few_rows():
            values[part] = self.format.decode({name: one[part] for name, one in self.parts.items()}, self.states)
        return values.transpose(-1, -2) if self.transposed else values

    def write(self, values: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Store float32 states, **in place**, without autograd.

        Args:
            values: ``[B, H, ., .]``. positions: int64 ``[B]``, tokens of each row that they contain.
            rows: bool ``[B]``; the other rows keep their bytes. None: all.
        """
        with torch.no_grad():
            values = values.transpose(-1, -2) if self.transposed else values
            heads, channels, states = values.shape[1:]
            for part in self._few_rows():
                bits = None
                if self.format.is_stochastic:
                    bits = state_bits(positions[part], heads, channels, states, self.key, part.start)
                for name, encoded in self.format.encode(values[part].to(torch.float32), bits).items():
                    kept = self.parts[name][part]
                    if rows is not None:
                        encoded = torch.where(rows[part].view(-1, *[1] * (encoded.ndim - 1)), encoded, kept)
                    kept.copy_(encoded)

    def _few_rows(self) -> Iterator[slice]:
        """Parts of the batch: what is between a state and its parts takes many times the memory of a state."""
        rows, heads, channels = self.parts["values"].shape[:3]
        count = max(1, MOST_VALUES // (heads * channels * self.states))
        for start in range(0, rows, count):
            yield slice(start, min(start + count, rows))

    def with_parts(self, parts: dict[str, torch.Tensor]) -> "StoredState":
        """The same with other tensors."""
        return StoredState(self.format, parts, self.states, self.transposed, self.key)

    def __repr__(self) -> str:
        shapes: dict[str, Any] = {name: tuple(part.shape) for name, part in self.parts.items()}
        return f"StoredState({self.format.name}, {shapes})"


# a tensor where the format is a dtype: ``[B, H, channels, states]``, of Gated DeltaNet ``[B, H, states, channels]``
State = torch.Tensor | StoredState


def readable(state: State, dtype: torch.dtype) -> torch.Tensor:
    """``state`` in the compute dtype; a copy where autograd may come back for it after it was overwritten in place."""
    if isinstance(state, StoredState):
        return state.read().to(dtype)
    return state.to(dtype, copy=torch.is_grad_enabled())


def store_rows(state: State, values: torch.Tensor, rows: torch.Tensor | None, positions: torch.Tensor) -> None:
    """Write the chosen rows (bool ``[B]``; None: all) of ``values`` into ``state``, **in place**, without autograd.

    Rounds as the format does, a dtype to nearest; beyond float16's largest the largest is stored instead of infinity,
    from which a recurrence never recovers. The other rows keep their bytes.

    Args:
        positions: int64 ``[B]``, tokens of each row that the values contain; see `StoredState.write`.
    """
    if isinstance(state, StoredState):
        state.write(values, positions, rows)
        return
    with torch.no_grad():
        values = bounded(values, state.dtype).to(state.dtype)
        if rows is not None:
            values = torch.where(rows.view(-1, *[1] * (state.ndim - 1)), values, state)
        state.copy_(values)


def refresh(readout: State | None, state: State, positions: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Copy the chosen rows of the checkpoint, as it is stored, into the copy that steps read, **in place**."""
    if readout is not None:
        store_rows(readout, readable(state, torch.float32), rows, positions)
