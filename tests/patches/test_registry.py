"""Switching the patches on and off, and what is patched."""

import copy
import importlib
import types
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers.generation import configuration_utils

import replay_transformers as rt
from replay_transformers.patches import registry, versions
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import ALL_FAMILIES, FAMILIES, greedy_without_cache, prompt

REPLAY = {"cache_implementation": "replay", "cache_config": {"window": 3}, "do_sample": False, "max_new_tokens": 12}


def _snapshot() -> dict[tuple[int, str], Any]:
    """Every attribute `enable` may replace, by identity of its value."""
    with rt.enable():
        attributes = registry.patched_attributes()
    assert not registry.patched_attributes()
    return {(id(owner), name): vars(owner).get(name) for owner, name in attributes}


@pytest.mark.core
def test_disable_restores_every_attribute() -> None:
    before = _snapshot()
    assert len(before) >= 4 + 4 + 4 + 2 + 3  # mixers, decoders, attention, generate and its cache preparation, names
    rt.enable()
    with rt.enable():
        rt.enable(default=True)
    assert rt.is_enabled(), "leaving an inner with that found the patches on leaves them on"
    rt.disable()
    assert not rt.is_enabled()
    after = _snapshot()
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] for key in before)
    rt.disable()  # a second time does nothing


def test_enable_is_idempotent_and_handles_undo_it() -> None:
    handle = rt.enable()
    forward = vars(registry_class("Qwen3_5GatedDeltaNet"))["forward"]
    rt.enable()
    assert vars(registry_class("Qwen3_5GatedDeltaNet"))["forward"] is forward
    handle.disable()
    assert not rt.is_enabled()
    assert vars(registry_class("Qwen3_5GatedDeltaNet"))["forward"] is not forward


def registry_class(name: str) -> type:
    for module_name, class_name in registry.MIXERS:
        if class_name == name:
            return getattr(__import__(f"transformers.models.{module_name}", fromlist=[name]), name)
    raise KeyError(name)


def test_with_disables_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="inside"), rt.enable():
        raise RuntimeError("inside")
    assert not rt.is_enabled()


@pytest.mark.core
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_stock_caches_are_bit_identical_with_the_patches_on(family: str) -> None:
    model, inputs = ALL_FAMILIES[family](), prompt(2, 9, [0, 4])

    def run() -> list[torch.Tensor]:
        outputs = []
        for implementation in (None, "static"):
            result = model.generate(
                **inputs,
                max_new_tokens=12,
                do_sample=False,
                cache_implementation=implementation,
                return_dict_in_generate=True,
                output_logits=True,
            )
            outputs.append(torch.stack(result.logits))
        with torch.no_grad():
            outputs.append(model(**inputs, use_cache=False).logits)
        return outputs

    before = run()
    with rt.enable():
        during = run()
    after = run()
    for a, b, c in zip(before, during, after, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_made_and_loaded_before_and_after_enable(family: str, tmp_path: Path) -> None:
    before = FAMILIES[family]()
    before.save_pretrained(tmp_path)
    loaded_before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = prompt(1, 6)
    with rt.enable():
        loaded_after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        outputs = [model.generate(**inputs, **REPLAY) for model in (loaded_before, loaded_after)]
    truth = greedy_without_cache(loaded_before, inputs["input_ids"], inputs["attention_mask"], 12)
    assert all(torch.equal(output, truth) for output in outputs)


@pytest.mark.parametrize("hook_first", [True, False], ids=["hooks-then-enable", "enable-then-hooks"])
def test_accelerate_hooks_on_either_side_of_enable(hook_first: bool) -> None:
    model, inputs = FAMILIES["nemotron_h"](), prompt(1, 6)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    mixer = model.model.layers[0].mixer
    original = type(mixer).forward

    def hook() -> None:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))

    if hook_first:
        hook()
    with rt.enable():
        if not hook_first:
            hook()
        assert torch.equal(model.generate(**inputs, **REPLAY), truth)
    assert mixer._old_forward.__func__ is original
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), truth)


def test_a_forward_set_on_the_instance_is_used_for_other_caches_only() -> None:
    """As hub kernels do it."""
    model, inputs = FAMILIES["qwen3_5"](), prompt(1, 6)
    mixer = model.model.layers[0].linear_attn
    calls = []

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(self).forward(self, *args, **kwargs)

    mixer.forward = types.MethodType(own, mixer)
    bound = mixer.forward
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    with rt.enable():
        calls.clear()
        assert torch.equal(model.generate(**inputs, **REPLAY), truth)
        assert not calls
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), truth)
        assert calls
    assert mixer.__dict__["forward"] == bound


def test_copies_of_a_model_with_forwards_of_its_own() -> None:
    """A deep copy made after a replay call runs on its own weights."""
    model, inputs = FAMILIES["qwen3_5"](), prompt(1, 6)
    mixer = model.model.layers[0].linear_attn
    mixer.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), mixer)
    with rt.enable():
        model.generate(**inputs, **REPLAY)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.model.layers[0].parameters():
                parameter.mul_(1.3)
        truth = greedy_without_cache(twin, inputs["input_ids"], inputs["attention_mask"], 12)
        assert torch.equal(twin.generate(**inputs, **REPLAY), truth)
    assert torch.equal(twin.generate(**inputs, max_new_tokens=12, do_sample=False), truth)
    fresh = FAMILIES["qwen3_5"]()
    fresh.load_state_dict(twin.state_dict())
    assert torch.equal(fresh.generate(**inputs, max_new_tokens=12, do_sample=False), truth)


