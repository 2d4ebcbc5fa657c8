"""Nemotron-H: Mamba-2 mixers.

The time step's limits: one rule for every path. Stock Nemotron-H clamps ``dt`` at the layer's ``time_step_limit`` in
forwards of several tokens and does not clamp it in single-token decoding, so its decoding disagrees with its own full
forward. Here every token's ``dt`` is clamped at the layer's limit, once, before it is recorded; single steps, blocks,
scans and folds therefore agree with each other and with a full forward without a cache.
"""

from typing import Any

import torch
from torch.nn import functional

from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.decay import at_least_float32
from replay_transformers.patches.mixer import convolve, mask_padding

__all__ = ["geometry", "replay_forward"]


def geometry(mixer: Any) -> LayerGeometry:
    """Shapes of a Mamba-2 mixer of transformers."""
    return LayerGeometry(
        kind="mamba2",
        heads=mixer.num_heads,
        groups=mixer.n_groups,
        head_dim=mixer.head_dim,
        state_dim=mixer.ssm_state_size,
        conv_kernel=mixer.conv_kernel_size,
    )


def replay_forward(
    mixer: Any, hidden_states: torch.Tensor, layer: Any, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Forward of `NemotronHMamba2Mixer` on a replay layer: ``[B, T, hidden]`` -> ``[B, T, hidden]``."""
    dtype = hidden_states.dtype
    projected = mixer.in_proj(mask_padding(hidden_states, attention_mask))
    gate, mixed, dt = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    mixed = mask_padding(convolve(mixer, layer, mixed), attention_mask)
    state_channels = mixer.n_groups * mixer.ssm_state_size
    x, B, C = mixed.split([mixer.intermediate_size, state_channels, state_channels], dim=-1)

    wide = at_least_float32(dt.dtype)
    dt = functional.softplus(dt.to(wide) + mixer.dt_bias.to(wide)).clamp(*mixer.time_step_limit)
    A = -mixer.A_log.to(wide).exp()
    output = layer.step(
        x.unflatten(-1, (mixer.num_heads, mixer.head_dim)),
        dt,
        B.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)),
        C.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)),
        A,
        mixer.D,
    )
    return mixer.out_proj(mixer.norm(output.flatten(2), gate).to(dtype))
