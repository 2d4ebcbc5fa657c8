"""Forwards on a cache whose rows have seen different numbers of tokens: each row's mask and positions."""

from typing import Any

import torch

from replay_transformers.cache import ReplayCache

__all__ = ["separate_rows"]

MASKED_IN_SCORES = ("eager",)  # attention that adds the mask to its scores; `sdpa` takes what may be seen


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
    slots = torch.arange(cache.get_mask_sizes(tokens)[0], device=inputs.device)
    ends = starts[:, None] + torch.arange(tokens, device=inputs.device)
    seen = slots <= ends[:, :, None]
    padding = torch.zeros(rows, dtype=torch.int64, device=inputs.device)
    if mask is not None:
        width = min(mask.shape[1], slots.shape[0])
        is_padding = torch.zeros(rows, slots.shape[0], dtype=torch.bool, device=inputs.device)
        is_padding[:, :width] = mask[:, :width] == 0
        is_padding &= slots < starts[:, None]
        padding = is_padding.sum(1)
        seen &= ~is_padding[:, None]
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = ends - padding[:, None]
    kwargs["attention_mask"] = {"full_attention": _as_asked(module, seen[:, None]), "linear_attention": None}


def _as_asked(module: Any, seen: torch.Tensor) -> torch.Tensor:
    implementation = module.config._attn_implementation
    if implementation == "sdpa":
        return seen
    if implementation in MASKED_IN_SCORES:
        dtype = module.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
    raise NotImplementedError(
        f"rows that have seen different numbers of tokens need attn_implementation 'sdpa' or 'eager', got "
        f"{implementation!r}"
    )
