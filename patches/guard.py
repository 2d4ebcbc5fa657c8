"""What a model must not do with a replay cache, checked before its first layer takes anything in."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from replay_transformers.cache import ReplayCache
from replay_transformers.patches.attention import REPLAY_FLAG
from replay_transformers.patches.rows import separate_rows
from replay_transformers.patches.versions import cache_argument

__all__ = ["guard", "refuse_training", "replay_cache_of", "switch"]

# Copies of a model that was prepared for the patches outlive them. A bool of its own, since compiled steps guard on it.
_is_on = False


def switch(is_on: bool) -> None:
    """Whether the patches are on: while they are off, nothing is diverted to a replay cache."""
    global _is_on
    _is_on = is_on


def replay_cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayCache | None:
    """The replay cache among the arguments of a forward, if it got one and the patches are on."""
    if not _is_on:
        return None
    cache = cache_argument(kwargs)
    if isinstance(cache, ReplayCache):
        return cache
    return next((value for value in args if isinstance(value, ReplayCache)), None)


def refuse_training(module: Any, kwargs: dict[str, Any]) -> None:
    """Raise in training mode with gradients, and for packed sequences."""
    if module.training and torch.is_grad_enabled():
        raise ValueError(
            "a replay cache cannot be used in training mode with gradients enabled: call model.eval(), use "
            "torch.no_grad(), or pass use_cache=False"
        )
    if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None:
        raise NotImplementedError(
            "a replay cache does not take packed sequences (cu_seq_lens_q, seq_idx): pad the batch on the left instead"
        )


def guard(original: Callable[..., Any]) -> Callable[..., Any]:
    """A decoder's forward that checks the replay cache it is given, if any, and is the original otherwise.

    With a replay cache it also tells the attention functions of its layers.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = replay_cache_of(args, kwargs)
        if cache is None:
            return original(self, *args, **kwargs)
        refuse_training(self, kwargs)
        if self.config._attn_implementation == "sdpa":
            kwargs[REPLAY_FLAG] = True
        named = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        inputs = next((value for value in (*args, *named) if isinstance(value, torch.Tensor)), None)
        if cache.cursor.ragged and inputs is not None:
            separate_rows(self, cache, inputs, kwargs)
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        cache.check_model(self.config)
        if inputs is not None:
            cache.input_device = inputs.device
            cache.check_forward(*inputs.shape[:2])
        before = cache.cursor.forwards
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            cache.note_broken_forward(before)
            raise

    return forward
