"""Nemotron-H's MTP head, which transformers leaves in the checkpoint: blocks as the model has them.

``mtp.layers.N`` are blocks of the kinds in ``mtp_layers_block_type``, with ``norm`` and ``mixer`` as in the model. The
first one also has ``enorm`` and ``hnorm``, which normalise the embedding and the state, and ``eh_proj``, which joins
them in this order; the last one has ``final_layernorm``. Experts are saved one by one.
"""

import copy
from typing import Any

import torch
from torch import nn

from replay_transformers.geometry import text_config
from replay_transformers.patches.extra_weights import check_left_out, left_out
from replay_transformers.patches.mtp import MtpHead, last_device

__all__ = ["NemotronHHead", "build"]

KINDS = ("attention", "full_attention", "moe", "mlp")  # transformers has had two names for attention
ATTENTION = KINDS[:2]


class NemotronHHead(MtpHead):
    """Blocks of the model's own class, without positions."""

    def run(
        self, embedded: torch.Tensor, states: torch.Tensor, mask: Any, positions: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        """States ``[B, T, hidden]`` of the head, from embeddings and the target's states (both ``[B, T, hidden]``)."""
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        states = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(states)], dim=-1))
        for block in self.layers:
            states = block(states, attention_mask=mask if block.block_type in ATTENTION else None, **others)
        return last.final_layernorm(states)


def build(model: Any) -> NemotronHHead:
    """The head with the weights of the model's checkpoint.

    Raises:
        ValueError: the checkpoint has no complete head.
        NotImplementedError: blocks of another kind, or quantised weights.
    """
    config = head_config(model.config)
    check_left_out(model, "mtp.")
    layers, found, weights = blocks(model, config), left_out(model, "mtp."), {}
    for name, parameter in layers.state_dict().items():
        value = _weight(found, f"layers.{name}", parameter.shape)
        if value is None:
            raise ValueError(
                f"the MTP head of {type(model).__name__} is not complete: {model.config.name_or_path!r} has no "
                f"mtp.layers.{name} of shape {tuple(parameter.shape)}"
            )
        weights[name] = value.to(last_device(model), _dtype(model, name))
    layers.load_state_dict(weights, assign=True)
    return NemotronHHead(model, layers.requires_grad_(False), config)


def head_config(model_config: Any) -> Any:
    """A configuration in which the head's blocks are the model's layers.

    Raises:
        NotImplementedError: blocks of another kind.
    """
    config = copy.deepcopy(text_config(model_config))
    kinds = config.mtp_layers_block_type
    if not set(kinds) <= set(KINDS):
        raise NotImplementedError(f"an MTP head with mtp_layers_block_type={kinds} is not supported")
    config.layers_block_type = kinds
    return config


def blocks(model: Any, config: Any) -> nn.ModuleList:
    """The head's blocks on the meta device, named as in the checkpoint."""
    kind = type(model.get_decoder().layers[0])
    width, epsilon = config.hidden_size, config.layer_norm_epsilon
    with torch.device("meta"):
        layers: list[Any] = [kind(config, index) for index in range(len(config.layers_block_type))]
        first, last, norm = layers[0], layers[-1], type(layers[0].norm)
        first.enorm, first.hnorm = norm(width, eps=epsilon), norm(width, eps=epsilon)
        first.eh_proj = nn.Linear(2 * width, width, bias=False)
        last.final_layernorm = norm(width, eps=epsilon)
    return nn.ModuleList(layers)


def _dtype(model: Any, name: str) -> torch.dtype:
    """The model's, except for what transformers keeps in float32."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if any(part in name for part in kept) else model.dtype


def _weight(found: dict[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor | None:
    """A tensor by its name in the head, put together from those of the experts where it is theirs; None if missing."""
    value = found.get(name)
    if value is None and ".experts." in name:
        before, after = name.split(".experts.")
        each = [found.get(f"{before}.experts.{expert}.{after}.weight") for expert in range(shape[0])]
        present = [tensor for tensor in each if tensor is not None]
        value = torch.stack(present) if len(present) == len(each) else None
    return value if value is not None and value.shape == shape else None
