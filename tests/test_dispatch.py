"""Models under accelerate's hooks on the CPU: weights that wait elsewhere, maps, quantised and adapted layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from torch import nn

import replay_transformers as rt
from replay_transformers.patches.mtp import last_device
from tests.support import mtp
from tests.support.batches import observed
from tests.support.dispatch import (
    CALLS,
    MODELS,
    assert_same,
    assistant_for,
    device_map,
    gathered,
    generated,
    inputs,
    session,
    splits,
)
from tests.support.generation import CACHE_ARGUMENT, returned_cache
from tests.support.models import prompt
from tests.support.snapshots import tensors
from tests.support.speculation import never_unsure

FAMILIES = ["qwen3_5", "nemotron_h"]
CPU = torch.device("cpu")
IMPLEMENTATIONS = ["replay", "replay_static"]


def offloaded(model: Any, how: str, folder: Path, buffers: bool = False) -> Any:
    """The model, whose weights come to the CPU for the length of a layer's forward only."""
    count = model.config.num_hidden_layers
    if how == "cpu":
        accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=buffers)
    elif how == "disk":
        accelerate.disk_offload(model, folder, execution_device=CPU, offload_buffers=buffers)
    elif how == "one layer":
        accelerate.cpu_offload(model.model.layers[1], execution_device=CPU, offload_buffers=buffers)
    else:
        places = [("cpu", "disk")[place] for place in splits(count)[how]]
        places = device_map(model, places, "cpu", "disk" if how == "last" else "cpu")
        accelerate.dispatch_model(model, places, offload_dir=folder, offload_buffers=buffers)
    return model


