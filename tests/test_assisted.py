"""Assisted generation on replay caches: every drafter, both families, the tokens of decoding without a cache."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support.cached import EPSILON
from tests.support.generation import CACHE_ARGUMENT, returned_cache
from tests.support.models import (
    FAMILIES,
    VOCABULARY,
    assert_state_matters,
    build_nemotron_h,
    build_qwen3_5,
    greedy_without_cache,
    prompt,
)
from tests.support.mtp import HAS_MTP
from tests.support.speculation import assert_as_if_fed, never_right, never_unsure, perturbed, speculate

pytestmark = pytest.mark.usefixtures("enabled")

STEPS = 48
WINDOWS = [1, 3, 16]
EVERY_CACHE = pytest.mark.parametrize("implementation", ["replay", "replay_static"])
EVERY_WINDOW = pytest.mark.parametrize("window", WINDOWS)
ONE_WINDOW = pytest.mark.parametrize("window", [3, *(pytest.param(w, marks=pytest.mark.slow) for w in (1, 16))])
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def tiny(family: str) -> Any:
    """A tiny model whose state matters."""
    model = build_qwen3_5(**EPSILON) if family == "qwen3_5" else build_nemotron_h("M*-M")
    with rt.enable():
        assert_state_matters(model)
    return model


@functools.cache
def sample(name: str) -> Any:
    """A trained model that ships with the package, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(rt.sample_model(name), dtype=torch.float32)


@functools.cache
def text(family: str) -> dict[str, torch.Tensor]:
    """A prompt for the trained models that repeats itself a little."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(rt.sample_model(family))
    words = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        "
    return dict(tokenizer(words, return_tensors="pt"))


@functools.cache
def truth(family: str, trained: bool, steps: int = STEPS) -> torch.Tensor:
    """Greedy decoding with a full forward per token."""
    model, inputs = (sample(family), text(family)) if trained else (tiny(family), prompt(1, 9))
    return greedy_without_cache(model, inputs["input_ids"], torch.ones_like(inputs["input_ids"]), steps)


def tiny_llama(seed: int = 0) -> Any:
    """An attention model with the vocabulary of the tiny models."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def settings(implementation: str, window: int = 16) -> dict[str, Any]:
    """Greedy, on this cache."""
    return {
        "max_new_tokens": STEPS,
        "do_sample": False,
        "cache_implementation": implementation,
        "cache_config": {"window": window, "draft_length": "fixed"},
    }


def check(model: Any, rounds: Any, expected: torch.Tensor, accepting: int = 2) -> None:
    """Tokens as without a cache, rounds of every kind, and a cache as if fed with the result."""
    assert torch.equal(rounds.sequences, expected)
    rounds.check(accepting=accepting)
    assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])


@pytest.mark.core
@EVERY_CACHE
@EVERY_WINDOW
@EVERY_FAMILY
def test_prompt_lookup(family: str, window: int, implementation: str) -> None:
    model = sample(family)
    rounds = speculate(model, text(family), prompt_lookup_num_tokens=5, **settings(implementation, window))
    check(model, rounds, truth(family, trained=True))


@pytest.mark.core
@EVERY_CACHE
@EVERY_WINDOW
@EVERY_FAMILY
def test_an_assistant_that_is_mostly_right(family: str, window: int, implementation: str) -> None:
    model = tiny(family)
    rounds = speculate(model, prompt(1, 9), assistant_model=mostly_right(family), **settings(implementation, window))
    check(model, rounds, truth(family, trained=False))


@functools.cache
def mostly_right(family: str) -> Any:
    """An assistant of the same family."""
    return perturbed(tiny(family), 0.03)


@EVERY_CACHE
@ONE_WINDOW
@EVERY_FAMILY
def test_a_trained_assistant_with_its_default_settings(family: str, window: int, implementation: str) -> None:
    """Up to 20 single tokens between two decisions, fewer where it is unsure."""
    model, assistant = sample(family), sample(f"{family}_draft")
    rounds = speculate(model, text(family), assistant_model=assistant, **settings(implementation, window))
    check(model, rounds, truth(family, trained=True))
    assert rounds.cache.replay_config.max_draft == 20


