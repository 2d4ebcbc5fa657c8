"""Attention for rows that have seen different numbers of tokens.

Every row's keys lie without a gap from slot 0 on, in buffers as wide as the longest row needs, and a mask hides the
rest. What it hides must be finite all the same, so buffers are made of zeros.
"""

import torch

__all__ = ["as_attention_takes_it", "visible", "width_for", "write_behind"]

# Buffers grow by so many slots, so that few steps copy them, and fixed ones of similar size are alike.
WIDTH_STEP = 64

MASKED_IN_SCORES = ("eager",)  # attention that adds the mask to its scores; `sdpa` takes what may be seen


def width_for(tokens: int) -> int:
    """Slots of a buffer for so many tokens."""
    return -(-tokens // WIDTH_STEP) * WIDTH_STEP


def write_behind(held: torch.Tensor, new: torch.Tensor, starts: torch.Tensor) -> None:
    """Write keys or values into a buffer, in place and detached.

    Args:
        held: the buffer, ``[B, heads, slots, head_dim]``.
        new: ``[B, heads, T, head_dim]``.
        starts: int64 ``[B]``, the slot of each row's first new token.
    """
    slots = starts[:, None] + torch.arange(new.shape[2], device=starts.device)
    rows = torch.arange(slots.shape[0], device=starts.device)[:, None]
    held.transpose(1, 2)[rows, slots] = new.detach().transpose(1, 2)


def visible(starts: torch.Tensor, tokens: int, slots: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Which slots the new tokens see: those up to their own.

    Args:
        starts: int64 ``[B]``, the slot of each row's first new token.
        tokens: T, how many new tokens each row has.
        slots: S, as wide as the buffers are.
        hidden: bool ``[B, S]``, slots that hold padding. A token in such a slot sees itself.

    Returns:
        bool ``[B, T, S]``.
    """
    order = torch.arange(slots, device=starts.device)
    own = (starts[:, None] + torch.arange(tokens, device=starts.device))[:, :, None]
    seen = order <= own
    return seen if hidden is None else (seen & ~hidden[:, None]) | (order == own)


def as_attention_takes_it(seen: torch.Tensor, implementation: str, dtype: torch.dtype) -> torch.Tensor:
    """A mask ``[B, 1, T, S]`` for an attention implementation: bool, or of ``dtype`` and added to the scores.

    Args:
        seen: bool ``[B, T, S]``.
        implementation: transformers' name of it.
        dtype: of the queries.

    Raises:
        NotImplementedError: an implementation that takes no mask per row.
    """
    if implementation == "sdpa":
        return seen[:, None]
    if implementation in MASKED_IN_SCORES:
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
    raise NotImplementedError(
        f"rows that have seen different numbers of tokens need attn_implementation 'sdpa' or 'eager', got "
        f"{implementation!r}"
    )
