"""What a model's configuration says about its layers. A new model family adds one line to `FAMILIES`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "STATE_SPACE", "LayerGeometry", "attention_shape", "layer_geometries", "text_config"]

STATE_SPACE = ("mamba2", "gated_delta")


@dataclass(frozen=True)
class LayerGeometry:
    """One layer of a model, as the cache sees it.

    Args:
        kind: "mamba2", "gated_delta", "attention" or "none" (mlp and expert layers: nothing to cache).
        heads: state-space heads (value heads for Gated DeltaNet); key/value heads of an attention layer.
        groups: heads of ``B``/``C`` (Mamba-2) or key heads (Gated DeltaNet).
        head_dim: output channels per head (``P``, or the value head dimension ``V``).
        state_dim: entries of the state per output channel (``N``, or the key head dimension ``K``).
        conv_kernel: taps of the causal convolution.

    Raises:
        ValueError: a state-space layer without a size, or heads that are not a multiple of the groups.
    """

    kind: str
    heads: int = 0
    groups: int = 0
    head_dim: int = 0
    state_dim: int = 0
    conv_kernel: int = 0

    def __post_init__(self) -> None:
        sizes = (self.heads, self.groups, self.head_dim, self.state_dim, self.conv_kernel)
        if self.kind in STATE_SPACE and (min(sizes) < 1 or self.heads % self.groups):
            raise ValueError(
                f"a {self.kind} layer needs sizes of at least 1, and heads that are a multiple of groups; got {self}"
            )

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: values and both kinds of key-like vectors."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim


def _gated_delta(config: Any) -> LayerGeometry:
    return LayerGeometry(
        kind="gated_delta",
        heads=config.linear_num_value_heads,
        groups=config.linear_num_key_heads,
        head_dim=config.linear_value_head_dim,
        state_dim=config.linear_key_head_dim,
        conv_kernel=config.linear_conv_kernel_dim,
    )


def _mamba2(config: Any) -> LayerGeometry:
    return LayerGeometry(
        kind="mamba2",
        heads=config.mamba_num_heads,
        groups=config.n_groups,
        head_dim=config.mamba_head_dim,
        state_dim=config.ssm_state_size,
        conv_kernel=config.conv_kernel,
    )


# `model_type` of the text configuration -> geometry of its "linear_attention" layers
FAMILIES: dict[str, Callable[[Any], LayerGeometry]] = {
    "qwen3_5_text": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "nemotron_h": _mamba2,
}

PLAIN_KINDS = {"full_attention": "attention", "mlp": "none", "moe": "none"}


def text_config(config: Any) -> Any:
    """The configuration of the decoder: the text part of a vision-language model, else ``config`` itself."""
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"expected a transformers model configuration, got {type(config).__name__}")
    return config.get_text_config(decoder=True)


def attention_shape(config: Any) -> tuple[int, int]:
    """``(key/value heads, head dimension)`` of the model's attention layers."""
    decoder = text_config(config)
    head_dim = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    return decoder.num_key_value_heads, head_dim


def layer_geometries(config: Any) -> list[LayerGeometry]:
    """The layers of a model, in order.

    Args:
        config: the model's configuration (composite ones are taken by their text part).

    Raises:
        NotImplementedError: a model family or a layer type that the replay cache does not know.
        ValueError: sizes that no layer can have.
    """
    decoder = text_config(config)
    family = FAMILIES.get(decoder.model_type)
    if family is None:
        raise NotImplementedError(
            f"the replay cache does not support model type {decoder.model_type!r}; it supports {sorted(FAMILIES)}"
        )
    # `assistant_early_exit` shortens `num_hidden_layers` and leaves `layer_types` as it was
    layer_types = list(decoder.layer_types)[: decoder.num_hidden_layers]
    geometries = []
    for index, layer_type in enumerate(layer_types):
        if layer_type == "linear_attention":
            geometries.append(family(decoder))
        elif layer_type in PLAIN_KINDS:
            kind = PLAIN_KINDS[layer_type]
            heads, head_dim = attention_shape(decoder) if kind == "attention" else (0, 0)
            geometries.append(LayerGeometry(kind=kind, heads=heads, head_dim=head_dim))
        else:
            raise NotImplementedError(
                f"layer {index} of this {decoder.model_type!r} model is of type {layer_type!r}; the replay cache "
                f"supports {sorted(['linear_attention', *PLAIN_KINDS])}"
            )
    if not any(geometry.kind in STATE_SPACE for geometry in geometries):
        raise NotImplementedError("this model has no state-space layer: use a stock cache")
    return geometries