@pytest.mark.core
@pytest.mark.smoke
@EVERY_FAMILY
def test_an_assistant_that_is_always_or_never_right(family: str) -> None:
    model, inputs = tiny(family), prompt(1, 9)
    same, wrong = perturbed(model, 0.0), never_right(model)
    rounds = speculate(model, inputs, assistant_model=same, **settings("replay", 3))
    assert torch.equal(rounds.sequences, truth(family, trained=False))
    assert rounds.accepted[1:-1] == [5] * (len(rounds.accepted) - 2), "behind the first token, which nobody drafts"
    rounds.check(accepting=4, rejecting=False)
    rounds = speculate(model, inputs, assistant_model=wrong, **settings("replay", 3))
    assert torch.equal(rounds.sequences, truth(family, trained=False))
    assert rounds.accepted == [1] * STEPS
    rounds.check(accepting=0)
    assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])


@pytest.mark.parametrize("length", [1, 2, 3])
@EVERY_FAMILY
def test_prompts_shorter_than_the_convolution(family: str, length: int) -> None:
    model, inputs = tiny(family), prompt(1, length)
    expected = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 20)
    for assistant in (mostly_right(family), never_right(model)):
        rounds = speculate(model, inputs, assistant_model=assistant, **settings("replay", 3) | {"max_new_tokens": 20})
        assert torch.equal(rounds.sequences, expected)
        rounds.check(accepting=0)
        assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])


@EVERY_CACHE
@EVERY_FAMILY
def test_a_left_padded_prompt(family: str, implementation: str) -> None:
    model, inputs = tiny(family), prompt(1, 12, [5])
    expected = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
    rounds = speculate(model, inputs, assistant_model=mostly_right(family), **settings(implementation, 3))
    assert torch.equal(rounds.sequences, expected)
    rounds.check()


@EVERY_CACHE
@EVERY_FAMILY
def test_prompt_lookup_in_a_left_padded_prompt(family: str, implementation: str) -> None:
    """The tokens are those of the prompt without padding."""
    model, ids = sample(family), text(family)["input_ids"]
    inputs = {
        "input_ids": torch.cat([ids.new_full((1, 7), model.generation_config.pad_token_id), ids], dim=1),
        "attention_mask": torch.cat([ids.new_zeros(1, 7), torch.ones_like(ids)], dim=1),
    }
    rounds = speculate(model, inputs, prompt_lookup_num_tokens=5, **settings(implementation, 3))
    assert torch.equal(rounds.sequences[:, 7:], truth(family, trained=True))
    rounds.check()


def test_the_vision_language_wrapper_with_and_without_an_image() -> None:
    from tests.support.vision import build_vision_language, image_prompt

    model = build_vision_language()
    arguments = settings("replay", 3) | {"max_new_tokens": 24}
    for inputs in (prompt(1, 9), image_prompt(model)):
        expected = model.generate(**copy.deepcopy(inputs), **arguments)
        for drafter in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": perturbed(model, 0.02)}):
            assert torch.equal(model.generate(**copy.deepcopy(inputs), **arguments, **drafter), expected)


@EVERY_FAMILY
def test_an_assistant_has_a_replay_cache_of_its_own(family: str) -> None:
    """Growing, with default settings and room for its drafts; kept for the next call."""
    assistant, caches = mostly_right(family), set()

    def note(module: Any, args: Any, output: Any) -> None:
        cache = returned_cache(output)
        assert isinstance(cache, rt.ReplayCache)
        assert cache.max_cache_len is None
        assert cache.replay_config == rt.ReplayConfig()
        caches.add(id(cache))

    hook = assistant.register_forward_hook(note)
    arguments = settings("replay_static", 3) | {"assistant_model": assistant, "max_new_tokens": 12}
    for _ in range(2):
        tiny(family).generate(**prompt(1, 9), **arguments)
    hook.remove()
    assert len(caches) == 1, "one cache for all rounds, and from the pool in the second call"


@EVERY_CACHE
@EVERY_FAMILY
def test_an_attention_model_drafts_for_a_state_space_model(family: str, implementation: str) -> None:
    """Untrained, it is never right; that the draft is used at all shows in the rejections."""
    model, assistant = tiny(family), never_unsure(tiny_llama())
    rounds = speculate(model, prompt(1, 9), assistant_model=assistant, **settings(implementation, 3))
    assert torch.equal(rounds.sequences, truth(family, trained=False))
    rounds.check(accepting=0)
    assert_as_if_fed(model, rounds.cache, rounds.sequences[:, :-1])


