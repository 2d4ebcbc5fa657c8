"""What assisted generation refuses, that nothing of it stays behind, and that other models run as ever."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support.devices import devices
from tests.support.dispatch import spread
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, prompt
from tests.support.mtp import HAS_MTP
from tests.support.snapshots import Snapshot
from tests.support.speculation import never_unsure, perturbed
from tests.test_assisted import HAS_DFLASH, dflash_assistant, early_exiting, sample, tiny, tiny_llama

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
LOOKUP = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8, "do_sample": False}
REPLAY = {"cache_implementation": "replay"}


def generate(model: Any, rows: int = 1, **arguments: Any) -> torch.Tensor:
    """Greedy, eight tokens, prompt lookup unless told otherwise."""
    return model.generate(**prompt(rows, 9), **LOOKUP | arguments)


@pytest.mark.core
@EVERY_FAMILY
def test_any_other_cache_is_refused(family: str) -> None:
    model = tiny(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with rt.enable():
        for arguments in (
            {},
            {"cache_implementation": "static"},
            {"use_cache": False},
            {CACHE_ARGUMENT: transformers.DynamicCache(config=model.config)},
        ):
            with pytest.raises(
                ValueError, match=r"needs a cache that can roll.*cache_implementation=.replay|use_cache"
            ):
                generate(model, **arguments)
        assert generate(model, **REPLAY).shape == (1, 17)
        rt.enable(default=True)
        assert generate(model).shape == (1, 17), "the default cache is a replay cache"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.core
@EVERY_FAMILY
def test_unpatched_models_refuse_as_ever(family: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="not supported with stateful models"):
            generate(tiny(family))
        with rt.enable():
            assert generate(tiny(family), **REPLAY).shape == (1, 17)


@pytest.mark.usefixtures("enabled")
@EVERY_FAMILY
def test_drafts_longer_than_the_users_cache_can_reject(family: str) -> None:
    model = tiny(family)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(max_draft=2))
    with pytest.raises(ValueError, match=r"up to 3 tokens.*max_draft=2.*ReplayConfig\(max_draft=3\)"):
        generate(model, **{CACHE_ARGUMENT: cache})
    assistant = never_unsure(perturbed(model, 0.0), tokens=12)
    with pytest.raises(ValueError, match="up to 12 tokens"):
        generate(model, assistant_model=assistant, prompt_lookup_num_tokens=None, **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 0
    assert generate(model, **{CACHE_ARGUMENT: rt.ReplayCache(model.config, rt.ReplayConfig(max_draft=3))}).shape == (
        1,
        17,
    )


@pytest.mark.usefixtures("enabled")
def test_batches_and_beams() -> None:
    model = tiny("qwen3_5")
    with pytest.raises(NotImplementedError, match=r"assistant_early_exit takes one prompt at a time.* a batch of 2"):
        generate(model, rows=2, assistant_early_exit=1, prompt_lookup_num_tokens=None, **REPLAY)
    with pytest.raises(ValueError, match=r"cannot be used with .*beam.*leave num_beams at 1"):
        generate(model, num_beams=2, **REPLAY)
    output = generate(model, num_return_sequences=3, do_sample=True, **REPLAY)
    assert output.shape == (3, 17)


@contextlib.contextmanager
def refused(model: Any, cache: rt.ReplayCache, error: type[Exception], match: str) -> Iterator[None]:
    """Such an error, and the model and the cache are what they were."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    configurations, held = (model.config.to_dict(), model.generation_config.to_dict()), Snapshot(cache)
    with pytest.raises(error, match=match):
        yield
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == configurations
    assert held.changes(cache) == []


def turn(model: Any, rows: int, is_second: bool) -> dict[str, Any]:
    """Arguments of a call with a cache of the user's, which is empty or holds a first turn."""
    cache, inputs = rt.ReplayCache(model.config, rt.ReplayConfig(max_draft=24)), prompt(rows, 9)
    if is_second:
        ids = model.generate(**inputs, max_new_tokens=4, do_sample=False, **{CACHE_ARGUMENT: cache})
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**inputs, CACHE_ARGUMENT: cache, "max_new_tokens": 8, "do_sample": False}


