"""Forwards on a cache whose rows have seen different numbers of tokens: each row's mask and positions."""

from typing import Any

import torch

from replay_transformers.cache import ReplayCache
from replay_transformers.ragged import as_attention_takes_it, visible

__all__ = ["separate_rows"]


def separate_rows(module: Any, cache: ReplayCache, inputs: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Replace the mask and the positions of a decoder's forward by those of the cache's rows, in ``kwargs``.

    Args:
        module: the decoder.
        cache: one with separate rows.
        inputs: ids ``[B, T]`` or embeddings ``[B, T, hidden]``.
        kwargs: of the forward. Its 2-D attention mask, if it has one, says which slots of the cache hold padding;
            columns behind a row's tokens, and those that it lacks, are of no effect.

    Raises:
        NotImplementedError: an attention implementation that takes no mask per row.
    """
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):
        return
    rows, tokens = inputs.shape[:2]
    starts = cache.cursor.lengths().to(inputs.device)
    slots, is_padding = cache.get_mask_sizes(tokens)[0], None
    padding = torch.zeros(rows, dtype=torch.int64, device=inputs.device)
    if mask is not None:
        width = min(mask.shape[1], slots)
        is_padding = torch.zeros(rows, slots, dtype=torch.bool, device=inputs.device)
        is_padding[:, :width] = mask[:, :width] == 0
        is_padding &= torch.arange(slots, device=inputs.device) < starts[:, None]
        padding = is_padding.sum(1)
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = (starts - padding)[:, None] + torch.arange(tokens, device=inputs.device)
    seen = visible(starts, tokens, slots, is_padding)
    full = as_attention_takes_it(seen, module.config._attn_implementation, module.dtype)
    kwargs["attention_mask"] = {"full_attention": full, "linear_attention": None}
