"""Heads for multi-token prediction: how they are found in checkpoints, kept, and refused."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import replay_transformers as rt
from tests.support import models
from tests.support.batches import observed
from tests.support.mtp import (
    MODELS,
    NEEDS_MTP,
    random_nemotron_h_head,
    released,
    sample_qwen3_5,
    with_head,
)

pytestmark = [
    pytest.mark.usefixtures("enabled"),
    NEEDS_MTP,
]

EVERY_FAMILY = pytest.mark.parametrize("family", list(MODELS))


def head_of(model: Any) -> Any:
    """The head of a model."""
    return importlib.import_module("replay_transformers.patches.mtp").head_of(model)


def build_nemotron_h(**overrides: Any) -> Any:
    """A tiny model that says it has a head."""
    return models.build_nemotron_h("M*", num_nextn_predict_layers=1, **overrides)


def generate(model: Any, **arguments: Any) -> torch.Tensor:
    """A few greedy tokens behind a padded batch."""
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "replay", "use_mtp": True}
    return model.generate(**models.prompt(3, 9, [0, 2, 5]), **(settings | arguments))


def assert_greedy(model: Any) -> None:
    """The head's drafts change no token."""
    given = models.prompt(3, 9, [0, 2, 5])
    with observed(model) as rounds:
        output = generate(model, cache_config={"draft_length": "fixed"})
    assert torch.equal(output, models.greedy_without_cache(model, given["input_ids"], given["attention_mask"], 6))
    rounds.check(accepting=0)


@EVERY_FAMILY
def test_a_head_is_built_once(family: str) -> None:
    model = MODELS[family]()
    head = head_of(model)
    assert head_of(model) is head
    other = copy.deepcopy(model)
    assert head_of(other) is not head
    assert head_of(model) is head
    other.set_attn_implementation("eager")
    assert head_of(other).implementation == "eager"
    other.to(torch.bfloat16)
    assert head_of(other).dtype == next(head_of(other).layers.parameters()).dtype == torch.bfloat16
    assert head.dtype == next(head.layers.parameters()).dtype == torch.float32


@EVERY_FAMILY
def test_a_head_goes_with_its_model(family: str) -> None:
    model = copy.deepcopy(MODELS[family]())
    head, layers = weakref.ref(head_of(model)), weakref.ref(head_of(model).layers)
    del model
    gc.collect()
    assert head() is None
    assert layers() is None


def test_disabling_frees_heads() -> None:
    model = MODELS["nemotron_h"]()
    head = weakref.ref(head_of(model))
    rt.disable()
    gc.collect()
    assert head() is None


@pytest.mark.parametrize("latent", [None, 16])
@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp."])
def test_nemotron_h_from_a_sharded_checkpoint(latent: int | None, prefix: str, tmp_path: Path) -> None:
    """As released: experts one by one, next to the model's own weights."""
    model = build_nemotron_h(moe_latent_size=latent, mtp_layers_block_type=["attention", "moe"])
    weights = {
        name.replace("mtp.", prefix, 1): value for name, value in released(random_nemotron_h_head(model).layers).items()
    }
    model.save_pretrained(tmp_path)
    own = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {
        "model-00001-of-00003.safetensors": own,
        "model-00002-of-00003.safetensors": {name: weights[name] for name in names[:5]},
        "model-00003-of-00003.safetensors": {name: weights[name] for name in names[5:]},
    }
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for file, tensors in shards.items():
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    got = released(head_of(loaded).layers)
    assert got.keys() == {name.replace(prefix, "mtp.", 1) for name in weights}
    for name, value in weights.items():
        assert torch.equal(got[name.replace(prefix, "mtp.", 1)], value)
    for module in loaded.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    assert_greedy(loaded)


def test_nemotron_h_keeps_its_router_in_float32() -> None:
    model = build_nemotron_h()
    with_head(model, released(random_nemotron_h_head(model).layers))
    head = head_of(model.to(torch.bfloat16))
    for name, value in head.layers.state_dict().items():
        is_router = "gate.weight" in name or "e_score_correction_bias" in name
        assert value.dtype == (torch.float32 if is_router else torch.bfloat16), name
    assert generate(model).shape == (3, 15)


@pytest.mark.parametrize("kinds", [["moe", "attention"], ["attention", "mlp", "attention"], ["attention"]], ids=str)
def test_nemotron_h_with_other_blocks(kinds: list[str]) -> None:
    model = build_nemotron_h(mtp_layers_block_type=kinds)
    with_head(model, released(random_nemotron_h_head(model).layers))
    assert_greedy(model)


