"""Caches of `generate`: reused, never shared, never kept longer than they should be."""

import gc
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support.generation import CACHE_ARGUMENT, returned_cache
from tests.support.models import FAMILIES, build_nemotron_h, build_qwen3_5, greedy_without_cache, prompt

pytestmark = pytest.mark.usefixtures("enabled")


def _arguments(implementation: str = "replay", **more: Any) -> dict[str, Any]:
    settings = {"max_new_tokens": 10, "do_sample": False, "cache_config": {"window": 4}}
    return settings | {"cache_implementation": implementation} | more


def _record_caches(model: Any) -> list[Any]:
    """Weak references to the caches the model's forwards get, in order of first use."""
    seen: list[Any] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs.get(CACHE_ARGUMENT)
        if cache is not None and not any(reference() is cache for reference in seen):
            seen.append(weakref.ref(cache))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
def test_a_second_call_of_the_same_shape_reuses_the_memory(implementation: str) -> None:
    model, inputs = build_qwen3_5(), prompt(2, 9, [0, 4])
    seen = _record_caches(model)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 10)
    assert torch.equal(model.generate(**inputs, **_arguments(implementation)), truth)
    addresses = _addresses(seen[0]())
    other = prompt(2, 9, [2, 0], seed=5)
    truth = greedy_without_cache(model, other["input_ids"], other["attention_mask"], 10)
    assert torch.equal(model.generate(**other, **_arguments(implementation)), truth)
    assert len(seen) == 1
    assert _addresses(seen[0]()) == addresses


def _addresses(cache: rt.ReplayCache) -> list[int]:
    return [b.data_ptr() for layer in cache.replay_layers for b in layer.buffers().values()]


def test_a_returned_cache_leaves_the_pool() -> None:
    model, inputs = build_qwen3_5(), prompt(1, 6)
    first = returned_cache(model.generate(**inputs, **_arguments(return_dict_in_generate=True)))
    state = first.state(0).clone()
    second = returned_cache(model.generate(**prompt(1, 6, seed=3), **_arguments(return_dict_in_generate=True)))
    assert first is not second
    assert torch.equal(first.state(0), state)


def test_calls_inside_a_call_do_not_share() -> None:
    """A stopping criterion that calls `generate` of the same model and shape in mid-call, with an idle cache there."""
    model, inputs = build_nemotron_h(), prompt(1, 6)
    model.generate(**inputs, **_arguments())
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 10)

    class Nested(transformers.StoppingCriteria):
        inner: ClassVar[list[torch.Tensor]] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] == 10:
                self.inner.append(model.generate(**inputs, **_arguments()))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    output = model.generate(**inputs, **_arguments(), stopping_criteria=[Nested()])
    assert torch.equal(output, truth)
    assert torch.equal(Nested.inner[0], truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_threads_with_a_model_each_and_with_one_model(family: str) -> None:
    models = [FAMILIES[family](seed=seed) for seed in (0, 1)]
    models.append(models[0])
    prompts = [prompt(2, 7, [0, 3], seed=seed) for seed in range(3)]
    pairs = list(zip(models, prompts, strict=True))
    truths = [greedy_without_cache(m, p["input_ids"], p["attention_mask"], 10) for m, p in pairs]
    outputs: dict[int, torch.Tensor] = {}

    def run(index: int) -> None:
        model, inputs = pairs[index]
        for _ in range(3):
            outputs[index] = model.generate(**inputs, **_arguments())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(outputs[index], truths[index]) for index in range(3))


def test_two_models_in_turn() -> None:
    models = [build_qwen3_5(seed=0), build_qwen3_5(seed=1), build_nemotron_h()]
    inputs = prompt(1, 6)
    truths = [greedy_without_cache(m, inputs["input_ids"], inputs["attention_mask"], 10) for m in models]
    for _ in range(2):
        for model, truth in zip(models, truths, strict=True):
            assert torch.equal(model.generate(**inputs, **_arguments()), truth)


