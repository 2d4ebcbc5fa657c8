"""The scan over a prompt through flash-linear-attention's kernels, which stock transformers uses as well."""

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

from replay_transformers.kernels.launch import on_their_device
from replay_transformers.kernels.saturate import store

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
    q, k = (tensor.repeat_interleave(repeats, dim=2) for tensor in (q, k))
    output, after = chunk_gated_delta_rule(
        q,
        k,
        v.contiguous(),
        g.contiguous(),
        beta.contiguous(),
        initial_state=state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    store(state, after)
    return output.to(q.dtype)
