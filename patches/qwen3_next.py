"""Qwen3-Next: Gated DeltaNet whose projections come interleaved by key head."""

from typing import Any

import torch

from replay_transformers.patches import gated_delta
from replay_transformers.patches.mixer import mask_padding

__all__ = ["geometry", "replay_forward"]

geometry = gated_delta.geometry


def replay_forward(
    mixer: Any, hidden_states: torch.Tensor, layer: Any, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Forward of `Qwen3NextGatedDeltaNet` on a replay layer: ``[B, T, hidden]`` -> ``[B, T, hidden]``."""
    hidden_states = mask_padding(hidden_states, attention_mask)
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(hidden_states), mixer.in_proj_ba(hidden_states)
    )
    mixed_qkv = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    return gated_delta.mix(mixer, layer, mixed_qkv, z, b, a)
