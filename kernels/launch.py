"""Launch configurations of the Triton kernels: which block sizes and how many warps, by GPU, operator and size."""

from dataclasses import dataclass

import torch

__all__ = ["Launch", "choose"]


@dataclass(frozen=True)
class Launch:
    """How one replay step is launched.

    Args:
        block: channels of a head per program of the step kernel, a power of two.
        warps: warps per program of the step kernel.
        share: heads per program of the prepare kernel, at most; a power of two.
        share_warps: warps per program of the prepare kernel.
    """

    block: int
    warps: int
    share: int
    share_warps: int


def choose(operator: str, device: torch.device, rows: int, heads: int, tokens: int) -> Launch:
    """The configuration for a step of ``operator`` ("mamba2" or "gated_delta")."""
    if operator == "mamba2":
        return Launch(8, 1, 4, 2)
    return Launch(16, 1, 2, 1)
