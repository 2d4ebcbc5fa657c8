"""What the patched mixers compute before the cache: precision, activations, limits."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import replay_transformers as rt
from replay_transformers.layers import GatedDeltaReplayLayer, Mamba2ReplayLayer
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import build_nemotron_h, build_qwen3_5, cached_forward, full_logits, prompt

pytestmark = pytest.mark.usefixtures("enabled")


def _spy(monkeypatch: pytest.MonkeyPatch, layer_class: Any) -> list[tuple[torch.Tensor, ...]]:
    """The arguments of every `step` of a kind of layer."""
    seen: list[tuple[torch.Tensor, ...]] = []
    original = layer_class.step

    def step(self: Any, *operands: torch.Tensor) -> torch.Tensor:
        seen.append(operands)
        return original(self, *operands)

    monkeypatch.setattr(layer_class, "step", step)
    return seen


def test_mamba2_time_step_and_decay_are_float32_whatever_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """softplus and exp in bfloat16 would cost three digits of every decay."""
    seen = _spy(monkeypatch, Mamba2ReplayLayer)
    model = build_nemotron_h("M").bfloat16()
    mixer = model.model.layers[0].mixer
    raw: list[torch.Tensor] = []
    mixer.in_proj.register_forward_hook(lambda module, args, output: raw.append(output[..., -mixer.num_heads :]))
    cached_forward(model, rt.ReplayCache(model.config), prompt(1, 6)["input_ids"])
    _, dt, _, _, A, _ = seen[0]
    assert (dt.dtype, A.dtype) == (torch.float32, torch.float32)
    assert torch.equal(dt, functional.softplus(raw[0].float() + mixer.dt_bias.float()))
    assert torch.equal(A, -mixer.A_log.float().exp())


def test_gated_delta_decay_is_float32_whatever_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _spy(monkeypatch, GatedDeltaReplayLayer)
    model = build_qwen3_5(["linear_attention"]).bfloat16()
    mixer = model.model.layers[0].linear_attn
    raw: list[torch.Tensor] = []
    mixer.in_proj_a.register_forward_hook(lambda module, args, output: raw.append(output))
    cached_forward(model, rt.ReplayCache(model.config), prompt(1, 6)["input_ids"])
    g = seen[0][3]
    assert g.dtype == torch.float32
    expected = -mixer.A_log.float().exp() * functional.softplus(raw[0].float() + mixer.dt_bias.float())
    assert torch.equal(g, expected)


@pytest.mark.parametrize("limit", [(0.05, float("inf")), (0.0, 0.02), (0.015, 0.03)])
def test_both_ends_of_the_time_step_limit(limit: tuple[float, float]) -> None:
    model = build_nemotron_h("M*M")
    ids = prompt(1, 30)["input_ids"]
    free = full_logits(model, ids)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = limit
    truth = full_logits(model, ids)
    assert (truth - free).abs().max() > 0.05, "the limit must matter"
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4))
    parts = [cached_forward(model, cache, part) for part in ids.split([1, 9, 1, 15, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [build_qwen3_5, build_nemotron_h])
def test_other_activations_of_the_convolution(build: Any) -> None:
    name = "hidden_act" if build is build_qwen3_5 else "mamba_hidden_act"
    model = build(**{name: "gelu"})
    ids = prompt(1, 20)["input_ids"]
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=3))
    parts = [cached_forward(model, cache, part) for part in ids.split([12, 1, 1, 4, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full_logits(model, ids), rtol=1e-4, atol=1e-4)


def test_decay_rates_are_read_at_every_forward() -> None:
    model = build_nemotron_h("M")
    cache = rt.ReplayCache(model.config)
    cached_forward(model, cache, prompt(1, 5)["input_ids"])
    mixer = model.model.layers[0].mixer
    with torch.no_grad():
        mixer.A_log.add_(0.5)
    cached_forward(model, cache, prompt(1, 1)["input_ids"])
    assert torch.equal(cache.replay_layers[0].rate, -mixer.A_log.detach().exp())


def test_fixed_shapes_under_autocast() -> None:
    """Keys may come in float32 (rotary embedding) and values in bfloat16: the buffers follow the first forward."""
    model, inputs = build_qwen3_5(), prompt(2, 9, [0, 3])
    outputs = []
    for cache in ({}, {"cache_implementation": "replay_static", "cache_config": {"window": 4}}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(
                model.generate(
                    **inputs,
                    max_new_tokens=1,
                    return_dict_in_generate=True,
                    output_logits=True,
                    do_sample=False,
                    **cache,
                )
            )
    truth = full_logits(model, inputs["input_ids"], inputs["attention_mask"])[:, -1]
    stock, replay = ((output.logits[0] - truth).square().mean().sqrt() for output in outputs)
    assert replay <= 2 * stock, "bfloat16's noise at a single position varies by itself"
    assert outputs[1][CACHE_ARGUMENT].attention_layers[0].values.dtype == torch.bfloat16
