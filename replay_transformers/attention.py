"""The other layers of a replay cache: attention (transformers' own, made to outlive `inference_mode`), and none."""

import torch
from transformers.cache_utils import DynamicLayer, StaticLayer

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


class FixedAttentionLayer(StaticLayer):
    """Keys and values ``[B, heads, max_cache_len, head_dim]``, allocated once and written in place."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate like `StaticLayer`, as ordinary tensors even under `inference_mode`."""
        with torch.inference_mode(False), torch.no_grad():
            super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, heads, T, head_dim]`` keys and values behind the others; returns the whole buffers."""
        return super().update(key_states.detach(), value_states.detach(), *args, **kwargs)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        if self.is_initialized:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device).repeat_interleave(repeats)
            self.batch_select_indices(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows."""
        if self.is_initialized:
            indices = indices.to(self.keys.device)
            with torch.inference_mode(False), torch.no_grad():
                self.keys = self.keys.index_select(0, indices)
                self.values = self.values.index_select(0, indices)
            self.batch_size = self.keys.shape[0]
            torch._dynamo.mark_static_address(self.keys)
            torch._dynamo.mark_static_address(self.values)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows in place, so that the addresses stay."""
        if self.is_initialized:
            beam_idx = beam_idx.to(self.keys.device)
            with torch.no_grad():
                self.keys.copy_(self.keys.index_select(0, beam_idx))
                self.values.copy_(self.values.index_select(0, beam_idx))
