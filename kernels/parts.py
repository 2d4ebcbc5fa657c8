"""Forwards of more tokens than a kernel takes at once, in parts."""

import torch

__all__ = ["MAX_TOKENS", "after_part", "parts_of"]

MAX_TOKENS = 8  # per launch: each number of tokens is compiled by itself and unrolled

Cursor = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def parts_of(tokens: int) -> list[slice]:
    """Slices of at most `MAX_TOKENS` tokens that make up ``tokens``."""
    return [slice(start, min(start + MAX_TOKENS, tokens)) for start in range(0, tokens, MAX_TOKENS)]


def after_part(
    base: torch.Tensor, committed: torch.Tensor, pending: torch.Tensor, folds: torch.Tensor | None, tokens: int
) -> Cursor:
    """The cursor behind a part of ``tokens`` tokens: folded, and its tokens pending. New int64 ``[B]`` tensors."""
    if folds is not None:
        base, committed = base + folds, committed - folds
    return base, committed, pending + tokens, None
