"""Precision, devices and memory: what must not overflow, stay on the wrong device, or stay at all."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import accelerate
import pytest
import torch

import replay_transformers as rt
from replay_transformers.cursor import Cursor
from replay_transformers.geometry import LayerGeometry
from replay_transformers.layers import LAYER_CLASSES
from tests.reports.phases import EVERY_FAMILY, EVERY_PHASE, at_phase
from tests.support import models
from tests.support.cached import feed, ids, model_for, new_cache, stock_cache
from tests.support.generation import returned_cache
from tests.support.operators import EVERY_OPERATOR, Geometry, Operator, part
from tests.support.snapshots import tensors

pytestmark = pytest.mark.usefixtures("enabled")

FLOAT16_LARGEST = 65504.0


@EVERY_OPERATOR
@pytest.mark.parametrize("splits", [[1] * 12, [3, 3, 3, 3], [9, 3]], ids=["steps", "blocks", "scan-and-block"])
def test_a_float16_checkpoint_is_bounded(operator: Operator, splits: list[int]) -> None:
    """Fault: a state beyond 65,504 becomes infinite in float16, and then everything after it."""
    config = rt.ReplayConfig(window=2, max_draft=2, checkpoint="float16")
    geometry, cursor = Geometry(heads=2, groups=1, head_dim=4, state_dim=8), Cursor(config)
    shapes = LayerGeometry(operator.name, 2, 1, 4, 8, 4)
    layer = LAYER_CLASSES[operator.name](shapes, config, cursor)
    layer.allocate(1, torch.float32, torch.device("cpu"))
    tokens, parameters = operator.draw(1, 12, geometry, torch.float32), operator.parameters(geometry, torch.float32)
    tokens["x" if operator.name == "mamba2" else "v"].mul_(1e6)
    start = 0
    for count in splits:
        cursor.begin(1, count, torch.device("cpu"))
        output = layer.step(*part(tokens, start, start + count).values(), *parameters.values())
        assert output.isfinite().all()
        start += count
    layer.flush()
    assert layer.checkpoint.dtype == torch.float16
    assert layer.checkpoint.abs().max() == FLOAT16_LARGEST
    assert layer.state().isfinite().all()


@EVERY_FAMILY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_narrow_model_keeps_its_state_wide(family: str, dtype: torch.dtype) -> None:
    """Fault: the state takes the model's dtype, and decoding drifts further from the truth than stock decoding."""
    # experts have no float64 kernel for the oracle
    model: Any = copy.deepcopy(model_for("nemotron_h-M*" if family == "nemotron_h" else family)).to(dtype)
    tokens = ids(1, 120)
    truth = models.full_logits(copy.deepcopy(model).double(), tokens)
    cache, stock = new_cache(model, 16), stock_cache(model)
    error, its = ((feed(model, each, tokens).double() - truth).square().mean().sqrt() for each in (cache, stock))
    assert {layer.checkpoint.dtype for layer in cache.replay_layers} == {torch.float32}
    assert its > 1e-5
    assert error <= 1.25 * its


@EVERY_FAMILY
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
def test_weights_offloaded_to_another_place(family: str, implementation: str) -> None:
    """Fault: under CPU offload a mixer reads weights that lie on `meta`, or buffers are made there."""
    model, inputs = models.FAMILIES[family](), models.prompt(2, 6, [0, 2])
    truth = models.greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert any(parameter.is_meta for parameter in model.parameters())
    settings = {"cache_implementation": implementation, "cache_config": {"window": 3}}
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, truth)
    assert {tensor.device.type for tensor in tensors(returned_cache(output)).values()} == {"cpu"}


@EVERY_FAMILY
@EVERY_PHASE
def test_a_deleted_cache_is_gone_at_once(family: str, phase: int) -> None:
    """Fault: memory stays after `del cache`, held by a cycle, a registry or a patched module."""
    cache, _ = at_phase(model_for(family), phase, max_draft=3)
    fork = cache.fork()
    watched = [weakref.ref(thing) for each in (cache, fork) for thing in (each, *tensors(each).values())]
    gc.disable()
    try:
        del cache, fork
        assert not any(reference() is not None for reference in watched)
    finally:
        gc.enable()


@EVERY_FAMILY
def test_memory_is_flat_over_calls_and_rejections(family: str) -> None:
    """Fault: rejected tokens, or caches of earlier calls, keep memory; it grows call by call."""
    model, inputs = model_for(family), models.prompt(1, 5)
    cache, _ = at_phase(model, 1, max_draft=6)
    arguments = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": "replay"}
    held, footprints = [], set()
    for number in range(50):
        model.generate(**inputs, **arguments)
        feed(model, cache, ids(1, 6, seed=number), *([6] if number % 2 else [1, 5]))
        cache.crop(-6)
        footprints.add(tuple(cache.memory_footprint().items()))
        if number in (4, 49):
            gc.collect()
            held.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
    assert held[0] == held[1]
    assert len(footprints) == 1
