"""Forwards of more tokens than a kernel takes at once, in parts."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MAX_TOKENS", "run_in_parts"]

MAX_TOKENS = 8  # per launch: each number of tokens is compiled by itself and unrolled

Cursor = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def run_in_parts(
    run: Callable[..., torch.Tensor],
    operands: tuple[torch.Tensor, ...],
    others: tuple[Any, ...],
    cursor: Cursor,
    capacity: int,
    max_records: int | None,
) -> torch.Tensor:
    """The output of all tokens, from as many launches as they need.

    Args:
        run: takes a part of the operands, the others, the cursor, and how many records a row holds at most.
        operands: ``[B, T, ...]`` tensors of the tokens. others: what is the same for all tokens.
        cursor: int64 ``[B]`` tensors ``base, committed, pending, folds`` (the last may be None); the first launch
            folds, and to each launch the tokens of those before it are pending.
        capacity: slots of the ring. max_records: how many a row holds at most before the step; None: what fits.
    """
    outputs = []
    base, committed, pending, folds = cursor
    tokens = operands[0].shape[1]
    for start in range(0, tokens, MAX_TOKENS):
        part = slice(start, min(start + MAX_TOKENS, tokens))
        count = part.stop - start
        most = capacity - count if max_records is None else max_records + start
        parts = (operand[:, part] for operand in operands)
        outputs.append(run(*parts, *others, base, committed, pending, folds, most))
        if part.stop < tokens:
            if folds is not None:
                base, committed, folds = base + folds, committed - folds, None
            pending = pending + count
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
