"""Scans over prompts by a library's kernels, in as many calls as its addresses and launches need."""

from collections.abc import Callable, Sequence

import torch

from replay_transformers.kernels.saturate import store
from replay_transformers.kernels.validation import FAR

__all__ = ["MOST_PROGRAMS", "reach", "scan_in_pieces"]

MOST_PROGRAMS = 65535  # in the second and the third dimension of a CUDA launch

Scan = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def reach(
    tokens: int,
    chunk: int,
    made: int,
    operands: Sequence[torch.Tensor] = (),
    row_programs: int = 1,
    chunk_programs: int = 1,
) -> tuple[int, int]:
    """The most rows and tokens of one call, of rows of ``tokens`` tokens; the tokens are all, or whole chunks.

    No element that the kernels look at is then 2^31 elements or more from its tensor's first one, as far as int32 goes,
    and no launch has too many programs.

    Args:
        chunk: tokens that the kernels take together.
        made: elements of the largest tensor that a scan makes, for each row and chunk.
        operands: ``[B, T, ...]``, what the kernels read as it is.
        row_programs, chunk_programs: beside those for each row and chunk, programs for each row, and for each chunk.
    """
    fits = [FAR // made * chunk, MOST_PROGRAMS // chunk_programs * chunk]
    fits += [(FAR - 1 - _inner(operand)) // max(1, operand.stride(1)) + 1 for operand in operands]
    taken = min(tokens, max(1, min(fits)))
    if chunk < taken < tokens:
        taken = taken // chunk * chunk
    chunks = max(1, -(-taken // chunk))
    rows = [FAR // (chunks * made), MOST_PROGRAMS // max(chunks, row_programs)]
    for operand in operands:
        span = (taken - 1) * operand.stride(1) + _inner(operand)
        rows.append((FAR - 1 - span) // max(1, operand.stride(0)) + 1)
    return max(1, min(rows)), taken


def _inner(operand: torch.Tensor) -> int:
    """From a token's first element to its last one."""
    return sum((size - 1) * stride for size, stride in zip(operand.shape[2:], operand.stride()[2:], strict=True))


def scan_in_pieces(
    scan: Scan, operands: Sequence[torch.Tensor], state: torch.Tensor, most_rows: int, most_tokens: int
) -> torch.Tensor:
    """The output of all tokens; between pieces of one row its state stays in float32.

    Args:
        scan: takes the operands of some rows and tokens and the rows' float32 state; gives their output and the state
            after them.
        operands: ``[B, T, ...]`` tensors of the tokens; the output has the first one's dtype.
        state: ``[B, ...]``, **mutated**.
        most_rows, most_tokens: of one call; see `reach`.
    """
    first = operands[0]
    rows, tokens = first.shape[:2]
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
