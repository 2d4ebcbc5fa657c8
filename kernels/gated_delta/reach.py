"""How much of a prompt flash-linear-attention's scan can take at once.

It launches a program for each row and head. Before its version 0.6 some of its kernels count elements in int32 as well.
"""

import torch

from replay_transformers.kernels import scans

__all__ = ["CHUNK", "reach"]

CHUNK = 64  # tokens, of its kernels


def reach(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> tuple[int, int]:
    """Rows and tokens of one call, of operands ``[B, T, ...]`` like these; it is given contiguous copies."""
    (heads, width), states = v.shape[2:], q.shape[3]
    made = heads * max(states * width, CHUNK * max(states, width))  # a state, or vectors of tokens
    return scans.reach(v.shape[1], CHUNK, made, row_programs=heads)
