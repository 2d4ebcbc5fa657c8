"""Multi-token prediction on replay caches: the model's own head drafts, for batches of any size."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from replay_transformers.generation.draft_length import DraftLength
from replay_transformers.generation.drafters.mtp import MultiTokenPrediction
from tests.support import models
from tests.support.batches import Rounds, observed
from tests.support.generation import CACHE_ARGUMENT, returned_cache
from tests.support.mtp import MODELS, NEEDS_MTP, STEPS, fed, grown, inputs, last_states, truth

pytestmark = [
    pytest.mark.usefixtures("enabled"),
    NEEDS_MTP,
]

EVERY_FAMILY = pytest.mark.parametrize("family", list(MODELS))
EVERY_CACHE = pytest.mark.parametrize("implementation", ["replay", "replay_static"])
# the trained model is the slower one
CASES = [("nemotron_h", window, tokens) for window in (1, 3, 16) for tokens in (1, 2, 3)] + [
    ("qwen3_5", 1, 3),
    ("qwen3_5", 3, 2),
    ("qwen3_5", 16, 1),
    ("qwen3_5", 16, 3),
]


def generate(family: str, rows: int = 5, tokens: int = 3, window: int = 3, **arguments: Any) -> tuple[Any, Rounds]:
    """Drafts of a fixed length unless the arguments say otherwise; the result, and what happened."""
    model = arguments.pop("model", None) or MODELS[family]()
    settings = {
        "max_new_tokens": STEPS,
        "do_sample": False,
        "num_assistant_tokens": tokens,
        "cache_implementation": "replay",
        "cache_config": {"window": window, "draft_length": "fixed"},
    }
    given = arguments.pop("given", None) or inputs(family, rows)
    with observed(model) as rounds:
        output = model.generate(**copy.deepcopy(given), use_mtp=True, **(settings | arguments))
    return output, rounds


def assert_true(drafter: MultiTokenPrediction, model: Any, rows: Any) -> None:
    """The head's cache is that of a new one fed with each row's tokens alone, and with the target's true states."""
    pointers = drafter.cache.rows
    assert (pointers.lengths - pointers.padding).tolist() == (rows.lengths - rows.padding - 1).tolist()
    for row in range(rows.batch):
        begin, end = int(rows.padding[row]), int(rows.lengths[row])
        alone = fed(model, drafter.head, rows.ids[row : row + 1, begin:end])
        slots = slice(int(pointers.padding[row]), int(pointers.lengths[row]))
        for held, fresh in zip(drafter.cache.layers, alone.cache.layers, strict=True):
            if fresh.keys is None:
                continue  # experts
            for got, wanted in ((held.keys, fresh.keys), (held.values, fresh.values)):
                torch.testing.assert_close(got[row, :, slots], wanted[0, :, : end - begin - 1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(drafter._last[row], alone._last[0], rtol=1e-3, atol=1e-3)


@pytest.mark.core
@EVERY_CACHE
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("family", "window", "tokens"), CASES)
def test_the_tokens_of_greedy_decoding(family: str, window: int, tokens: int, rows: int, implementation: str) -> None:
    output, rounds = generate(family, rows, tokens, window, cache_implementation=implementation)
    assert torch.equal(output, truth(family)[:rows])
    rounds.check(accepting=min(tokens, 2))


@EVERY_CACHE
@EVERY_FAMILY
def test_one_prompt_with_padding(family: str, implementation: str) -> None:
    """The prompt of which the most is padding."""
    given = inputs(family)
    row = int(given["attention_mask"].sum(1).argmin())
    alone = {name: value[row : row + 1] for name, value in given.items()}
    assert not alone["attention_mask"][0, 0]
    output, rounds = generate(family, given=alone, cache_implementation=implementation)
    assert torch.equal(output, truth(family)[row : row + 1])
    rounds.check(accepting=2)


@EVERY_FAMILY
def test_the_head_has_seen_accepted_tokens_only(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows are at different places, and behind its own recursive drafts."""
    draft, lengths = MultiTokenPrediction.draft, []

    def checked(self: MultiTokenPrediction, rows: Any, length: int) -> Any:
        drafted = draft(self, rows, length)
        lengths.append(rows.lengths.tolist())
        if len(lengths) in (2, 5):
            assert_true(self, MODELS[family](), rows)
        return drafted

    monkeypatch.setattr(MultiTokenPrediction, "draft", checked)
    _, rounds = generate(family, tokens=3)
    rounds.check(accepting=2)
    assert len(set(lengths[4])) > 1, "the rows are at different places"


@EVERY_FAMILY
def test_rounds_without_a_draft_lose_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = itertools.cycle([2, 0, 0, 3, 0, 1])
    monkeypatch.setattr(DraftLength, "choose", lambda self: next(lengths))
    output, rounds = generate(family, tokens=3)
    assert torch.equal(output, truth(family))
    rounds.check(accepting=2)
    assert rounds.drafted[:6] == [2, 0, 0, 3, 0, 1]
    rounds.drafter.draft(rounds.rows, 1)
    assert_true(rounds.drafter, MODELS[family](), rounds.rows)


def test_many_rounds_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the head is fed at once."""
    from replay_transformers.generation.drafters import mtp

    monkeypatch.setattr(mtp, "MOST_WAITING", 4)
    monkeypatch.setattr(DraftLength, "choose", lambda self: 0)
    output, rounds = generate("nemotron_h")
    assert torch.equal(output, truth("nemotron_h"))
    assert set(rounds.drafted) == {0}
    rounds.drafter.draft(rounds.rows, 1)
    assert_true(rounds.drafter, MODELS["nemotron_h"](), rounds.rows)


@EVERY_FAMILY
def test_the_length_of_drafts_is_adapted(family: str) -> None:
    output, rounds = generate(family, tokens=3, cache_config={"window": 3})
    assert torch.equal(output, truth(family))
    rounds.check(accepting=1, rejecting=False)


def test_the_first_draft_is_that_of_transformers_own_drafter() -> None:
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    from replay_transformers.patches.drafts import mtp_named_as_transformers_does
    from replay_transformers.patches.mtp import head_of

    model, expected = MODELS["qwen3_5"](), truth("qwen3_5")[:1]
    nothing = transformers.LogitsProcessorList()
    prompt = inputs("qwen3_5", 1)["input_ids"].shape[1]
    for length in range(prompt + 1, prompt + 9):
        ids = expected[:, :length]
        states = last_states(model, ids[:, :-1], torch.ones_like(ids[:, :-1]))
        with mtp_named_as_transformers_does(model):
            stock = MTPCandidateGenerator(model, model.generation_config, {})
        candidates, _ = stock.get_candidates(
            ids,
            model_kwargs={"position_ids": torch.arange(length)[None]},
            model_outputs=transformers.utils.ModelOutput(hidden_states=(states,)),
            is_first_iteration=False,
            n_last_matches=0,
        )
        rows = grown(ids)
        drafter = MultiTokenPrediction(head_of(model), 1, nothing, do_sample=False)
        drafter.start(rows, states)
        assert torch.equal(drafter.draft(rows, 1).tokens, candidates[:, -1:])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@EVERY_FAMILY
def test_both_kinds_of_attention(family: str, implementation: str) -> None:
    model = copy.deepcopy(MODELS[family]())
    model.set_attn_implementation(implementation)
    output, rounds = generate(family, model=model)
    assert torch.equal(output, truth(family))
    rounds.check(accepting=2)


@EVERY_FAMILY
def test_a_prompt_in_chunks(family: str) -> None:
    """The head gets the states of the last chunk only, which begins behind the padding or within it."""
    output, rounds = generate(family, prefill_chunk_size=8)
    assert torch.equal(output, truth(family))
    chunks = -(-inputs(family)["input_ids"].shape[1] // 8)
    assert chunks > 1
    rounds.check(accepting=1, prompts=chunks)


@EVERY_FAMILY
def test_a_second_turn_with_the_cache_of_the_first(family: str) -> None:
    first, _ = generate(family, max_new_tokens=10, return_dict_in_generate=True)
    mask = inputs(family)["attention_mask"]
    whole = {
        "input_ids": first.sequences,
        "attention_mask": torch.cat([mask, torch.ones_like(first.sequences[:, mask.shape[1] :])], dim=1),
    }
    cache = {CACHE_ARGUMENT: returned_cache(first), "cache_implementation": None, "cache_config": None}
    output, rounds = generate(family, given=whole, max_new_tokens=STEPS - 10, **cache)
    assert torch.equal(output, truth(family))
    assert rounds.forwards[0] == 1
    rounds.check(accepting=1, rejecting=False)


@EVERY_FAMILY
def test_rows_that_end_early(family: str) -> None:
    """Their tokens are those of plain decoding, and padding behind the end."""
    expected = truth(family).clone()
    prompt = inputs(family)["input_ids"].shape[1]
    ends = [int(expected[0, prompt + 5]), int(expected[3, prompt + 9])]
    pad = MODELS[family]().generation_config.pad_token_id or 0
    for row in expected:
        end = next((i for i in range(prompt, len(row)) if int(row[i]) in ends), None)
        if end is not None:
            row[end + 1 :] = pad
    output, rounds = generate(family, eos_token_id=ends, pad_token_id=pad)
    assert torch.equal(output, expected[:, : output.shape[1]])
    rounds.check(accepting=1)


def test_how_many_tokens_are_drafted() -> None:
    model = copy.deepcopy(MODELS["nemotron_h"]())
    assert max(generate("nemotron_h", model=model, num_assistant_tokens=None)[1].drafted) == 3
    model.generation_config.num_assistant_tokens = 2
    assert max(generate("nemotron_h", model=model, num_assistant_tokens=None)[1].drafted) == 2
    config = copy.deepcopy(model.generation_config)
    config.num_assistant_tokens = 4
    output, rounds = generate("nemotron_h", model=model, num_assistant_tokens=None, generation_config=config)
    assert torch.equal(output, truth("nemotron_h"))
    assert max(rounds.drafted) == 4
    _, rounds = generate("nemotron_h", model=model, generation_config=config, num_assistant_tokens=12)
    assert max(rounds.drafted) == 12
    assert rounds.forwards[1] == 13


@EVERY_FAMILY
def test_sampling_from_one_token_is_greedy(family: str) -> None:
    output, rounds = generate(family, do_sample=True, top_k=1)
    assert torch.equal(output, truth(family))
    rounds.check(accepting=2)


def test_sampling_keeps_the_distribution() -> None:
    """Of three tokens, each out of two, behind one prompt; the drafts are drawn from the head's distribution."""
    model, rows = MODELS["nemotron_h"](), 1500
    given = {name: value[:1] for name, value in inputs("nemotron_h").items()}
    many = {name: value.expand(rows, -1) for name, value in given.items()}
    prompt = given["input_ids"].shape[1]
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, chance in expected.items():
            ids = torch.cat([given["input_ids"], torch.tensor([tokens], dtype=torch.int64)], dim=1)
            likely = models.full_logits(model, ids)[0, -1].topk(2)
            for token, share in zip(likely.indices.tolist(), likely.values.softmax(-1).tolist(), strict=True):
                longer[(*tokens, token)] = chance * share
        expected = longer
    output, rounds = generate("nemotron_h", given=many, max_new_tokens=3, do_sample=True, top_k=2)
    rounds.check(accepting=1)
    counts = dict.fromkeys(expected, 0)
    for tokens in output[:, prompt:].tolist():
        counts[tuple(tokens)] += 1
    for tokens, chance in expected.items():
        deviation = (chance * (1 - chance) / rows) ** 0.5
        assert abs(counts[tokens] / rows - chance) < 5 * deviation + 1e-9, (tokens, counts[tokens], chance)


def test_a_sample_of_a_batch_has_its_own_scores() -> None:
    """One entry per generated token, as in plain decoding."""
    output, rounds = generate("nemotron_h", return_dict_in_generate=True, output_logits=True)
    prompt = inputs("nemotron_h")["input_ids"].shape[1]
    assert len(output.logits) == STEPS
    assert torch.equal(torch.stack(output.logits, dim=1).argmax(-1), output.sequences[:, prompt:])
    assert isinstance(returned_cache(output), rt.ReplayCache)
    rounds.check(accepting=2)
