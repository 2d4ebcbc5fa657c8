"""Shared models whose state matters, their replay caches, and what stock transformers makes of the same tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

import replay_transformers as rt
from replay_transformers.layers import ReplayLayer
from tests.support import models

# Over 1,350 random prompts, logits of these models (up to 4) in float32 came out at most 4e-5 away from a float64
# forward, and as much from each other with a cache and without: a factor of five is left. Forgetting the state moves
# them by more than 0.1; `model_for` checks that.
LOGITS = 2e-4
# Of a state's largest entry: at most 40 products are summed, each within 6e-8.
STATES = 2e-5

# Qwen's norms would amplify the rounding of near-zero outputs (of first tokens above all) a hundredfold more with 1e-6.
EPSILON = {"rms_norm_eps": 1e-3}

MODELS = {
    "nemotron_h": lambda: models.build_nemotron_h(),
    "nemotron_h-M*": lambda: models.build_nemotron_h("M*"),
    "nemotron_h-M*M": lambda: models.build_nemotron_h("M*M"),
    "nemotron_h-M": lambda: models.build_nemotron_h("M"),
    "qwen3_5": lambda: models.build_qwen3_5(**EPSILON),
    "qwen3_5-attention-first": lambda: models.build_qwen3_5(["full_attention", "linear_attention"], **EPSILON),
    "qwen3_5-attention-last": lambda: models.build_qwen3_5(["linear_attention", "full_attention"], **EPSILON),
    "qwen3_5-no-attention": lambda: models.build_qwen3_5(["linear_attention"], **EPSILON),
}


@functools.cache
def model_for(name: str) -> Any:
    """Built once and shared: not to be changed. Its output depends on its state."""
    model = MODELS[name]()
    with rt.enable():
        models.assert_state_matters(model)
    return model


def new_cache(model: Any, window: int = 4, max_draft: int = 0, max_cache_len: int | None = None) -> rt.ReplayCache:
    """An empty replay cache."""
    return rt.ReplayCache(
        model.config, rt.ReplayConfig(window=window, max_draft=max_draft), max_cache_len=max_cache_len
    )


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens."""
    return models.prompt(rows, length, seed=seed)["input_ids"]


def feed(model: Any, cache: rt.ReplayCache, tokens: torch.Tensor, *splits: int) -> torch.Tensor:
    """Forwards of so many tokens each, without `splits` one at a time; all logits."""
    parts = tokens.split(list(splits) if splits else 1, dim=1)
    return torch.cat([models.cached_forward(model, cache, part) for part in parts], dim=1)


def assert_logits(got: torch.Tensor, truth: torch.Tensor) -> None:
    """Equal up to `LOGITS`."""
    torch.testing.assert_close(got, truth, rtol=0, atol=LOGITS)


def assert_states(got: torch.Tensor, truth: torch.Tensor) -> None:
    """Equal up to `STATES` of the largest entry."""
    torch.testing.assert_close(got, truth, rtol=0, atol=STATES * max(1.0, truth.abs().max().item()))


def layers(cache: rt.ReplayCache) -> dict[int, ReplayLayer]:
    """The state-space layers by their index in the model."""
    return {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, ReplayLayer)}


def stock_cache(model: Any) -> Any:
    """What `generate` uses by default: a state that is updated at every step."""
    return transformers.DynamicCache(config=model.config)


def stock_state(cache: Any, index: int) -> torch.Tensor:
    """A layer's recurrent state in a stock cache."""
    return cache.layers[index].recurrent_states[0]
