"""The scan over a prompt through flash-linear-attention's kernels, which stock transformers uses as well."""

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

from replay_transformers.kernels.gated_delta.reach import reach
from replay_transformers.kernels.launch import on_their_device
from replay_transformers.kernels.scans import scan_in_pieces

__all__ = ["update"]


@on_their_device
def update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
) -> torch.Tensor:
    """As `replay_transformers.kernels.gated_delta.reference.update`, in the precision of the activations.

    Args:
        q, k: ``[B, T, Hk, K]``. v: ``[B, T, Hv, V]``. g: ``[B, T, Hv]``. beta: ``[B, T, Hv]``.
        state: ``[B, Hv, K, V]``, **mutated**.

    Returns:
        ``[B, T, Hv, V]`` in the dtype of ``q``.
    """
    repeats = v.shape[2] // q.shape[2]

    def scan(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (tensor.repeat_interleave(repeats, dim=2) for tensor in (q, k))
        result: tuple[torch.Tensor, torch.Tensor] = chunk_gated_delta_rule(
            q,
            k,
            v.contiguous(),
            g.contiguous(),
            beta.contiguous(),
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return result

    return scan_in_pieces(scan, (q, k, v, g, beta), state, *reach(q, k, v))
