"""Generation between the steps of an optimiser, as reinforcement learning does it: the model is in training mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import replay_transformers as rt
from tests.support.models import FAMILIES, greedy_without_cache, prompt

GENERATE = {"max_new_tokens": 14, "do_sample": False}
ADAPTED = {"qwen3_5": "all-linear", "nemotron_h": ["in_proj", "q_proj", "v_proj", "up_proj"]}  # as peft allows


def advance(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def check_rollouts(model: Any, decoder: Any, checkpointing: bool = False) -> None:
    """Equal to decoding without a cache before, between and after steps that change every weight that is trained."""
    inputs = prompt(3, 9, [0, 2, 5])
    ids, mask, texts = inputs["input_ids"], inputs["attention_mask"], []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    with rt.enable():
        for _ in range(3):
            with torch.no_grad():
                decoder.eval()  # the truth's own forwards
                truth = greedy_without_cache(decoder, ids, mask, 14)
                model.train()
                for implementation in ("replay", "replay_static"):
                    settings = {"cache_implementation": implementation, "cache_config": {"window": 4}}
                    assert torch.equal(model.generate(**inputs, **GENERATE, **settings), truth)
            texts.append(truth)
            advance(model, optimizer, ids)
    assert not torch.equal(texts[0], texts[-1]), "the steps changed nothing"


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_between_steps(family: str, checkpointing: bool) -> None:
    model = copy.deepcopy(FAMILIES[family]())
    check_rollouts(model, model, checkpointing)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_adapters(family: str) -> None:
    """Runs where peft is installed."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = copy.deepcopy(FAMILIES[family]())
    settings = peft.LoraConfig(r=4, target_modules=ADAPTED[family], init_lora_weights=False)
    check_rollouts(peft.get_peft_model(base, settings), base)
