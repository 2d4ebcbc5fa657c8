"""The scan over a prompt through mamba-ssm's kernels, which stock transformers uses as well."""

import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

from replay_transformers.kernels.launch import on_their_device
from replay_transformers.kernels.mamba2.reach import CHUNK, reach
from replay_transformers.kernels.scans import scan_in_pieces

__all__ = ["update"]


@on_their_device  # not all of mamba-ssm's launches see to that
def update(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    *,
    state: torch.Tensor,
) -> torch.Tensor:
    """As `replay_transformers.kernels.mamba2.reference.update`, in the precision of the activations.

    Args:
        x: ``[B, T, H, P]``. dt: ``[B, T, H]``, after bias, softplus and clamp. B, C: ``[B, T, G, N]``. A, D: ``[H]``.
        state: ``[B, H, P, N]``, **mutated**.

    Returns:
        ``[B, T, H, P]`` in the dtype of ``x``.
    """

    def scan(
        x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = mamba_chunk_scan_combined(
            x, dt, A, B, C, chunk_size=CHUNK, D=D, initial_states=before, return_final_states=True
        )
        return result

    return scan_in_pieces(scan, (x, dt, B, C), state, *reach(x, dt, B, C))
