"""Sampling with drafts: the distribution is the target's, whatever proposes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.batches import observed
from tests.support.models import build_nemotron_h, build_qwen3_5, full_logits
from tests.support.speculation import never_unsure, perturbed

pytestmark = pytest.mark.usefixtures("enabled")

VOCABULARY = 5
PROMPT = [1, 3, 0, 2, 4, 1, 3, 0, 2]
NO_IDS = {"vocab_size": VOCABULARY, "pad_token_id": None, "bos_token_id": None}
BUILDERS = {
    "qwen3_5": lambda: build_qwen3_5(rms_norm_eps=1e-3, **NO_IDS),
    "nemotron_h": lambda: build_nemotron_h("M*-M", **NO_IDS),
}
SLOW = pytest.mark.slow


def joint(model: Any, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Probabilities ``[V, V]`` of the second and third new token, summed over the first."""
    firsts = torch.tensor(list(itertools.product(range(vocabulary), repeat=2)))
    sequences = torch.cat([ids.expand(len(firsts), -1), firsts], dim=1)
    steps = full_logits(model, sequences)[:, ids.shape[1] - 1 :].double().softmax(-1)  # [V*V, 3, V]
    first = steps[:, 0].gather(1, firsts[:, :1]).squeeze(1)
    second = steps[:, 1].gather(1, firsts[:, 1:]).squeeze(1)
    return ((first * second)[:, None] * steps[:, 2]).view(vocabulary, vocabulary, vocabulary).sum(0)


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of the chi-square test."""
    expected = counts.sum() * probabilities
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64), statistic / 2).item()


@pytest.mark.parametrize(
    ("family", "drafter", "rows", "draws"),
    [
        ("qwen3_5", "assistant", 500, 5000),
        pytest.param("qwen3_5", "assistant", 500, 20_000, marks=SLOW),
        pytest.param("qwen3_5", "lookup", 500, 20_000, marks=SLOW),
        pytest.param("nemotron_h", "assistant", 500, 20_000, marks=SLOW),
        pytest.param("nemotron_h", "lookup", 500, 20_000, marks=SLOW),
        pytest.param("qwen3_5", "assistant", 1, 2000, marks=SLOW),
        pytest.param("qwen3_5", "lookup", 1, 2000, marks=SLOW),
    ],
)
def test_sampled_tokens_follow_the_targets_distribution(family: str, drafter: str, rows: int, draws: int) -> None:
    """Draws of three tokens out of five; the assistant's own distribution would be told apart at once."""
    model = BUILDERS[family]()
    assistant = never_unsure(perturbed(model, 0.5), tokens=3)
    ids = torch.tensor([PROMPT])
    many = ids.expand(rows, -1)
    inputs = {"input_ids": many, "attention_mask": torch.ones_like(many)}
    choice = {"assistant_model": assistant} if drafter == "assistant" else {"prompt_lookup_num_tokens": 3}
    arguments: dict[str, Any] = {
        "do_sample": True,
        "max_new_tokens": 4,
        "top_k": 0,
        "cache_implementation": "replay",
        "cache_config": {"window": 3, "draft_length": "fixed"},
    }
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.5)
    accepted: list[int] = []
    for _ in range(draws // rows):
        with observed(model) as rounds:
            output = model.generate(**inputs, **choice, **arguments)
        pairs = output[:, 10] * VOCABULARY + output[:, 11]
        counts += pairs.bincount(minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY)
        accepted += [added - 1 for added in rounds.added[0]]
    assert sum(count >= 2 for count in accepted) > draws / 50
    assert sum(count == 0 for count in accepted) > draws / 50
    assert p_value(counts, joint(model, ids, VOCABULARY)) > 1e-3
    assert p_value(counts, joint(assistant, ids, VOCABULARY)) < 1e-6
