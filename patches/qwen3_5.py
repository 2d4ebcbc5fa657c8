"""Qwen3.5 and Qwen3.5-MoE: Gated DeltaNet with separate input projections."""

from typing import Any

import torch

from replay_transformers.patches import gated_delta
from replay_transformers.patches.mixer import mask_padding

__all__ = ["geometry", "replay_forward"]

geometry = gated_delta.geometry


def replay_forward(
    mixer: Any, hidden_states: torch.Tensor, layer: Any, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Forward of `Qwen3_5GatedDeltaNet` on a replay layer: ``[B, T, hidden]`` -> ``[B, T, hidden]``."""
    hidden_states = mask_padding(hidden_states, attention_mask)
    z = mixer.in_proj_z(hidden_states).unflatten(-1, (mixer.num_v_heads, mixer.head_v_dim))
    b, a = mixer.in_proj_b(hidden_states), mixer.in_proj_a(hidden_states)
    return gated_delta.mix(mixer, layer, mixer.in_proj_qkv(hidden_states), z, b, a)
