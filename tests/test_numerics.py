"""Accuracy over long runs, the time step's limit, and continuation in pieces."""

import copy
from typing import Any

import pytest
import torch
import transformers

import replay_transformers as rt
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import (
    FAMILIES,
    assert_state_matters,
    build_nemotron_h,
    cached_forward,
    full_logits,
    greedy_without_cache,
    prompt,
)

pytestmark = pytest.mark.usefixtures("enabled")

# Two float32 evaluations of the same sums in another order; the logits are of order 1 to 10 and a wrong token, slot or
# decay moves them by more than 0.1 (assert_state_matters).
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def _teacher_forced(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[T, vocabulary]`` of single-token forwards over ``ids [1, T]``."""
    rows = []
    with torch.inference_mode():
        for step in range(ids.shape[1]):
            output = model(
                input_ids=ids[:, step : step + 1],
                position_ids=torch.tensor([[step]]),
                use_cache=True,
                **{CACHE_ARGUMENT: cache},
            )
            rows.append(output.logits[0, -1].double())
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_four_thousand_steps_in_bfloat16_against_a_float64_oracle(family: str) -> None:
    """RMS error per 250 steps at most 1.25x stock decoding's, growing at most 1.1x as much as stock's."""
    build = FAMILIES[family]
    model = build("M*") if family == "nemotron_h" else build(["linear_attention", "full_attention"])
    assert_state_matters(model)
    model = model.bfloat16()
    ids = prompt(1, 4000)["input_ids"]
    oracle = full_logits(copy.deepcopy(model).double(), ids)[0].double()

    def errors(cache: Any) -> torch.Tensor:
        squares = (_teacher_forced(model, cache, ids) - oracle).square()
        return squares.view(16, -1).mean(-1).sqrt()

    stock = errors(transformers.DynamicCache(config=model.config))
    replay = errors(rt.ReplayCache(model.config))
    assert stock.min() > 1e-4, "bfloat16 must be visible against the oracle"
    assert (replay / stock).max() <= 1.25
    assert replay[-1] / replay[0] <= 1.1 * stock[-1] / stock[0]


@pytest.mark.core
@pytest.mark.parametrize("window", [1, 3, 16])
def test_the_time_step_limit_is_one_rule_for_steps_blocks_and_folds(window: int) -> None:
    """Where the limit bites, every path of the replay cache still equals the full forward; stock decoding does not."""
    model = build_nemotron_h("M*M")
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.05, float("inf"))
    ids = prompt(1, 41)["input_ids"]
    truth = full_logits(model, ids)[0]

    stock = _teacher_forced(model, transformers.DynamicCache(config=model.config), ids)
    assert (stock - truth).abs().max() > 0.05, "the limit must matter for this test to be able to fail"

    states = []
    for split in ([1] * 41, [8] * 5 + [1], [3, 9, 2, 17, 10], [41]):
        cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=window))
        parts = [cached_forward(model, cache, part) for part in ids.split(split, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1)[0], truth, **CLOSE)
        cache.flush()
        states.append(cache.state(0))
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], **CLOSE)


@pytest.mark.core
@pytest.mark.parametrize("window", [3, 16])
@pytest.mark.parametrize(
    "split",
    [[1, 2, 3, 17], [8, 8, 7], [2, 1, 1, 1, 1], [40, 1, 30], [1, 18, 1, 4, 65], [64, 1], [3, 128, 1]],
    ids=lambda split: "-".join(map(str, split)),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_forwards_of_several_tokens(family: str, split: list[int], window: int) -> None:
    """Blocks below and above the ring, not multiples of a chunk, shorter than the convolution; padded rows."""
    model = FAMILIES[family]()
    # the last row is all padding in its first block; transformers takes a single token to be never padding
    inputs = prompt(3, sum(split), [0, 1, min(split[0], 35)] if split[0] > 1 else None)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    truth = full_logits(model, ids, mask)
    for fixed in (None, sum(split)):
        cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=window), max_cache_len=fixed)
        done, parts = 0, []
        for part in ids.split(split, dim=1):
            done += part.shape[1]
            parts.append(cached_forward(model, cache, part, mask[:, :done]))
        real = mask.bool()
        torch.testing.assert_close(torch.cat(parts, dim=1)[real], truth[real], **CLOSE)


@pytest.mark.parametrize("checkpoint", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_checkpoint_precisions_decode_close_to_float32(family: str, checkpoint: str) -> None:
    model = FAMILIES[family]()
    ids = prompt(1, 80)["input_ids"]
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, checkpoint=checkpoint))
    logits = _teacher_forced(model, cache, ids)
    assert {layer.checkpoint.dtype for layer in cache.replay_layers} == {getattr(torch, checkpoint)}
    error = (logits - full_logits(model, ids)[0]).square().mean().sqrt().item()
    # a fold rounds the state once per window: relative 2^-9 (bfloat16) and 2^-12 (float16), times what 20 folds and
    # three layers make of it
    limit = {"bfloat16": 0.15, "float16": 0.02, "float64": 1e-4}[checkpoint]
    floor = {"bfloat16": 1e-3, "float16": 1e-5, "float64": 0.0}[checkpoint]
    assert floor <= error < limit


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_wrapped_projections(family: str) -> None:
    peft = pytest.importorskip("peft")
    model = FAMILIES[family]()
    names = ["in_proj_qkv", "in_proj_z", "out_proj"] if family == "qwen3_5" else ["in_proj"]
    plain = full_logits(model, prompt(1, 8)["input_ids"])
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, init_lora_weights=False)).eval()
    inputs = prompt(2, 7, [0, 3])
    truth = greedy_without_cache(wrapped, inputs["input_ids"], inputs["attention_mask"], 20)
    assert (full_logits(wrapped, prompt(1, 8)["input_ids"]) - plain).abs().max() > 0.1, "the adapters must matter"
    output = wrapped.generate(
        **inputs, max_new_tokens=20, do_sample=False, cache_implementation="replay", cache_config={"window": 4}
    )
    assert torch.equal(output, truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_does_not_touch_the_recurrence(family: str) -> None:
    """Under autocast only the projections run in bfloat16: as accurate as stock, state in float32."""
    model = FAMILIES[family]()
    ids = prompt(1, 40)["input_ids"]
    truth = full_logits(model, ids)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = _teacher_forced(model, transformers.DynamicCache(config=model.config), ids)
        replay = _teacher_forced(model, rt.ReplayCache(model.config), ids)
    stock_error, replay_error = ((x - truth).square().mean().sqrt() for x in (stock, replay))
    assert replay_error <= 1.25 * stock_error
