"""Assisted generation in detail: where it ends, several turns, other tokenizers, sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, greedy_without_cache, prompt
from tests.support.speculation import assert_as_if_fed, perturbed, speculate
from tests.test_assisted import (
    EVERY_CACHE,
    EVERY_FAMILY,
    EVERY_WINDOW,
    HAS_MTP,
    STEPS,
    mostly_right,
    sample,
    settings,
    text,
    tiny,
    truth,
)

pytestmark = pytest.mark.usefixtures("enabled")


@EVERY_CACHE
@EVERY_FAMILY
def test_no_more_than_max_new_tokens(family: str, implementation: str) -> None:
    """Also where drafts would go on: prompt lookup does not stop by itself, and fixed shapes have no room for more."""
    model = sample(family)
    for steps in (1, 2, 3, 7):
        arguments = settings(implementation) | {"max_new_tokens": steps}
        rounds = speculate(model, text(family), prompt_lookup_num_tokens=6, **arguments)
        assert torch.equal(
            rounds.sequences, truth(family, trained=True)[:, : text(family)["input_ids"].shape[1] + steps]
        )
        assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])


@pytest.mark.core
@EVERY_FAMILY
def test_end_of_sequence_inside_an_accepted_block(family: str) -> None:
    """Whichever token ends the sequence: nothing after it is returned, streamed or kept."""
    model, inputs, assistant = tiny(family), prompt(1, 9), perturbed(tiny(family), 0.0)
    whole = truth(family, trained=False)[0, 9:].tolist()
    inside = 0
    for place in range(4, 16):
        end = whole[place]
        expected = whole[: whole.index(end) + 1]
        for drafter in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 4}):
            rounds = speculate(model, inputs, eos_token_id=end, **drafter, **settings("replay", 3))
            assert rounds.sequences[0, 9:].tolist() == expected
            assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])
            inside += rounds.accepted[-1] not in (1, 5)
    assert inside > 2


@pytest.mark.core
@EVERY_CACHE
@EVERY_FAMILY
def test_stop_strings_and_repetition_penalty(family: str, implementation: str) -> None:
    """As in plain generation, where every token is looked at."""
    model, inputs = sample(family), text(family)
    tokenizer = transformers.AutoTokenizer.from_pretrained(rt.sample_model(family))
    drafters = ({"prompt_lookup_num_tokens": 6}, {"assistant_model": sample(f"{family}_draft")})
    for extra in ({"stop_strings": ["append"]}, {"stop_strings": ["self"]}, {"repetition_penalty": 1.3}):
        plain = model.generate(**inputs, tokenizer=tokenizer, **extra, **settings(implementation))
        for drafter in drafters:
            rounds = speculate(model, inputs, tokenizer=tokenizer, **extra, **drafter, **settings(implementation))
            assert torch.equal(rounds.sequences, plain)
            rounds.check(accepting=0, rejecting=False)
            assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@EVERY_FAMILY
def test_a_stop_among_sampled_tokens(family: str, fixed: bool) -> None:
    """Sampling accepts by probabilities; what was accepted is cut at the first token that ends generation."""
    model = tiny(family)

    class Stop(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] % 5 == 0

    cut = 0
    for seed in range(12):
        torch.manual_seed(seed)
        arguments = settings("replay_static" if fixed else "replay", 3) | {"do_sample": True}
        stops = transformers.StoppingCriteriaList([Stop()])
        rounds = speculate(
            model, prompt(1, 9), assistant_model=perturbed(model, 0.0), stopping_criteria=stops, **arguments
        )
        new = rounds.sequences[0, 9:].tolist()
        assert [token % 5 == 0 for token in new[:-1]] == [False] * (len(new) - 1)
        assert new[-1] % 5 == 0 or len(new) == STEPS
        assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])
        cut += rounds.drafted[-1] > rounds.accepted[-1] - 1
    assert cut


@pytest.mark.core
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@EVERY_FAMILY
def test_three_turns_with_one_cache(family: str, fixed: bool) -> None:
    """A later turn is right, feeds only what the cache has not seen, and a plain turn may come between."""
    model, config = tiny(family), rt.ReplayConfig(window=3)
    cache = rt.ReplayCache(model.config, config, max_cache_len=128 if fixed else None)
    ids, arguments = prompt(1, 9)["input_ids"], {"max_new_tokens": 13, "do_sample": False, CACHE_ARGUMENT: cache}
    for turn in range(4):
        seen = int(cache.get_seq_length())
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = greedy_without_cache(model, ids, inputs["attention_mask"], 13)
        if turn == 2:
            assert torch.equal(model.generate(**inputs, **arguments), expected)
        else:
            drafter = {"assistant_model": mostly_right(family)} if turn != 1 else {"prompt_lookup_num_tokens": 3}
            rounds = speculate(model, inputs, seen=seen, **drafter, **arguments)
            assert torch.equal(rounds.sequences, expected)
            assert rounds.cache is cache
            assert 0 <= rounds.drafted[0] <= 4, "the first forward sees the new tokens and a draft"
            rounds.check(accepting=0, rejecting=False)
        assert not cache.cursor.recording
        assert_as_if_fed(model, cache, expected[:, :-1])
        ids = torch.cat([expected, prompt(1, 5, seed=turn + 1)["input_ids"]], dim=1)


@pytest.mark.skipif(not HAS_MTP, reason="transformers has no use_mtp that serves Qwen3.5 before 5.23")
def test_two_turns_with_multi_token_prediction() -> None:
    """In the second one the head has not seen what the cache holds; its drafts may be worse, the result is not."""
    model, inputs = sample("qwen3_5"), text("qwen3_5")
    cache = rt.ReplayCache(model.config)
    arguments = {"use_mtp": True, "max_new_tokens": 20, "do_sample": False, CACHE_ARGUMENT: cache}
    first = speculate(model, inputs, **arguments)
    seen = int(cache.get_seq_length())
    again = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    second = speculate(model, again, seen=seen, **arguments)
    assert torch.equal(second.sequences, truth("qwen3_5", trained=True)[:, : second.sequences.shape[1]])
    assert second.forwards[0] == 1
    second.check(accepting=1, rejecting=False)


@EVERY_CACHE
@EVERY_WINDOW
@EVERY_FAMILY
def test_an_assistant_with_another_tokenizer(family: str, window: int, implementation: str) -> None:
    """Its drafts are translated; where that changes tokens further back than its cache can undo, it starts over."""
    other = next(name for name in FAMILIES if name != family)
    model, assistant = sample(family), sample(f"{other}_draft")
    tokenizers = {
        "tokenizer": transformers.AutoTokenizer.from_pretrained(rt.sample_model(family)),
        "assistant_tokenizer": transformers.AutoTokenizer.from_pretrained(rt.sample_model(other)),
    }
    arguments = tokenizers | settings(implementation, window) | {"assistant_model": assistant}
    rounds = speculate(model, text(family), **arguments)
    assert torch.equal(rounds.sequences, truth(family, trained=True))
    rounds.check(accepting=2)
    assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])


@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.slow), "nemotron_h"])
def test_a_compiled_verification_has_the_same_tokens(family: str) -> None:
    """Compiled only if asked for; the number of tokens changes from round to round."""
    compile_config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=False)
    compile_config._compile_all_devices = True
    arguments = settings("replay_static", 3) | {"compile_config": compile_config, "max_new_tokens": 20}
    rounds = speculate(tiny(family), prompt(1, 9), assistant_model=mostly_right(family), **arguments)
    assert torch.equal(rounds.sequences, truth(family, trained=False)[:, :29])


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
def test_prompts_are_not_optimised_for_decoding(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers then copies experts' weights for every token, which is too much for prompts."""
    model, inside, seen = tiny("nemotron_h"), [False], list[tuple[bool, bool]]()

    @contextlib.contextmanager
    def optimised() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append((kwargs["input_ids"].shape[1] > 6, inside[0]))

    monkeypatch.setattr(model, "_optimize_model_for_decode", optimised)
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    arguments = settings(implementation, 3) | {"max_new_tokens": 20, "prompt_lookup_num_tokens": 3}
    model.generate(**prompt(2, 9), **arguments)
    hook.remove()
    assert set(seen) == {(True, False), (False, True)}