@EVERY_FAMILY
def test_the_other_family_drafts(family: str) -> None:
    other = next(name for name in FAMILIES if name != family)
    rounds = speculate(
        tiny(family), prompt(1, 9), assistant_model=never_unsure(perturbed(tiny(other), 0.0)), **settings("replay", 3)
    )
    assert torch.equal(rounds.sequences, truth(family, trained=False))
    rounds.check(accepting=0)


@EVERY_FAMILY
def test_a_state_space_model_drafts_for_an_attention_model(family: str) -> None:
    """The target is not ours and runs as ever; the assistant gets a replay cache, or its drafts would go astray."""
    target, assistant, inputs = tiny_llama(), never_unsure(perturbed(tiny(family), 0.0)), prompt(1, 9)
    expected = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    kinds: set[type] = set()
    hook = assistant.register_forward_hook(lambda module, args, output: kinds.add(type(returned_cache(output))))
    output = target.generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=assistant)
    hook.remove()
    assert torch.equal(output, expected)
    assert kinds == {rt.ReplayCache}


@pytest.mark.skipif(not HAS_MTP, reason="transformers has no use_mtp that serves Qwen3.5 before 5.23")
@EVERY_CACHE
@EVERY_WINDOW
def test_multi_token_prediction(window: int, implementation: str) -> None:
    """The head drafts three tokens per round by default; what it needs in the configuration is not left there."""
    model, before = sample("qwen3_5"), sample("qwen3_5").config.to_dict()
    rounds = speculate(model, text("qwen3_5"), use_mtp=True, **settings(implementation, window))
    check(model, rounds, truth("qwen3_5", trained=True))
    assert max(rounds.drafted) == 3
    assert len(rounds.forwards) < 0.75 * STEPS, "the head is right more often than not"
    assert model.config.to_dict() == before


@EVERY_CACHE
@EVERY_WINDOW
def test_early_exit(window: int, implementation: str) -> None:
    """The first layers of the target draft, with a cache of as many layers."""
    model, inputs = early_exiting(), prompt(1, 9)
    expected = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
    rounds = speculate(model, inputs, assistant_early_exit=3, **settings(implementation, window))
    check(model, rounds, expected)
    assert model.config.num_hidden_layers == 4


@functools.cache
def early_exiting() -> Any:
    """A model whose last layer adds little."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    model = build_qwen3_5(kinds, **EPSILON)
    with torch.no_grad():
        for name, parameter in model.model.layers[-1].named_parameters():
            if "out_proj" in name or "down_proj" in name:
                parameter.mul_(0.1)
    return never_unsure(model)


HAS_DFLASH = hasattr(transformers, "MuseGlimmerAssistantModel")


def dflash_assistant(model: Any, tokens: torch.Tensor) -> Any:
    """Drafts blocks of four at once, out of the states of two layers; here it knows the tokens, but for each fifth."""
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=model.config.hidden_size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=[0, 1],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    assistant, head = transformers.MuseGlimmerAssistantModel(config).eval(), model.get_output_embeddings().weight
    own = assistant.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        places = kwargs["position_ids"][0, -4:]
        wanted = tokens[0, places.clamp(max=tokens.shape[1] - 1)]
        wanted = torch.where(places % 5 == 0, (wanted + 1) % VOCABULARY, wanted)
        directions = head / head.norm(dim=1, keepdim=True)
        output.last_hidden_state = 100 * directions[wanted][None]
        return output

    assistant.forward = forward
    return assistant


@pytest.mark.skipif(not HAS_DFLASH, reason="this transformers has no dflash")
@EVERY_CACHE
@EVERY_WINDOW
@EVERY_FAMILY
def test_dflash(family: str, window: int, implementation: str) -> None:
    """Blocks drafted at once from the target's hidden states; a cache that holds tokens already is refused."""
    model, tokens = tiny(family), truth(family, trained=False)
    arguments = {"assistant_model": dflash_assistant(model, tokens), "speculation_type": "dflash"}
    rounds = speculate(model, prompt(1, 9), **arguments, **settings(implementation, window))
    check(model, rounds, tokens)
    again = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    held = rt.ReplayCache(model.config)
    model.generate(**prompt(1, 9), max_new_tokens=4, do_sample=False, **{CACHE_ARGUMENT: held})
    with pytest.raises(NotImplementedError, match="start with an empty cache"):
        model.generate(**again, **arguments, max_new_tokens=4, do_sample=False, **{CACHE_ARGUMENT: held})