def early_exit() -> tuple[Any, dict[str, Any]]:
    return early_exiting(), {"assistant_early_exit": 3}


def dflash() -> tuple[Any, dict[str, Any]]:
    if not HAS_DFLASH:
        pytest.skip("this transformers has no dflash")
    model = tiny("nemotron_h")
    assistant = dflash_assistant(model, prompt(1, 9)["input_ids"])
    return model, {"assistant_model": assistant, "speculation_type": "dflash"}


def another_tokenizer() -> tuple[Any, dict[str, Any]]:
    names = {"tokenizer": "qwen3_5", "assistant_tokenizer": "nemotron_h"}
    tokenizers = {key: transformers.AutoTokenizer.from_pretrained(rt.sample_model(n)) for key, n in names.items()}
    return sample("qwen3_5"), {"assistant_model": sample("nemotron_h_draft"), **tokenizers}


ONE_AT_A_TIME = {
    "assistant_early_exit": early_exit,
    "speculation_type='dflash'": dflash,
    "an assistant with another tokenizer": another_tokenizer,
}
EVERY_TURN = pytest.mark.parametrize("is_second", [False, True], ids=["first turn", "second turn"])


@pytest.mark.usefixtures("enabled")
@EVERY_TURN
@pytest.mark.parametrize("drafter", ONE_AT_A_TIME)
def test_drafters_of_one_prompt_at_a_time(drafter: str, is_second: bool) -> None:
    """Two are refused; then the cache goes on with a drafter that takes them."""
    model, choice = ONE_AT_A_TIME[drafter]()
    arguments = turn(model, 2, is_second)
    message = f"{drafter} takes one prompt at a time in assisted generation, got a batch of 2"
    with refused(model, arguments[CACHE_ARGUMENT], NotImplementedError, message):
        model.generate(**arguments, **choice)
    expected = model.generate(**arguments | {CACHE_ARGUMENT: None})
    assert torch.equal(model.generate(**arguments, prompt_lookup_num_tokens=3), expected)


