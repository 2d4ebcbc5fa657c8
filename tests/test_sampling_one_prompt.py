"""Sampling with the drafters that transformers serves one prompt at a time: whose distribution, and where it ends."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from replay_transformers.patches.drafts import DraftLimits
from tests.support.models import build_qwen3_5, full_logits, prompt
from tests.support.speculation import assert_as_if_fed, never_unsure, speculate
from tests.test_assisted import HAS_DFLASH, dflash_assistant, early_exiting, sample, settings, text, tiny, truth
from tests.test_sampling import NO_IDS, PROMPT, VOCABULARY, p_value

pytestmark = pytest.mark.usefixtures("enabled")

EXIT, LAST_TOKEN = 1, VOCABULARY - 1
THREE = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=3)))  # every text of three tokens


class Stop(transformers.StoppingCriteria):
    """At some tokens, of which no drafter knows."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every draft that was judged by probabilities: tokens that came of it, and those of them that were kept."""
    found, cut = list[tuple[int, int]](), DraftLimits.cut_accepted

    def cut_accepted(self: DraftLimits, prefix: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        kept = cut(self, prefix, accepted)
        found.append((accepted.shape[1], kept.shape[1]))
        return kept

    monkeypatch.setattr(DraftLimits, "cut_accepted", cut_accepted)
    return found


def cells(tokens: torch.Tensor, ends: bool) -> torch.Tensor:
    """int64 ``[n]``: the second and third of the new tokens ``[n, 3]``; where a text ends, those behind are one."""
    tokens = tokens.clone()
    for place in (1, 2) if ends else ():
        before = tokens[:, place - 1]
        tokens[:, place] = tokens[:, place].masked_fill((before == LAST_TOKEN) | (before == VOCABULARY), VOCABULARY)
    return tokens[:, 1] * (VOCABULARY + 1) + tokens[:, 2]


def expected(model: Any, ends: bool) -> torch.Tensor:
    """Probabilities of all cells."""
    ids = torch.tensor([PROMPT])
    sequences = torch.cat([ids.expand(len(THREE), -1), THREE], dim=1)
    steps = full_logits(model, sequences)[:, ids.shape[1] - 1 : -1].double().softmax(-1)
    likely = steps.gather(2, THREE[..., None]).squeeze(2).prod(1)
    return torch.zeros((VOCABULARY + 1) ** 2, dtype=torch.float64).index_add(0, cells(THREE, ends), likely)


@pytest.mark.parametrize(
    ("ends", "draws"),
    [
        (True, 600),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 1000), (False, 10_000), (True, 10_000))),
    ],
)
def test_sampled_tokens_follow_the_targets_distribution(ends: bool, draws: int, cuts: list[tuple[int, int]]) -> None:
    """Draws of three tokens out of five, of which one may end the text; the exit's own are told apart at once.

    A drafter's token that ends the text is judged like the others: to leave it out would distort the distribution.
    """
    model = never_unsure(build_qwen3_5(rms_norm_eps=1e-3, **NO_IDS), tokens=2)
    ids = torch.tensor([PROMPT])
    arguments: dict[str, Any] = {
        "do_sample": True,
        "max_new_tokens": 3,
        "top_k": 0,
        "assistant_early_exit": EXIT,
        "attention_mask": torch.ones_like(ids),
        "cache_implementation": "replay",
        "cache_config": {"window": 3},
    }
    if ends:
        arguments["stopping_criteria"] = transformers.StoppingCriteriaList([Stop(LAST_TOKEN)])
    drawn = torch.full((draws, 3), VOCABULARY)
    for draw in range(draws):
        new = model.generate(ids, **arguments)[0, ids.shape[1] :]
        drawn[draw, : len(new)] = new
    whole = expected(model, ends)
    model.config.num_hidden_layers = EXIT
    exits = expected(model, ends)
    assert sum(accepted == 3 for accepted, _ in cuts) > draws / 20
    assert sum(accepted == 1 for accepted, _ in cuts) > draws / 20
    counts, occurs = cells(drawn, ends).bincount(minlength=len(whole)).double(), whole > 0
    assert counts[occurs].sum() == draws
    assert p_value(counts[occurs], whole[occurs]) > 1e-3
    assert p_value(counts[occurs], exits[occurs]) < 1e-6
    assert (sum(kept < accepted for accepted, kept in cuts) > draws / 20) == ends


def early_exit() -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """The first three of four layers draft."""
    return early_exiting(), prompt(1, 9), {"assistant_early_exit": 3}


def another_tokenizer() -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """A model of the other family drafts, in tokens of its own; transformers changes its embeddings, for good."""
    names = {"tokenizer": "qwen3_5", "assistant_tokenizer": "nemotron_h"}
    tokenizers = {key: transformers.AutoTokenizer.from_pretrained(rt.sample_model(n)) for key, n in names.items()}
    assistant = copy.deepcopy(sample("nemotron_h_draft"))
    return sample("qwen3_5"), text("qwen3_5"), {"assistant_model": assistant, **tokenizers}


def dflash() -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """Blocks of greedy tokens are drafted, which a target at a low temperature accepts."""
    if not HAS_DFLASH:
        pytest.skip("this transformers has no dflash")
    model = tiny("nemotron_h")
    assistant = dflash_assistant(model, truth("nemotron_h", trained=False))
    return model, prompt(1, 9), {"assistant_model": assistant, "speculation_type": "dflash", "temperature": 0.2}


@pytest.mark.core
@pytest.mark.parametrize("how", ["criterion", "eos"])
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("drafter", [early_exit, another_tokenizer, dflash], ids=lambda drafter: drafter.__name__)
def test_a_stop_among_accepted_tokens(
    drafter: Callable[[], Any], implementation: str, how: str, cuts: list[tuple[int, int]]
) -> None:
    """The text ends with it, and so does what is in the cache; every draft is judged by probabilities.

    Translated drafts differ from run to run: transformers orders the tokens that two vocabularies share by chance.
    """
    model, inputs, choice = drafter()
    length, ends, inside = inputs["input_ids"].shape[1], list(range(3, model.config.vocab_size, 5)), 0
    more: dict[str, Any] = {"eos_token_id": ends, "pad_token_id": 0}
    if how == "criterion":
        more = {"stopping_criteria": transformers.StoppingCriteriaList([Stop(*ends)])}
    for seed in range(80):
        if inside == 5:
            break
        torch.manual_seed(seed)
        cuts.clear()
        arguments = settings(implementation, 3) | {"do_sample": True, **choice, **more}
        rounds = speculate(model, inputs, **arguments)
        new = rounds.sequences[0, length:].tolist()
        assert not set(new[:-1]) & set(ends), "text behind a stop"
        assert new[-1] in ends or len(new) == arguments["max_new_tokens"]
        assert len(cuts) == sum(drafted > 0 for drafted in rounds.drafted)
        assert all(kept == accepted for accepted, kept in cuts[:-1])
        assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])
        is_cut = any(kept < accepted for accepted, kept in cuts)
        # some versions of transformers leave out themselves what they accept behind an end-of-sequence token
        is_within = new[-1] in ends and rounds.accepted[-1] <= rounds.drafted[-1]
        inside += is_cut if how == "criterion" else is_within
    assert inside == 5, "stops with tokens behind them in the draft"