@pytest.mark.parametrize("fused", [True, False])
def test_qwen3_5_with_experts(fused: bool) -> None:
    """Released checkpoints have the experts of the head in two tensors, quantised ones one by one."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    model = models.build_qwen3_5_moe(layer_types=kinds, mtp_num_hidden_layers=1, rms_norm_eps=1e-3, dtype="float32")
    weights = qwen3_5_moe_head(model)
    stored = dict(weights)
    if not fused:
        gate_up = stored.pop("mtp.layers.0.mlp.experts.gate_up_proj")
        down = stored.pop("mtp.layers.0.mlp.experts.down_proj")
        for expert in range(gate_up.shape[0]):
            name = f"mtp.layers.0.mlp.experts.{expert}"
            gate, up = gate_up[expert].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[expert]}
            stored |= {f"{name}.{part}.weight": value for part, value in parts.items()}
    with_head(model, stored)
    experts = head_of(model).layers[0].mtp_block.mlp.experts
    assert torch.equal(experts.gate_up_proj, weights["mtp.layers.0.mlp.experts.gate_up_proj"])
    assert torch.equal(experts.down_proj, weights["mtp.layers.0.mlp.experts.down_proj"])
    assert_greedy(model)


def test_experts_for_few_tokens() -> None:
    """As transformers does it for a model; the head's configuration is a copy of the model's."""
    head = head_of(MODELS["nemotron_h"]())
    mixers = [block.mixer for block in head.layers if block.block_type == "moe"]
    assert mixers
    assert all(mixer.experts.config is head.config for mixer in mixers)
    usual, device = head.config._experts_implementation, head.device
    assert usual == "grouped_mm"
    try:
        for kind, few in (("cpu", usual), ("cuda", "batched_mm")):
            head.device = torch.device(kind)
            with head._experts_for_few_tokens():
                assert head.config._experts_implementation == few
            assert head.config._experts_implementation == usual
    finally:
        head.device = device


def qwen3_5_moe_head(model: Any) -> dict[str, torch.Tensor]:
    """Random weights under the names of released checkpoints."""
    from transformers.modeling_layers import MtpModel

    from replay_transformers.patches.drafts import mtp_named_as_transformers_does

    with mtp_named_as_transformers_does(model):
        layer = MtpModel(model, 1).layers[0]
    models.make_state_matter(layer)
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    names["mtp_block"] = "layers.0"
    weights = {}
    for name, value in layer.state_dict().items():
        first, rest = name.split(".", 1)
        weights[f"mtp.{names[first]}.{rest}"] = value
    return weights


def test_heads_that_are_missing() -> None:
    model = build_nemotron_h()
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        generate(model)
    model.config.name_or_path = "/nowhere"
    with pytest.raises(ValueError, match=r"no weights mtp\.\* in safetensors can be read"):
        generate(model)
    weights = released(random_nemotron_h_head(model).layers)
    expert = "mtp.layers.1.mixer.experts.2.up_proj.weight"
    for changed, message in (
        ({"lm_head.weight": torch.zeros(1)}, r"has no weights mtp\.\*"),
        ({name: value for name, value in weights.items() if name != expert}, "not complete.* no .*experts.up_proj"),
        (weights | {"mtp.layers.0.enorm.weight": torch.ones(3)}, r"no mtp.layers.0.enorm.weight of shape \(32,\)"),
    ):
        with_head(model, changed)
        with pytest.raises(ValueError, match=message):
            generate(model)
    with_head(model, weights | {expert: weights[expert].to(torch.float8_e4m3fn)})
    with pytest.raises(NotImplementedError, match=r"experts\.2\.up_proj\.weight .* is quantised"):
        generate(model)
    with_head(model, weights)
    assert_greedy(model)


def test_qwen3_5_without_a_whole_head() -> None:
    model = models.build_qwen3_5(["linear_attention", "full_attention"], mtp_num_hidden_layers=1)
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        generate(model)
    stored = load_file(Path(sample_qwen3_5().config.name_or_path) / "model.safetensors")
    model = copy.deepcopy(sample_qwen3_5())
    with_head(model, {name: value for name, value in stored.items() if name != "mtp.fc.weight"})
    with pytest.raises(ValueError, match="not complete"):
        generate(model)
    assert not hasattr(model.config, "num_mtp_layers")


def test_heads_that_are_not_supported() -> None:
    with pytest.raises(NotImplementedError, match=r"block_type=\['linear_attention', 'moe'\] is not supported"):
        generate(build_nemotron_h(mtp_layers_block_type=["mamba", "moe"]))
    with pytest.raises(NotImplementedError, match="last layer is full_attention"):
        generate(models.build_qwen3_5(mtp_num_hidden_layers=1))
    with pytest.raises(NotImplementedError, match="use_mtp is not supported for Qwen3NextForCausalLM"):
        generate(models.build_qwen3_next())
    with pytest.raises(ValueError, match="needs a model with one MTP layer"):
        generate(models.build_nemotron_h("M*"))
    arguments = {"use_mtp": True, "cache_implementation": "replay", "max_new_tokens": 2}
    with pytest.raises(NotImplementedError, match="output_hidden_states is not supported with use_mtp"):
        MODELS["nemotron_h"]().generate(
            **models.prompt(1, 4), **arguments, return_dict_in_generate=True, output_hidden_states=True
        )
