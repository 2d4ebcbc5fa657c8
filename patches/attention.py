"""Attention of a few new tokens over all the keys of a replay cache, without a copy of the keys per query head.

Where several query heads share a key head and there is a mask, transformers' own `sdpa` copies keys and values to every
query head, at every step. Here the query heads of one key head become rows of one query instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa
from transformers.modeling_utils import AttentionInterface

from replay_transformers.patches.long_attention import attend_in_pieces, pieces_for

__all__ = ["REPLAY_FLAG", "ReplayAttentionInterface", "few_query_attention"]

# A keyword argument that the wrapped decoders add if they run on a replay cache and with `sdpa`; their layers hand it
# down to the attention function like any other.
REPLAY_FLAG = "uses_replay_cache"

# Beyond so many new tokens the copy is a small part of the work, and the mask that is copied instead is not.
MAX_TOKENS = 16


class ReplayAttentionInterface(AttentionInterface):
    """A model file's table of attention functions in which `few_query_attention` stands in for transformers' `sdpa`.

    An `sdpa` that somebody registered in its place, and all others, are found as in the original table.
    """

    def __init__(self, original: AttentionInterface) -> None:
        super().__init__()
        self._local_mapping = original._local_mapping  # shared: what is set or deleted in one is so in the other

    def get_interface(self, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The function of that name."""
        function = super().get_interface(attn_implementation, default)
        return few_query_attention if function is sdpa_attention_forward else function


def few_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa_attention_forward` that does not expand keys and values for a few new tokens on a replay cache.

    Args:
        module: the attention layer.
        query: ``[B, Hq, T, D]``. key, value: ``[B, Hkv, S, D]`` and ``[B, Hkv, S, Dv]``, all of one dtype.
        attention_mask: bool or of that dtype, ``[B or 1, 1, T or 1, S]``, or None.
        dropout: its probability. scaling: of the scores.
        kwargs: what else the attention function takes; `REPLAY_FLAG` is removed.

    Returns:
        ``[B, T, Hq, Dv]`` in the query's dtype, and None.
    """
    on_replay_cache = kwargs.pop(REPLAY_FLAG, False)
    if not on_replay_cache or not _would_expand(module, query, key, value, attention_mask, kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    rows, heads, tokens, _ = query.shape
    if attention_mask is not None and attention_mask.shape[2] > 1:
        attention_mask = attention_mask.repeat(1, 1, heads // key.shape[1], 1)
    query = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    pieces = pieces_for(query, key, value, attention_mask) if not dropout else 1
    if pieces > 1 and attention_mask is not None:
        output = attend_in_pieces(query, key, value, attention_mask, scaling, pieces)
    else:
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
    return output.reshape(rows, heads, tokens, -1).transpose(1, 2).contiguous(), None


def _would_expand(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    """Whether transformers would copy keys and values per query head, in a case that is understood here."""
    tokens = query.shape[2]
    if getattr(module, "num_key_value_groups", 1) == 1 or tokens > MAX_TOKENS:
        return False
    if use_gqa_in_sdpa(attention_mask, key, value):
        return False
    if kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return False
    if attention_mask is None:
        return tokens == 1  # several tokens would need the causal mask
    return attention_mask.ndim == 4 and attention_mask.shape[1] == 1