HOW = ["cpu", "disk", "one layer", *splits(4)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", MODELS)
def test_offloaded_weights(family: str, how: str, tmp_path: Path) -> None:
    """All, some, between and inside runs of state-space layers: a session with rollbacks, and generate."""
    model = MODELS[family]()
    with rt.enable():
        truth, _ = session(model)
        greedy = generated(model, "greedy", 3)
    buffers = how in ("disk", "to and fro")
    if how in ("cpu", "last"):  # before the hooks, which then find the patched forward
        rt.enable()
    try:
        offloaded(model, how, tmp_path, buffers)
        assert any(parameter.is_meta for parameter in model.parameters())
        with rt.enable():
            assert torch.equal(generated(model, "greedy", 3), greedy)
            got, cache = session(model)
            assert_same(got, truth)
            assert {tensor.device for tensor in tensors(cache).values()} == {CPU}
    finally:
        rt.disable()
    stock = model.generate(**inputs(3), max_new_tokens=12, do_sample=False)
    assert torch.equal(stock, greedy)


@pytest.mark.parametrize(
    ("implementation", "order", "how"),
    [
        ("replay", "enabled first", "inside a run"),
        ("replay", "hooks first", "cpu"),
        ("replay_static", "hooks first", "inside a run"),
        ("replay_static", "enabled first", "disk"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_call(
    family: str, implementation: str, order: str, how: str, enabled: None, tmp_path: Path
) -> None:
    """With a model and an assistant that are both offloaded, for one prompt and a padded batch."""
    model = MODELS[family]()
    assistant, settings = assistant_for(model), {"cache_implementation": implementation}
    wanted = [(name, rows) for name in CALLS for rows in (1, 3)]
    truths = [generated(model, name, rows, assistant, **settings) for name, rows in wanted]
    if order == "hooks first":
        rt.disable()
    offloaded(model, how, tmp_path / "target")
    offloaded(assistant, "last", tmp_path / "assistant")
    rt.enable()
    for (name, rows), truth in zip(wanted, truths, strict=True):
        assert torch.equal(generated(model, name, rows, assistant, **settings), truth), name


@mtp.NEEDS_MTP
@pytest.mark.parametrize("how", ["cpu", "last"])
@pytest.mark.parametrize("family", list(mtp.MODELS))
def test_multi_token_prediction(family: str, how: str, enabled: None, tmp_path: Path) -> None:
    """The head is not offloaded: it is where the model's last layer computes."""
    model = offloaded(copy.deepcopy(mtp.MODELS[family]()), how, tmp_path)
    settings = {"use_mtp": True, "num_assistant_tokens": 3, "max_new_tokens": mtp.STEPS, "do_sample": False}
    settings |= {"cache_config": {"draft_length": "fixed"}}
    for implementation in IMPLEMENTATIONS:
        with observed(model) as rounds:
            output = model.generate(**mtp.inputs(family, 3), **settings, cache_implementation=implementation)
        assert torch.equal(output, mtp.truth(family)[:3])
        assert max(rounds.accepted()) >= 2
    for module in model.get_decoder().layers[-1].modules():
        if hasattr(module, "_hf_hook"):
            add_hook_to_module(module, ModelHook(), append=True)
    assert last_device(model) == CPU


@pytest.mark.parametrize("precision", [{"readout": "fp8"}, {"checkpoint": "fp8_sr"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_maps_of_from_pretrained(family: str, precision: dict[str, str], enabled: None, tmp_path: Path) -> None:
    MODELS[family]().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = load(tmp_path)
    truth, _ = session(plain, **precision)
    settings: dict[str, Any] = {"cache_config": {"window": 4, **precision}}
    greedy = generated(plain, "greedy", 3, **settings)
    count = plain.config.num_hidden_layers
    by_hand = [
        device_map(plain, [("cpu", "disk")[place] for place in split], "cpu", "cpu") for split in splits(count).values()
    ]
    for places in ({"": "cpu"}, *by_hand):
        model = load(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
        assert any(parameter.is_meta for parameter in model.parameters()) == (len(places) > 1)
        assert torch.equal(generated(model, "greedy", 3, **settings), greedy)
        assert_same(session(model, **precision)[0], truth)


@pytest.mark.parametrize("family", MODELS)
def test_hooks_that_come_and_go_between_two_turns(family: str, enabled: None, tmp_path: Path) -> None:
    """A cache goes on: the weights are elsewhere, the layers run where they ran."""
    model, ids = MODELS[family](), prompt(2, 30)["input_ids"]
    with torch.no_grad():
        truth = model(input_ids=ids, use_cache=False).logits
        for max_cache_len in (None, 64):
            cache, found = rt.ReplayCache(model.config, max_cache_len=max_cache_len), []
            for turn, how in enumerate(["", "cpu", "to and fro", "disk", ""]):
                used = copy.deepcopy(model)
                if how:
                    offloaded(used, how, tmp_path / f"{max_cache_len} {turn}")
                found.append(used(input_ids=ids[:, 6 * turn : 6 * turn + 6], **{CACHE_ARGUMENT: cache}).logits)
            assert_same([torch.cat(found, dim=1)], [truth])
            again = gathered(offloaded(copy.deepcopy(model), "one layer", tmp_path))
            cache.reset()
            assert_same([again(input_ids=ids, **{CACHE_ARGUMENT: cache}).logits], [truth])


def test_a_dispatched_model_is_not_moved_away_from_its_cache(enabled: None, tmp_path: Path) -> None:
    """accelerate refuses to move it; the cache stays usable."""
    model = offloaded(MODELS["qwen3_5"](), "inside a run", tmp_path)
    cache, ids = rt.ReplayCache(model.config), prompt(2, 12)["input_ids"]
    with torch.no_grad():
        truth = model(input_ids=ids, use_cache=False).logits
        model(input_ids=ids[:, :9], **{CACHE_ARGUMENT: cache})
        with pytest.raises(RuntimeError, match="move a model"):
            model.to("cpu")
        assert_same([model(input_ids=ids[:, 9:], **{CACHE_ARGUMENT: cache}).logits], [truth[:, 9:]])


@pytest.mark.parametrize("max_cache_len", [None, 64])
def test_hooks_hand_the_cache_on(max_cache_len: int | None, enabled: None) -> None:
    """accelerate moves whatever has a method `to`, and rebuilds lists, tuples and mappings."""
    model = MODELS["nemotron_h"]()
    _, cache = session(model, max_cache_len=max_cache_len)
    things = (cache, cache.cursor, cache.replay_config, *cache.layers)
    for thing in things:
        assert not hasattr(thing, "to")
    held = tensors(cache)
    sent = send_to_device({"args": (cache, [cache]), "cache": cache}, torch.device("meta"))
    assert sent["cache"] is cache
    assert sent["args"][0] is cache
    assert sent["args"][1][0] is cache
    assert all(tensor is held[name] for name, tensor in tensors(cache).items())
    assert not any(tensor.is_meta for tensor in held.values())


class Int8Linear(nn.Module):
    """Like bitsandbytes' Linear8bitLt: int8 weights and a scale per row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype) * self.scale.to(inputs.dtype), self.bias)


class PackedLinear(nn.Module):
    """Like bitsandbytes' Linear4bit: two values to a byte in one column, the shape known to nobody else."""

    name = "weight"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        wide = linear.weight.detach()
        self.shape, self.scale = wide.shape, float(wide.abs().max() / 7)
        codes = ((wide / self.scale).round() + 8).to(torch.uint8).flatten()
        codes = torch.cat([codes, codes.new_zeros(len(codes) % 2)])
        packed = nn.Parameter((codes[::2] | codes[1::2] << 4)[:, None], requires_grad=False)
        self.register_parameter(self.name, packed)
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        packed = getattr(self, self.name)
        codes = torch.cat([packed & 15, packed >> 4], dim=1).flatten()[: self.shape.numel()]
        return nn.functional.linear(inputs, (codes.view(self.shape).to(inputs.dtype) - 8) * self.scale, self.bias)


class NamelessLinear(PackedLinear):
    """No attribute `weight` at all, as in layers of GPTQ and AWQ."""

    name = "qweight"


def quantised(model: Any, kind: type[nn.Module]) -> Any:
    """The model with every linear layer but the last one replaced."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, kind(module))
    assert sum(isinstance(module, nn.Linear) for module in model.modules()) == 1
    return model


@pytest.mark.parametrize("kind", [Int8Linear, PackedLinear, NamelessLinear])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_weights(family: str, kind: type[nn.Module], enabled: None, tmp_path: Path) -> None:
    """Projections are called as modules: nobody asks for the dtype, shape or existence of a weight."""
    plain = MODELS[family]()
    model = quantised(copy.deepcopy(plain), kind)
    given = inputs(3)
    with torch.no_grad():
        moved = model(**given, use_cache=False).logits - plain(**given, use_cache=False).logits
    assert moved.abs().max() > 1e-3, "the stand-in does not round"
    stock = model.generate(**given, max_new_tokens=12, do_sample=False)
    assistant = never_unsure(copy.deepcopy(model))
    for implementation in IMPLEMENTATIONS:
        for name in ("greedy", "lookup", "assistant"):
            got = generated(model, name, 3, assistant, cache_implementation=implementation)
            assert torch.equal(got, stock), name
    truth, _ = session(model)
    offloaded(model, "inside a run", tmp_path)
    assert torch.equal(generated(model, "greedy", 3), stock)
    assert_same(session(model)[0], truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_offloaded_layers(family: str, enabled: None, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    names = ["in_proj"] if family == "nemotron_h" else ["in_proj_qkv", "in_proj_b", "out_proj"]
    settings = peft.LoraConfig(target_modules=names, init_lora_weights=False)
    model = peft.get_peft_model(MODELS[family](), settings).eval()
    stock = model.generate(**inputs(3), max_new_tokens=12, do_sample=False)
    with model.disable_adapter():
        assert not torch.equal(model.generate(**inputs(3), max_new_tokens=12, do_sample=False), stock)
    assert torch.equal(generated(model, "greedy", 3), stock)
    accelerate.cpu_offload(model.base_model.model.model.layers[0], execution_device=CPU)
    accelerate.cpu_offload(model.base_model.model.model.layers[-1], execution_device=CPU)
    assert torch.equal(generated(model, "greedy", 3), stock)


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_caches_that_are_offloaded_are_left_alone(family: str, name: str) -> None:
    """Users who ask for one get transformers' own, whatever that does on this machine."""
    model = MODELS[family]()

    def outcome() -> str:
        try:
            output = model.generate(
                **inputs(1), max_new_tokens=4, do_sample=False, cache_implementation=name, return_dict_in_generate=True
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"{type(returned_cache(output)).__name__}: {output.sequences.tolist()}"

    stock = outcome()
    with rt.enable(default=True):
        assert outcome() == stock
    assert "Replay" not in stock


def test_a_replay_cache_is_not_offloaded(enabled: None) -> None:
    """Whole caches refuse; their layers, of every kind, stay where they are."""
    model = MODELS["nemotron_h"]()
    for max_cache_len in (None, 64):
        truth, _ = session(model, max_cache_len=max_cache_len)
        _, cache = session(model, max_cache_len=max_cache_len)
        assert not cache.offloading
        for action in (cache.offload, cache.prefetch):
            with pytest.raises(NotImplementedError, match=r'stays on the devices.*"offloaded"'):
                action(0)
        before = tensors(cache)
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        assert all(tensor is before[name] for name, tensor in tensors(cache).items())
        assert_same([cache.state(0)], [truth[-3]])
