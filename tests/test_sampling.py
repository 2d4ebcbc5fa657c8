"""Sampling with drafts: the distribution is the target's, whatever proposes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.batches import observed
from tests.support.models import build_nemotron_h, build_qwen3_5, full_logits
from tests.support.mtp import HAS_MTP, random_nemotron_h_head, random_qwen3_5_head, released, with_head
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


def with_mtp(family: str) -> Any:
    """A model whose checkpoint has a head for multi-token prediction, of random weights."""
    if family == "nemotron_h":
        model = build_nemotron_h("M*", num_nextn_predict_layers=1, mtp_layers_block_type=["attention"], **NO_IDS)
        with_head(model, released(random_nemotron_h_head(model).layers))
        return model
    kinds = ["linear_attention", "full_attention"]
    model = build_qwen3_5(kinds, rms_norm_eps=1e-3, mtp_num_hidden_layers=1, dtype=torch.float32, **NO_IDS)
    with_head(model, random_qwen3_5_head(model))
    return model


ASSISTANT, LOOKUP, MTP = "assistant", "lookup", "mtp"
# family, drafter, rows, draws, the cache
CASES = [
    ("qwen3_5", ASSISTANT, 500, 5000, "replay"),
    ("nemotron_h", ASSISTANT, 500, 2500, "replay_static"),
    ("qwen3_5", MTP, 500, 2500, "replay"),
    ("nemotron_h", ASSISTANT, 1, 250, "replay"),
    # in full, where that takes the least time
    ("nemotron_h", LOOKUP, 500, 20_000, "replay"),
    ("nemotron_h", MTP, 500, 20_000, "replay"),
]
EVERY_CASE = [
    *((family, drafter, 500, 20_000, "replay") for family in BUILDERS for drafter in (ASSISTANT, LOOKUP, MTP)),
    *((family, ASSISTANT, 500, 20_000, "replay_static") for family in BUILDERS),
    *((family, drafter, 1, 2000, "replay") for family in BUILDERS for drafter in (ASSISTANT, LOOKUP, MTP)),
]


def drafting(model: Any, assistant: Any, drafter: str) -> dict[str, Any]:
    """Arguments of `generate`; three tokens per round."""
    if drafter == ASSISTANT:
        return {"assistant_model": assistant}
    return {"prompt_lookup_num_tokens": 3} if drafter == LOOKUP else {"use_mtp": True, "num_assistant_tokens": 3}


@pytest.mark.parametrize(
    ("family", "drafter", "rows", "draws", "implementation"),
    [*CASES, *(pytest.param(*case, marks=SLOW) for case in EVERY_CASE if case not in CASES)],
)
def test_sampled_tokens_follow_the_targets_distribution(
    family: str, drafter: str, rows: int, draws: int, implementation: str
) -> None:
    """Draws of three tokens out of five; a perturbed model's distribution, the assistant's, is told apart at once.

    Thousands of draws in batches show a wrong token behind a rejection as well, 250 of a single prompt only drafts that
    are always accepted. 20,000 in batches are in every run where they are fast; the others, and 2,000 of a single
    prompt, are slow: --run-slow.
    """
    if drafter == MTP and not HAS_MTP:
        pytest.skip("transformers before 5.23 has no use_mtp")
    model = with_mtp(family) if drafter == MTP else BUILDERS[family]()
    assistant = never_unsure(perturbed(model, 0.5), tokens=3)
    ids = torch.tensor([PROMPT])
    many = ids.expand(rows, -1)
    inputs = {"input_ids": many, "attention_mask": torch.ones_like(many)}
    choice = drafting(model, assistant, drafter)
    arguments: dict[str, Any] = {
        "do_sample": True,
        "max_new_tokens": 4,
        "top_k": 0,
        "cache_implementation": implementation,
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