@pytest.mark.usefixtures("enabled")
@EVERY_TURN
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("target", "assistant"), [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1")])
def test_an_assistant_on_another_device(target: str, assistant: str, rows: int, is_second: bool) -> None:
    model = tiny("qwen3_5")
    layers = model.config.num_hidden_layers
    with devices():
        placed, drafting = (
            copy.deepcopy(model) if device == "cpu" else spread(model, [0] * layers, [device])
            for device in (target, assistant)
        )
        arguments = turn(placed, rows, is_second)
        message = f"assistant is on {assistant} and the model on {target}: move one"
        with refused(placed, arguments[CACHE_ARGUMENT], ValueError, message):
            placed.generate(**arguments, assistant_model=never_unsure(drafting))


@pytest.mark.usefixtures("enabled")
def test_an_assistant_with_another_vocabulary_needs_tokenizers() -> None:
    with pytest.raises(ValueError, match=r"has 97 tokens and the assistant \d+: pass both .* for a batch take"):
        generate(tiny("qwen3_5"), assistant_model=sample("nemotron_h_draft"), prompt_lookup_num_tokens=None, **REPLAY)


@pytest.mark.usefixtures("enabled")
def test_an_assistant_that_is_a_name() -> None:
    with pytest.raises(ValueError, match=r"assistant_model must be a model, got 'a/name': load one with"):
        generate(tiny("qwen3_5"), assistant_model="a/name", prompt_lookup_num_tokens=None, **REPLAY)


@pytest.mark.usefixtures("enabled")
def test_another_vocabulary_hides_no_other_error() -> None:
    arguments = {"prompt_lookup_num_tokens": None, "num_beams": 2, "streamer": object(), **REPLAY}
    with pytest.raises(ValueError, match="`streamer` cannot be used with beam search"):
        generate(tiny("qwen3_5"), assistant_model=sample("nemotron_h_draft"), **arguments)


@pytest.mark.usefixtures("enabled")
def test_a_reused_cache_wants_new_tokens_and_a_mask_for_all() -> None:
    model, ids = tiny("qwen3_5"), prompt(1, 5, seed=3)["input_ids"]
    cache = rt.ReplayCache(model.config)
    generate(model, **{CACHE_ARGUMENT: cache})
    arguments = LOOKUP | {CACHE_ARGUMENT: cache}
    for masked in (5, 20, 22):
        with pytest.raises(ValueError, match=f"holds 16 tokens, the prompt has 5 and its mask {masked}: continue"):
            model.generate(input_ids=ids, attention_mask=torch.ones(1, masked, dtype=torch.long), **arguments)
    assert cache.get_seq_length() == 16


@pytest.mark.usefixtures("enabled")
def test_early_exits_that_do_not_work() -> None:
    arguments = {"prompt_lookup_num_tokens": None} | REPLAY
    for exit_layer in (0, 4, True, 2.0):
        with pytest.raises(ValueError, match="assistant_early_exit must be an int from 1 to 3"):
            generate(early_exiting(), assistant_early_exit=exit_layer, **arguments)
    with pytest.raises(NotImplementedError, match="runs all of its layers"):
        generate(tiny("nemotron_h"), assistant_early_exit=1, **arguments)


@pytest.mark.usefixtures("enabled")
def test_an_early_exit_that_raises_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = early_exiting()

    def fail(*args: Any, **kwargs: Any) -> None:
        if model.config.num_hidden_layers < 4:
            raise RuntimeError("on purpose")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        generate(model, assistant_early_exit=2, prompt_lookup_num_tokens=None, **REPLAY)
    hook.remove()
    assert model.config.num_hidden_layers == 4
    assert generate(model, **REPLAY).shape == (1, 17)


@pytest.mark.usefixtures("enabled")
@pytest.mark.core
@pytest.mark.smoke
def test_multi_token_prediction_that_does_not_work() -> None:
    arguments = {"prompt_lookup_num_tokens": None, "use_mtp": True} | REPLAY
    if not HAS_MTP:
        with pytest.raises(NotImplementedError, match=r"use_mtp needs transformers 5\.23"):
            generate(tiny("qwen3_5"), **arguments)
        return
    for family in ("nemotron_h", "qwen3_5"):
        with pytest.raises(ValueError, match="needs a model with one MTP layer"):
            generate(tiny(family), **arguments)


@pytest.mark.core
def test_attention_models_are_left_alone() -> None:
    """Same tokens, and the very object that transformers returns, with the patches on and off."""
    target, assistant = tiny_llama(), never_unsure(perturbed(tiny_llama(), 0.05))
    arguments = LOOKUP | {"return_dict_in_generate": True, "output_scores": True}
    for drafter in ({}, {"prompt_lookup_num_tokens": None, "assistant_model": assistant}):
        outputs = [target.generate(**prompt(1, 9), **arguments | drafter)]
        with rt.enable():
            outputs.append(target.generate(**prompt(1, 9), **arguments | drafter))
        off, on = outputs
        assert torch.equal(off.sequences, on.sequences)
        assert all(torch.equal(a, b) for a, b in zip(off.scores, on.scores, strict=True))
        assert type(off[CACHE_ARGUMENT]) is type(on[CACHE_ARGUMENT]) is transformers.DynamicCache


@pytest.mark.usefixtures("enabled")
def test_memory_does_not_grow_over_assisted_calls() -> None:
    """Caches of the target and of its assistant go back to the pool."""
    import gc

    model = tiny("qwen3_5")
    assistant, counts = never_unsure(perturbed(model, 0.05)), []
    for _ in range(4):
        generate(model, assistant_model=assistant, prompt_lookup_num_tokens=None, **REPLAY)
        counts.append(sum(type(thing) is rt.ReplayCache for thing in gc.get_objects()))
    assert counts[1:] == counts[:1] * 3
