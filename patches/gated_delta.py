"""Gated DeltaNet layers on a replay cache, for the families whose mixers differ only in their input projections."""

from typing import Any

import torch
from torch.nn import functional

from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.decay import at_least_float32
from replay_transformers.layers import GatedDeltaReplayLayer
from replay_transformers.patches.mixer import convolve

__all__ = ["geometry", "mix"]


def geometry(mixer: Any) -> LayerGeometry:
    """Shapes of a Gated DeltaNet mixer of transformers."""
    return LayerGeometry(
        kind="gated_delta",
        heads=mixer.num_v_heads,
        groups=mixer.num_k_heads,
        head_dim=mixer.head_v_dim,
        state_dim=mixer.head_k_dim,
        conv_kernel=mixer.conv_kernel_size,
    )


def mix(
    mixer: Any,
    layer: GatedDeltaReplayLayer,
    mixed_qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
) -> torch.Tensor:
    """Everything after the input projections.

    Args:
        mixer: the module. layer: its layer of the cache.
        mixed_qkv: ``[B, T, 2 Hk K + Hv V]``. z: the gate, ``[B, T, Hv, V]``. b, a: ``[B, T, Hv]``.

    Returns:
        ``[B, T, hidden]``.
    """
    rows, tokens = mixed_qkv.shape[:2]
    mixed_qkv = convolve(mixer, layer, mixed_qkv)
    q, k, v = mixed_qkv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (mixer.num_k_heads, mixer.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (mixer.num_v_heads, mixer.head_v_dim))
    wide = at_least_float32(a.dtype)
    g = -mixer.A_log.to(wide).exp() * functional.softplus(a.to(wide) + mixer.dt_bias.to(wide))
    output = layer.step(q, k, v, g, b.sigmoid())
    output = mixer.norm(output.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim))
    return mixer.out_proj(output.reshape(rows, tokens, -1))
