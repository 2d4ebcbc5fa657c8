"""`generate` with replay caches gives what decoding without a cache gives."""

import copy
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support.generation import CACHE_ARGUMENT, returned_cache
from tests.support.models import ALL_FAMILIES, FAMILIES, assert_state_matters, greedy_without_cache, prompt

pytestmark = pytest.mark.usefixtures("enabled")

STEPS = 16 + 64  # at window 16: a whole window and 64 tokens past its flush


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """One model per family, checked to depend on its state."""
    built = {name: build() for name, build in FAMILIES.items()}
    with rt.enable():
        for model in built.values():
            assert_state_matters(model)
    return built


@pytest.fixture(scope="module")
def truths(models: dict[str, Any]) -> dict[Any, torch.Tensor]:
    """Greedy continuations without a cache, computed once per prompt."""
    return {}


def _truth(truths: dict[Any, torch.Tensor], model: Any, key: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if key not in truths:
        truths[key] = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
    return truths[key]


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_decoding_without_a_cache(
    models: dict[str, Any], truths: dict[Any, torch.Tensor], family: str, window: int, implementation: str
) -> None:
    model = models[family]
    for rows, length, pads in ((1, 1, None), (1, 3, None), (4, window + 4, [0, 1, min(5, window + 3), window + 1])):
        inputs = prompt(rows, length, pads)
        output = model.generate(
            **inputs,
            max_new_tokens=STEPS,
            do_sample=False,
            cache_implementation=implementation,
            cache_config={"window": window},
        )
        assert torch.equal(output, _truth(truths, model, (family, rows, length), inputs))


@pytest.mark.core
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_generates_and_returns_the_cache_asked_for(family: str) -> None:
    model = ALL_FAMILIES[family]()
    inputs = prompt(2, 9, [0, 4])
    output = model.generate(
        **inputs,
        max_new_tokens=24,
        do_sample=False,
        cache_implementation="replay",
        cache_config={"window": 5},
        return_dict_in_generate=True,
    )
    cache = returned_cache(output)
    assert isinstance(cache, rt.ReplayCache)
    assert cache.replay_config == rt.ReplayConfig(window=5)
    assert torch.equal(output.sequences, greedy_without_cache(model, **_named(inputs), steps=24))


def _named(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"ids": inputs["input_ids"], "mask": inputs["attention_mask"]}


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 0.8, "top_k": 20},
        {"do_sample": False, "prefill_chunk_size": 4},
        {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 30},
    ],
    ids=["beams", "beams-returning-2", "sampling-3", "prefill-in-chunks", "penalty"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_modes_equal_the_stock_cache(
    models: dict[str, Any], family: str, settings: dict[str, Any], implementation: str
) -> None:
    inputs = prompt(2, 11, [0, 3])
    outputs = []
    for cache in ({}, {"cache_implementation": implementation, "cache_config": {"window": 5}}):
        torch.manual_seed(7)
        outputs.append(models[family].generate(**inputs, max_new_tokens=40, **settings, **cache))
    assert torch.equal(*outputs)


@pytest.mark.core
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_turns_with_the_returned_cache(models: dict[str, Any], family: str, fixed: bool) -> None:
    """Every turn continues the same cache, and its forwards see only tokens that are not in it yet."""
    model = models[family]
    config = rt.ReplayConfig(window=5)
    cache = rt.ReplayCache(model.config, config, max_cache_len=128 if fixed else None)
    inputs = prompt(2, 9, [0, 4])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for turn in range(3):
        seen: list[int] = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=13,
            do_sample=False,
            return_dict_in_generate=True,
            **{CACHE_ARGUMENT: cache},
        )
        hook.remove()
        assert torch.equal(output.sequences, greedy_without_cache(model, ids, mask, 13))
        assert returned_cache(output) is cache
        assert seen == [ids.shape[1] if turn == 0 else 5 + 1, *[1] * 12]  # 5 new, 1 sampled and not fed last turn
        more = prompt(2, 5, seed=turn + 1)["input_ids"]
        ids = torch.cat([output.sequences, more], dim=1)
        mask = torch.cat([mask, torch.ones(2, 13 + 5, dtype=mask.dtype)], dim=1)


@pytest.mark.parametrize("pattern", ["MM", "M-E"])
def test_continuation_without_any_attention_layer(pattern: str) -> None:
    """Stock caches have no length on such a model; the replay cache counts its tokens itself."""
    model = FAMILIES["nemotron_h"](pattern)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=3))
    inputs = prompt(2, 6)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for _ in range(2):
        output = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=9, do_sample=False, **{CACHE_ARGUMENT: cache}
        )
        assert torch.equal(output, greedy_without_cache(model, ids, mask, 9))
        ids, mask = output, torch.ones_like(output)


@pytest.mark.core
@pytest.mark.parametrize(
    "pattern", ["M", "*M", "M*", "-M*", "EM-*", "*-ME", "MM*M", "ME*M-"], ids=lambda pattern: pattern
)
def test_every_order_of_nemotron_layers(pattern: str) -> None:
    model = FAMILIES["nemotron_h"](pattern)
    inputs = prompt(2, 7, [0, 3])
    for implementation in ("replay", "replay_static"):
        output = model.generate(
            **inputs,
            max_new_tokens=20,
            do_sample=False,
            cache_implementation=implementation,
            cache_config={"window": 4},
        )
        assert torch.equal(output, greedy_without_cache(model, **_named(inputs), steps=20))


@pytest.mark.parametrize("layers", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_window_and_depth_do_not_change_the_tokens(family: str, layers: int) -> None:
    build = FAMILIES[family]
    model = build("M" * layers) if family == "nemotron_h" else build(["linear_attention"] * layers + ["full_attention"])
    inputs = prompt(1, 6)
    truth = greedy_without_cache(model, **_named(inputs), steps=40)
    for window in (1, 2, 3, 7, 16):
        output = model.generate(
            **inputs,
            max_new_tokens=40,
            do_sample=False,
            cache_implementation="replay",
            cache_config={"window": window},
        )
        assert torch.equal(output, truth), f"window {window}"


def test_vision_language_wrapper_with_and_without_an_image() -> None:
    from tests.support.vision import build_vision_language, image_prompt

    model = build_vision_language()
    for inputs in (prompt(2, 9, [0, 4]), image_prompt(model)):
        outputs = [
            model.generate(**copy.deepcopy(inputs), max_new_tokens=24, do_sample=False, **cache)
            for cache in ({}, {"cache_implementation": "replay", "cache_config": {"window": 5}})
        ]
        assert torch.equal(*outputs)


def test_scores_logits_and_hidden_states_come_as_from_stock(models: dict[str, Any]) -> None:
    inputs = prompt(2, 9, [0, 4])
    for model in models.values():
        stock, replay = (
            model.generate(
                **inputs,
                max_new_tokens=20,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                output_hidden_states=True,
                **cache,
            )
            for cache in ({}, {"cache_implementation": "replay", "cache_config": {"window": 5}})
        )
        assert len(replay.scores) == len(replay.logits) == len(replay.hidden_states) == 20
        for a, b in zip(stock.logits, replay.logits, strict=True):
            # two float32 evaluations of the same sums in another order, logits of order 1 to 10
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_streamer_receives_every_token(models: dict[str, Any]) -> None:
    class Collect(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer, inputs = Collect(), prompt(1, 5)
    output = models["qwen3_5"].generate(
        **inputs, max_new_tokens=20, do_sample=False, cache_implementation="replay", streamer=streamer
    )
    assert streamer.ended
    assert streamer.tokens == output[0].tolist()
