"""What the patched forwards of all state-space layers share: when to divert to a replay cache, and what to refuse."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.accelerate import force_accelerate_hooks

from replay_transformers.cache import ReplayCache
from replay_transformers.geometry import LayerGeometry
from replay_transformers.layers import ReplayLayer
from replay_transformers.patches.guard import refuse_training, replay_cache_of

__all__ = ["convolve", "divert", "mask_padding"]

# forward(mixer, hidden_states, replay_layer, attention_mask) -> output
ReplayForward = Callable[[nn.Module, torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def mask_padding(states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Zero the padded columns: states ``[B, T, D]``, attention_mask ``[B, T]`` (1 for real tokens) or None."""
    if attention_mask is None:
        return states
    return (states * attention_mask[:, :, None]).to(states.dtype)


def convolve(mixer: Any, layer: ReplayLayer, inputs: torch.Tensor) -> torch.Tensor:
    """The mixer's causal convolution and activation through the cache's ring: ``[B, T, D]`` -> ``[B, T, D]``."""
    fused = mixer.activation in ("silu", "swish")
    output = layer.convolve(
        inputs, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, activation="silu" if fused else None
    )
    if not fused:
        output = ACT2FN[mixer.activation](output)
    return output


def divert(
    replay_forward: ReplayForward,
    geometry: Callable[[Any], LayerGeometry],
    original: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """A mixer's forward that uses the replay cache where it is given one, and is the original everywhere else.

    Args:
        replay_forward: the forward on a replay layer.
        geometry: reads a mixer's shapes off its attributes.
        original: the class's own forward.
    """
    hooked = force_accelerate_hooks("conv1d")(replay_forward)

    @functools.wraps(original)
    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        cache = replay_cache_of(args, kwargs)
        if cache is None:
            return original(self, hidden_states, *args, **kwargs)
        attention_mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        refuse_training(self, kwargs)
        return hooked(self, hidden_states, _checked_layer(self, cache, geometry(self)), attention_mask)

    return forward


def _checked_layer(mixer: Any, cache: ReplayCache, geometry: LayerGeometry) -> ReplayLayer:
    index = mixer.layer_idx
    layer = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, ReplayLayer) and layer.geometry == geometry:
        return layer
    held = layer.geometry if isinstance(layer, ReplayLayer) else type(layer).__name__
    raise ValueError(
        f"this replay cache belongs to another model: its layer {index} is {held}, the model's is {geometry}; build "
        "one with ReplayCache(model.config)"
    )
