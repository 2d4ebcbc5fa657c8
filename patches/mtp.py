"""Heads for multi-token prediction, by model type: built from the model's checkpoint once and kept for later calls.

A new family is a line in `HEADS` and a module in this folder with `build(model)`, which returns an `MtpHead`.
"""

import importlib
import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from replay_transformers.geometry import text_config
from replay_transformers.patches.attention import REPLAY_FLAG
from replay_transformers.patches.placement import parts_of
from replay_transformers.patches.versions import generate_cache_name

__all__ = ["HEADS", "MtpHead", "forget_heads", "head_of", "mtp_layers"]

# model type of the text configuration -> module in this folder
HEADS: dict[str, str] = {
    "qwen3_5_text": "mtp_qwen3_5",
    "qwen3_5_moe_text": "mtp_qwen3_5",
    "nemotron_h": "mtp_nemotron_h",
}

# under which name a configuration says how many MTP layers its checkpoint has: transformers' own, Qwen's, NVIDIA's
LAYER_NAMES = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")

_lock = threading.Lock()
_kept: weakref.WeakKeyDictionary[Any, tuple[Hashable, "MtpHead"]] = weakref.WeakKeyDictionary()


class MtpHead:
    """What the heads of all families share: the embedding and the output matrix are the model's own.

    Args:
        model: the target; no reference to it is kept.
        layers: the head's own modules, in the order in which they run; already on their device.
        config: the configuration that its attention layers were built with.
    """

    def __init__(self, model: Any, layers: torch.nn.ModuleList, config: Any) -> None:
        self.layers, self.cached = layers.eval(), len(layers)
        self.config, self.dtype, self.device = config, model.dtype, last_device(model)
        self.embed, self.output = model.get_input_embeddings(), model.get_output_embeddings()

    @property
    def implementation(self) -> str:
        """transformers' name of the attention."""
        return self.config._attn_implementation

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All that `forward` runs."""
        return [self.embed, self.layers]

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, mask: Any, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """As `replay_transformers.generation.drafters.mtp.Head` says."""
        embedded = self.embed(tokens).to(self.device)
        mask = None if mask is None else mask.to(self.device)
        with self._experts_for_few_tokens() if cache.rows.before else nullcontext():
            return self.run(embedded, states.to(self.device), mask, positions.to(self.device), self.arguments(cache))

    @contextmanager
    def _experts_for_few_tokens(self) -> Iterator[None]:
        """What transformers does to a model behind the prompt, where it is not the model's own configuration already.

        On a GPU its usual way with experts is dear for few tokens, and may wait for the host, which no graph can.
        """
        usual = getattr(self.config, "_experts_implementation", None)
        if self.device.type == "cpu" or usual != "grouped_mm":
            yield
            return
        self.config._experts_implementation = "batched_mm"
        try:
            yield
        finally:
            self.config._experts_implementation = usual

    def run(
        self, embedded: torch.Tensor, states: torch.Tensor, mask: Any, positions: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        """States ``[B, T, hidden]`` of the head, from embeddings and the target's states (both ``[B, T, hidden]``)."""
        raise NotImplementedError

    def arguments(self, cache: Any) -> dict[str, Any]:
        """What attention layers take besides."""
        named = {generate_cache_name(): cache}
        return named | {REPLAY_FLAG: True} if self.implementation == "sdpa" else named

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, vocabulary]`` of states ``[B, T, hidden]``, by the model's output matrix."""
        return self.output(states)


def last_device(model: Any) -> torch.device:
    """Where the model's last layer computes, and its head with it; weights that wait elsewhere are brought there."""
    layer = model.get_decoder().layers[-1]
    hooks = (hook for module in layer.modules() for hook in parts_of(module))
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    device = next((device for device in devices if device is not None), None)
    return next(parameter.device for parameter in layer.parameters()) if device is None else torch.device(device)


def mtp_layers(config: Any) -> int | None:
    """How many MTP layers the checkpoint of a text configuration has, if it says so."""
    return next((getattr(config, name) for name in LAYER_NAMES if getattr(config, name, None)), None)


def head_of(model: Any) -> MtpHead:
    """The head of a model, built at the first call and whenever the model was moved or cast since.

    Raises:
        ValueError: the model's checkpoint has no complete head.
        NotImplementedError: a head of a kind that is not supported.
    """
    config = text_config(model.config)
    shared = (id(model.get_input_embeddings()), id(model.get_output_embeddings()))
    key = (model.dtype, last_device(model), config._attn_implementation, model.config.name_or_path, shared)
    with _lock:
        known, head = _kept.get(model, (None, None))
        if head is None or known != key:
            module = importlib.import_module(f"replay_transformers.patches.{HEADS[config.model_type]}")
            head = module.build(model)
            _kept[model] = (key, head)
        return head


def forget_heads() -> None:
    """Free every head."""
    with _lock:
        _kept.clear()
