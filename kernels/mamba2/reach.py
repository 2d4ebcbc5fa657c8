"""How much of a prompt mamba-ssm's scan can take at once: its kernels count elements in int32, without saying so."""

import torch

from replay_transformers.kernels import scans

__all__ = ["CHUNK", "reach"]

CHUNK = 128  # tokens; the released Nemotron models' own setting


def reach(x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> tuple[int, int]:
    """Rows and tokens of one call, of operands ``[B, T, ...]`` like these."""
    heads, width = x.shape[2:]
    groups, states = B.shape[2:]
    # outputs, a state, or products of tokens
    made = max(heads * width * max(states, CHUNK), groups * CHUNK * CHUNK)
    return scans.reach(x.shape[1], CHUNK, made, (x, dt, B, C), chunk_programs=groups)