def test_the_users_cache_on_a_model_that_was_hooked_first() -> None:
    model, inputs = FAMILIES["nemotron_h"](), prompt(1, 6)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    cache = rt.ReplayCache(model.config)
    with rt.enable():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False, **{CACHE_ARGUMENT: cache})
    assert torch.equal(output, truth)


def test_copies_and_removed_hooks_know_when_the_patches_are_off() -> None:
    """They hold the patched forwards, which nobody finds any more to put the original back."""
    cache_of, inputs = (lambda model: {CACHE_ARGUMENT: rt.ReplayCache(model.config)}), prompt(2, 6)
    models = {"hooks removed": FAMILIES["nemotron_h"](), "hooks kept": FAMILIES["nemotron_h"]()}
    with rt.enable():
        for model in models.values():
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
            model.generate(**inputs, max_new_tokens=2, do_sample=False, cache_implementation="replay")
        accelerate.hooks.remove_hook_from_module(models["hooks removed"], recurse=True)
        models |= {f"copy, {name}": copy.deepcopy(model) for name, model in models.items()}
        for model in models.values():
            model(**inputs, **cache_of(model))
    for name, model in models.items():
        with torch.no_grad(), pytest.raises(ValueError, match="is not patched: call"):
            model(**inputs, **cache_of(model))
        assert model.generate(**inputs, max_new_tokens=2, do_sample=False).shape == (2, 8), name
    mixer = models["hooks removed"].model.layers[0].mixer
    assert "forward" not in vars(mixer)


def test_nothing_outside_the_list_is_replaced() -> None:
    """An independent look: every attribute of the modules and classes around, not only what `enable` says it did."""
    owners = [
        configuration_utils,
        transformers.generation.utils,
        transformers.cache_utils,
        transformers.GenerationMixin,
        transformers.PreTrainedModel,
    ]
    if hasattr(transformers.generation.utils, "DeferredStopCheck"):
        owners.append(transformers.generation.utils.DeferredStopCheck)
    for module_name, class_name in (*registry.MIXERS, *registry.DECODERS):
        module = importlib.import_module(f"transformers.models.{module_name}")
        classes = [base for base in getattr(module, class_name).__mro__ if base.__module__ == module.__name__]
        owners += [owner for owner in (module, *classes) if owner not in owners]
    before = [dict(vars(owner)) for owner in owners]
    with rt.enable(default=True):
        changed = sum(vars(o).get(k) is not v for o, held in zip(owners, before, strict=True) for k, v in held.items())
        assert changed == len(registry.patched_attributes())
    for owner, held in zip(owners, before, strict=True):
        assert vars(owner).keys() == held.keys()
        assert all(vars(owner)[name] is value for name, value in held.items()), owner


@pytest.mark.core
def test_default_applies_where_the_call_asks_for_nothing_else() -> None:
    model, inputs = FAMILIES["qwen3_5"](), prompt(1, 5)
    arguments = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    with rt.enable(default=True):
        assert isinstance(model.generate(**inputs, **arguments)[CACHE_ARGUMENT], rt.ReplayCache)
        static = model.generate(**inputs, **arguments, cache_implementation="static")
        assert isinstance(static[CACHE_ARGUMENT], transformers.StaticCache)
        own = transformers.DynamicCache(config=model.config)
        assert model.generate(**inputs, **arguments, **{CACHE_ARGUMENT: own})[CACHE_ARGUMENT] is own
        assert model.generate(**inputs, **arguments, use_cache=False).get(CACHE_ARGUMENT) is None
        with rt.enable(default=False):
            assert not isinstance(model.generate(**inputs, **arguments)[CACHE_ARGUMENT], rt.ReplayCache)
        assert isinstance(model.generate(**inputs, **arguments)[CACHE_ARGUMENT], rt.ReplayCache)
    with rt.enable():
        assert not isinstance(model.generate(**inputs, **arguments)[CACHE_ARGUMENT], rt.ReplayCache)


def test_default_leaves_other_models_alone_and_is_never_saved(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    other, inputs = transformers.LlamaForCausalLM(config).eval(), prompt(1, 5)
    stock = other.generate(**inputs, max_new_tokens=4, do_sample=False)
    model = FAMILIES["qwen3_5"]()
    with rt.enable(default=True):
        assert torch.equal(other.generate(**inputs, max_new_tokens=4, do_sample=False), stock)
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
        model.save_pretrained(tmp_path)
    assert "replay" not in (tmp_path / "generation_config.json").read_text()
    assert "replay" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("version", ["5.16.1", "5.25.0", "4.57.6"])
def test_unsupported_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # not the test's own `transformers`: importing a module of its models by name may put another object in its place
    monkeypatch.setattr(versions.transformers, "__version__", version)
    with pytest.raises(NotImplementedError, match=rf"5\.17\.0 to 5\.24.*found {version}"):
        rt.enable()
    assert not rt.is_enabled()


def test_without_enable_the_names_are_unknown_to_transformers() -> None:
    model, inputs = FAMILIES["qwen3_5"](), prompt(1, 5)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(**inputs, max_new_tokens=2, cache_implementation="replay")
    assert "replay" not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS


def test_an_unpatched_layer_fails_loudly() -> None:
    model = FAMILIES["nemotron_h"]()
    cache = rt.ReplayCache(model.config)
    with pytest.raises(ValueError, match=r"call replay_transformers\.enable"), torch.no_grad():
        model(**prompt(1, 5), **{CACHE_ARGUMENT: cache})


def test_every_mixer_comes_with_its_decoder() -> None:
    """Without the decoder in the table the refusals before the first layer would be skipped silently."""
    assert {module for module, _ in registry.MIXERS} == {module for module, _ in registry.DECODERS}
