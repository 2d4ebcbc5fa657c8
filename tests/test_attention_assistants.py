"""Attention models draft for state-space models, right often enough to be accepted and wrong often enough not to be."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.support.batches import observed
from tests.support.models import FAMILIES, greedy_without_cache, prompt
from tests.support.speculation import fitted
from tests.test_assisted import tiny_llama

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.core]
STEPS, DRAFTS, PADS = 30, 4, [0, 3, 6, 1, 2]


@functools.cache
def setting(family: str) -> tuple[Any, Any, torch.Tensor]:
    """The model, its assistant, and what follows the prompts."""
    model, inputs = FAMILIES[family](), prompt(5, 9, PADS)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
    mask = torch.cat([inputs["attention_mask"], torch.ones(5, STEPS, dtype=torch.int64)], dim=1)
    assistant = fitted(tiny_llama(), truth, mask)
    assistant.generation_config.num_assistant_tokens = DRAFTS
    return model, assistant, truth


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("rows", [slice(2, 3), slice(0, 5)], ids=["1", "5"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_greedy_decoding(family: str, rows: slice, window: int, implementation: str) -> None:
    model, assistant, truth = setting(family)
    inputs = {name: tensor[rows] for name, tensor in prompt(5, 9, PADS).items()}
    arguments = {"max_new_tokens": STEPS, "do_sample": False, "cache_implementation": implementation}
    arguments["cache_config"] = {"window": window, "draft_length": "fixed"}
    with observed(model) as rounds:
        output = model.generate(**inputs, **arguments, assistant_model=assistant)
    assert torch.equal(output, truth[rows])
    rounds.check(accepting=2)
