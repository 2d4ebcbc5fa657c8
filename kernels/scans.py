"""Scans over prompts by a library's kernels, in as many calls as its addresses and launches need."""

from collections.abc import Callable, Sequence

import torch

from replay_transformers.kernels.saturate import store

__all__ = ["MOST_PROGRAMS", "scan_in_pieces"]

MOST_PROGRAMS = 65535  # in the second and the third dimension of a CUDA launch

Scan = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def scan_in_pieces(
    scan: Scan, operands: Sequence[torch.Tensor], state: torch.Tensor, most_rows: int, most_tokens: int | None = None
) -> torch.Tensor:
    """The output of all tokens; between pieces of one row its state stays in float32.

    Args:
        scan: takes the operands of some rows and tokens and the rows' float32 state; gives their output and the state
            after them.
        operands: ``[B, T, ...]`` tensors of the tokens; the output has the first one's dtype.
        state: ``[B, ...]``, **mutated**.
        most_rows, most_tokens: of one call; None: all tokens.
    """
    first = operands[0]
    rows, tokens = first.shape[:2]
    most_tokens = most_tokens or tokens
    if rows <= most_rows and tokens <= most_tokens:
        output, after = scan(*operands, state.float())
        store(state, after)
        return output.to(first.dtype)
    result: torch.Tensor | None = None
    for row in range(0, rows, most_rows):
        some = slice(row, row + most_rows)
        after = state[some].float()
        for token in range(0, tokens, most_tokens):
            part = slice(token, token + most_tokens)
            output, after = scan(*(operand[some, part] for operand in operands), after)
            if result is None:
                result = first.new_empty(rows, tokens, *output.shape[2:])
            result[some, part] = output
        store(state[some], after)
    assert result is not None, "there are rows and tokens"
    return result
