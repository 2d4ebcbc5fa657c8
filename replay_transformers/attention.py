"""The other layers of a replay cache: attention (transformers' own, made to outlive `inference_mode`), and none."""

import torch
from transformers.cache_utils import DynamicLayer, StaticLayer

from replay_transformers.cursor import select_rows

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


class GrowingAttentionLayer(DynamicLayer):
    """Keys and values ``[B, heads, length, head_dim]`` that grow with every forward."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B, heads, T, head_dim]`` keys and values; returns all of them. What is stored is detached."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = keys.detach(), values.detach()
        return keys, values

    def reset(self) -> None:
        """Drop keys and values; transformers before 5.20 only zeroes them, which keeps their length."""
        self.keys = self.values = None
        self.is_initialized = False


class FixedAttentionLayer(StaticLayer):
    """Keys and values ``[B, heads, max_cache_len, head_dim]``, allocated once and written in place."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate like `StaticLayer`, as ordinary tensors even under `inference_mode`."""
        if torch.compiler.is_compiling():
            super().lazy_initialization(key_states, value_states)
            return
        with torch.inference_mode(False), torch.no_grad():
            super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, heads, T, head_dim]`` keys and values behind the others; returns the whole buffers."""
        return super().update(key_states.detach(), value_states.detach(), *args, **kwargs)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device).repeat_interleave(repeats)
            self._select(rows, in_place=False)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows."""
        self._select(indices, in_place=False)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows in place, so that the addresses stay."""
        self._select(beam_idx, in_place=True)

    def _select(self, rows: torch.Tensor, in_place: bool) -> None:
        if self.keys is None or self.values is None:
            return
        self.keys = select_rows(self.keys, rows, in_place)
        self.values = select_rows(self.values, rows, in_place)
        self.batch_size = self.keys.shape[0]