class _Interrupt:
    """A forward hook that raises KeyboardInterrupt in the n-th call of a module."""

    def __init__(self, module: torch.nn.Module, call: int) -> None:
        self.remaining = call
        self.handle = module.register_forward_hook(self)

    def __call__(self, *args: Any) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
def test_ctrl_c_in_mid_forward_and_then_another_call(implementation: str) -> None:
    model, inputs = build_qwen3_5(), prompt(1, 6)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 10)
    model.generate(**inputs, **_arguments(implementation))
    for call in (1, 5, 6):
        interrupt = _Interrupt(model.model.layers[1], call)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**inputs, **_arguments(implementation))
        interrupt.handle.remove()
        assert torch.equal(model.generate(**inputs, **_arguments(implementation)), truth)


def test_ctrl_c_with_the_users_cache_is_noticed_and_reset_recovers() -> None:
    model, inputs = build_qwen3_5(), prompt(1, 6)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 10)
    cache = rt.ReplayCache(model.config)
    interrupt = _Interrupt(model.model.layers[1], 4)
    arguments = {"max_new_tokens": 10, "do_sample": False, CACHE_ARGUMENT: cache}
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **arguments)
    interrupt.handle.remove()
    with pytest.raises(ValueError, match="broke off half-way"):
        model.generate(**inputs, **arguments)
    cache.reset()
    assert torch.equal(model.generate(**inputs, **arguments), truth)


def test_weights_updated_in_place_between_calls() -> None:
    """As reinforcement learning does it."""
    for build in FAMILIES.values():
        model, inputs = build(), prompt(2, 6, [0, 2])
        first = model.generate(**inputs, **_arguments())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.3 if name.endswith(("A_log", "dt_bias")) else torch.randn_like(parameter) * 0.05)
        truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 10)
        assert torch.equal(model.generate(**inputs, **_arguments()), truth)
        assert not torch.equal(first, truth)


def test_pooled_caches_go_with_the_model_and_with_disable() -> None:
    model, inputs = build_qwen3_5(), prompt(1, 6)
    seen = _record_caches(model)
    model.generate(**inputs, **_arguments())
    gc.collect()
    assert seen[0]() is not None, "kept for the next call"
    rt.disable()
    gc.collect()
    assert seen[0]() is None
    with rt.enable():
        model.generate(**inputs, **_arguments())
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None
        assert all(cache() is None for cache in seen)


def test_the_pool_keeps_two_shapes_per_model() -> None:
    model = build_qwen3_5()
    seen = _record_caches(model)
    for rows in (1, 2, 3, 4):
        model.generate(**prompt(rows, 6), **_arguments())
    gc.collect()
    assert [cache() is not None for cache in seen] == [False, False, True, True]


def test_memory_does_not_grow_over_calls() -> None:
    model, inputs = build_nemotron_h(), prompt(2, 6)
    counts = []
    for _ in range(12):
        model.generate(**inputs, **_arguments())
        model.generate(**inputs, **_arguments(return_dict_in_generate=True))
        gc.collect()
        counts.append(sum(isinstance(thing, rt.ReplayCache) for thing in gc.get_objects()))
    assert counts[-1] == counts[2]


def _stream(model: Any, input_ids: torch.Tensor, generation_config: Any = None, **kwargs: Any) -> Any:
    """A `custom_generate` that is a generator: `generate` returns before its first forward."""
    cache = kwargs[CACHE_ARGUMENT]
    for _ in range(10):
        with torch.no_grad():
            logits = model(input_ids=input_ids, use_cache=True, **{CACHE_ARGUMENT: cache}).logits
        input_ids = logits[:, -1:].argmax(-1)
        yield int(input_ids)


