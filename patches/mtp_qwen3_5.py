"""Qwen3.5's MTP head, dense and with experts: one decoder layer, which transformers knows how to build and load."""

from typing import Any

import torch

from replay_transformers.geometry import text_config
from replay_transformers.patches.drafts import mtp_named_as_transformers_does
from replay_transformers.patches.extra_weights import check_left_out
from replay_transformers.patches.mtp import MtpHead, last_device

__all__ = ["Qwen3_5Head", "build"]


class Qwen3_5Head(MtpHead):
    """One layer, with the model's rotary embedding."""

    def __init__(self, model: Any, built: Any) -> None:
        super().__init__(model, built.layers, built.config)
        self.rotary = built.rotary_emb

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All that `forward` runs."""
        return [*super().modules, self.rotary]

    def run(
        self, embedded: torch.Tensor, states: torch.Tensor, mask: Any, positions: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        """States ``[B, T, hidden]`` of the head, from embeddings and the target's states (both ``[B, T, hidden]``)."""
        cosine, sine = self.rotary(embedded, position_ids=positions)  # the model's, on the device of its first layer
        rotation = cosine.to(embedded.device), sine.to(embedded.device)
        return self.layers[0](
            embedded, states, position_embeddings=rotation, attention_mask=mask, position_ids=positions, **others
        )


def build(model: Any) -> Qwen3_5Head:
    """The head with the weights of the model's checkpoint.

    Raises:
        ValueError: the checkpoint has no complete head.
        NotImplementedError: its weights are quantised, or the model's last layer has no attention.
    """
    from transformers.modeling_layers import MtpModel

    device, kind = last_device(model), text_config(model.config).layer_types[-1]
    if kind != "full_attention":
        raise NotImplementedError(
            f"transformers builds the MTP head like the model's last layer, so use_mtp needs a model whose last layer "
            f"is full_attention, got {kind}"
        )
    check_left_out(model, "mtp.")
    try:
        with mtp_named_as_transformers_does(model):
            built = MtpModel.from_pretrained(model, device_map={"": device})
    except RuntimeError as error:  # weights are missing, and which
        raise ValueError(f"the MTP head of {type(model).__name__} is not complete: {error}") from error
    built.layers.to(device=device, dtype=model.dtype)
    return Qwen3_5Head(model, built)
