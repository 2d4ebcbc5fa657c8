"""How much of a prompt mamba-ssm's scan can take at once: its kernels count elements in int32, without saying so."""

import torch

from replay_transformers.kernels.scans import MOST_PROGRAMS
from replay_transformers.kernels.validation import FAR

__all__ = ["CHUNK", "reach"]

CHUNK = 128  # tokens; the released Nemotron models' own setting


def reach(x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> tuple[int, int]:
    """Rows and tokens of one call, of these operands ``[B, T, ...]``; the tokens are whole chunks or all.

    No element of an operand, nor of what the scan makes of it (a state per chunk, products of tokens within a chunk),
    is then 2^31 elements or more from the tensor's first one, and no launch has too many programs.
    """
    tokens, heads, width = x.shape[1:]
    groups, states = B.shape[2:]
    operands = (x, dt, B, C)
    made = max(heads * width * max(states, CHUNK), groups * CHUNK * CHUNK)  # of one chunk of a row
    step, row = max(map(_step, operands)), max(1, *(operand.stride(0) for operand in operands))
    chunks = min(FAR // made, FAR // (step * CHUNK), MOST_PROGRAMS // groups, -(-tokens // CHUNK))
    taken = min(tokens, chunks * CHUNK)
    rows = min(FAR // (chunks * made), (FAR - taken * step) // row + 1, MOST_PROGRAMS // chunks)
    return rows, taken


def _step(operand: torch.Tensor) -> int:
    """Elements from one token to the next, or that a token spans."""
    inner = sum((size - 1) * stride for size, stride in zip(operand.shape[2:], operand.stride()[2:], strict=True))
    return max(operand.stride(1), inner + 1)