def test_a_cache_that_is_still_in_use_is_not_handed_out() -> None:
    """By a generator that has yet to run, in a result of another form, or by a hook that kept an output."""
    model, inputs = build_qwen3_5(), prompt(1, 6)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 10)[0, 6:].tolist()
    stream = model.generate(**inputs, **_arguments(), custom_generate=_stream)
    first = next(stream)
    model.generate(**prompt(1, 6, seed=4), **_arguments())
    assert [first, *stream] == truth

    def keep(model: Any, input_ids: torch.Tensor, generation_config: Any = None, **kwargs: Any) -> Any:
        return input_ids, kwargs[CACHE_ARGUMENT]

    caches = [model.generate(**inputs, **_arguments(), custom_generate=keep)[1] for _ in range(2)]
    assert caches[0] is not caches[1]

    kept: list[Any] = []
    hook = model.register_forward_hook(lambda module, args, output: kept.append(output[CACHE_ARGUMENT]))
    model.generate(**inputs, **_arguments())
    hook.remove()
    state = kept[-1].state(0).clone()
    model.generate(**prompt(1, 6, seed=4), **_arguments())
    assert torch.equal(kept[-1].state(0), state)


def test_settings_belong_to_the_call() -> None:
    """An idle cache of other settings, or of the model's former dtype, is not taken."""
    model, inputs = build_nemotron_h(), prompt(1, 6)
    for window in (4, 8, 4):
        model.generate(**inputs, **_arguments(cache_config={"window": window}))
        output = model.generate(**inputs, **_arguments(cache_config={"window": window}, return_dict_in_generate=True))
        assert returned_cache(output).replay_config == rt.ReplayConfig(window=window)
    model.generate(**inputs, **_arguments())
    output = model.bfloat16().generate(**inputs, **_arguments(return_dict_in_generate=True))
    assert returned_cache(output).replay_layers[0].rings["x"].dtype == torch.bfloat16


def test_max_cache_len_sizes_the_fixed_cache() -> None:
    model, inputs = build_qwen3_5(), prompt(1, 6)
    output = model.generate(**inputs, **_arguments("replay_static", max_cache_len=64, return_dict_in_generate=True))
    assert returned_cache(output).max_cache_len == 64
    exact = rt.ReplayCache(model.config, max_cache_len=6 + 10 - 1)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 10)
    assert torch.equal(model.generate(**inputs, max_new_tokens=10, do_sample=False, **{CACHE_ARGUMENT: exact}), truth)


def test_prompts_of_similar_length_share_a_fixed_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """And give what they give alone."""
    model, built, build = build_qwen3_5(), [], rt.ReplayCache.allocate
    monkeypatch.setattr(rt.ReplayCache, "allocate", lambda cache, *rest: built.append(1) or build(cache, *rest))
    for length in (6, 31, 14, 55, 60):
        inputs = prompt(2, length, [0, 3])
        truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 10)
        assert torch.equal(model.generate(**inputs, **_arguments("replay_static", max_new_tokens=10)), truth)
    assert len(built) == 2, "up to 64 tokens, and more"


def test_there_are_never_more_caches_than_the_pool_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has to go goes before the new one is built."""
    model, alive, most = build_qwen3_5(), weakref.WeakSet(), []
    build = rt.ReplayCache.__init__

    def counted(cache: rt.ReplayCache, *args: Any, **more: Any) -> None:
        alive.add(cache)
        most.append(len(alive))
        build(cache, *args, **more)

    monkeypatch.setattr(rt.ReplayCache, "__init__", counted)
    for length in (64, 128, 192, 256, 320):
        model.generate(**prompt(1, 6), **_arguments("replay_static", max_cache_len=length))
    assert most == [1, 2, 2, 2, 2]


def test_an_idle_growing_cache_holds_no_keys() -> None:
    model = build_qwen3_5()
    seen = _record_caches(model)
    model.generate(**prompt(1, 6), **_arguments())
    assert all(layer.keys is None for layer in seen[0]().attention_layers)


def test_an_error_inside_a_call_leaves_the_next_ones_alone() -> None:
    model, inputs = build_qwen3_5(), prompt(1, 6)
    seen = _record_caches(model)
    model.generate(**inputs, **_arguments())
    with pytest.raises(ValueError, match="unknown keys"):
        model.generate(**inputs, **_arguments(cache_config={"windw": 1}))
    model.generate(**inputs, **_arguments())
    assert len(seen) == 1, "the third call takes the cache of the first"
