"""What a step reads and writes: dead slots, the checkpoint's bytes, traffic of the state's size, allocated memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import replay_transformers as rt
from replay_transformers.generation.loop import Loop
from replay_transformers.kernels.ring import rows_due
from replay_transformers.layers import ReplayLayer
from tests.support import models
from tests.support.batches import Oracle, observed
from tests.support.cached import feed, ids, model_for, new_cache
from tests.support.snapshots import tensors

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("enabled")]

EVERY_FAMILY = pytest.mark.parametrize("family", models.FAMILIES)
GROWING_AND_FIXED = pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
NAN = float("nan")


def poison_dead_slots(cache: rt.ReplayCache) -> int:
    """NaN in every slot of every ring that neither a step nor a rollback may read; how many slots that were."""
    poisoned = 0
    for row, (base, committed, pending) in enumerate(torch.stack(cache.cursor.tensors(), dim=1).tolist()):
        end = base + committed + pending
        for layer in cache.replay_layers:
            slots = cache.replay_config.capacity
            live = {position % slots for position in range(base, end)}
            dead = [slot for slot in range(slots) if slot not in live]
            for ring in layer.rings.values():
                ring[row, :, dead] = NAN
            inputs = layer.conv_ring.shape[1]
            first = max(0, base + committed - (layer.geometry.conv_kernel - 1))
            context = {position % inputs for position in range(first, end)}
            layer.conv_ring[row, [slot for slot in range(inputs) if slot not in context]] = NAN
            poisoned += len(dead)
    return poisoned


@EVERY_FAMILY
@GROWING_AND_FIXED
def test_dead_slots_leak_nothing(family: str, fixed: bool) -> None:
    """Before every forward, at every phase, with and without rejections: logits and states to the bit."""
    model, tokens = model_for(family), ids(2, 36)
    clean, poisoned = (new_cache(model, 4, 3, max_cache_len=48 if fixed else None) for _ in range(2))
    start = 0
    for step, count in enumerate([2, 1, 1, 1, 1, 1, 1, 3, 1, 2, 4, 1, 1, 7, 1, 1, 3, 1]):
        if step == 6:
            clean.activate_past_recording()
            poisoned.activate_past_recording()
        part = tokens[:, start : start + count]
        start += count
        if step:
            assert poison_dead_slots(poisoned) > 0
        assert torch.equal(models.cached_forward(model, clean, part), models.cached_forward(model, poisoned, part))
        for index, layer in enumerate(clean.layers):
            if isinstance(layer, ReplayLayer):
                assert torch.equal(clean.state(index), poisoned.state(index))
        if step in (8, 10, 13, 15):
            clean.crop(-2)
            poisoned.crop(-2)
    poison_dead_slots(poisoned)
    clean.flush()
    poisoned.flush()
    for one, two in zip(clean.replay_layers, poisoned.replay_layers, strict=True):
        assert torch.equal(one.checkpoint, two.checkpoint)


@EVERY_FAMILY
def test_the_checkpoint_is_float32_in_a_bfloat16_model(family: str) -> None:
    """And so is everything that decay is made of; the records are as narrow as the model's activations."""
    model = copy.deepcopy(model_for(family)).bfloat16()
    cache = new_cache(model, 4)
    feed(model, cache, ids(2, 12), 5, *[1] * 7)
    decay = {"dt", "g"}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ReplayLayer):
            assert layer.checkpoint.dtype == torch.float32
            assert cache.state(index).dtype == torch.float32
            assert layer.conv_ring.dtype == torch.bfloat16
            for name, ring in layer.rings.items():
                assert ring.dtype == (torch.float32 if name in decay else torch.bfloat16), name
            if layer.geometry.kind == "mamba2":
                log_rate = model.model.layers[index].mixer.A_log
                assert torch.equal(layer.rate, -log_rate.float().exp())


@EVERY_FAMILY
@pytest.mark.parametrize("checkpoint", ["bfloat16", "float16", "float64"])
def test_the_checkpoint_may_be_asked_for_in_another_dtype(family: str, checkpoint: str) -> None:
    """Rounding the state once per flush, to 8 or 11 bits, moves it by about that much; float64 by nothing."""
    model = model_for(family)
    caches = [rt.ReplayCache(model.config, rt.ReplayConfig(window=4, checkpoint=c)) for c in ("float32", checkpoint)]
    for cache in caches:
        feed(model, cache, ids(1, 14), 5, *[1] * 9)
    layer, index = caches[1].replay_layers[0], caches[1].layers.index(caches[1].replay_layers[0])
    assert layer.checkpoint.dtype == getattr(torch, checkpoint)
    exact = caches[0].state(index)
    error = (caches[1].state(index) - exact).norm() / exact.norm()
    # three flushes: a relative rounding error of at most half a unit each, and float32's own
    unit = {"bfloat16": 2**-8, "float16": 2**-11, "float64": 0.0}[checkpoint]
    assert error <= 3 * unit + 1e-6
    assert error >= unit / 50


@EVERY_FAMILY
def test_plain_steps_leave_the_checkpoint_alone(family: str) -> None:
    """window - 1 steps out of window neither write it nor touch its version; a flush writes it exactly once."""
    model, window = model_for(family), 5
    cache = new_cache(model, window)
    feed(model, cache, ids(2, 7), 7)
    flushes = 0
    for step in range(3 * window + 1):
        before = [(layer.checkpoint.clone(), layer.checkpoint._version) for layer in cache.replay_layers]
        due = int(cache.cursor.committed[0]) + 1 > window
        flushes += due
        feed(model, cache, ids(2, 1, seed=step))
        for layer, (values, version) in zip(cache.replay_layers, before, strict=True):
            assert layer.checkpoint._version - version == int(due)
            assert torch.equal(layer.checkpoint, values) == (not due)
    assert flushes == 3


class StateTraffic(TorchDispatchMode):
    """Counts, operator by operator, tensors of the states' size that are written or newly made."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        super().__init__()
        self.size = states[0].numel()
        self.storages = {state.untyped_storage().data_ptr() for state in states}
        self.writes: list[str] = []
        self.allocations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, torch.Tensor) and self.is_state(value):
                self.writes.append(str(func))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.numel() == self.size:
                known = value.untyped_storage().data_ptr() in self.storages
                if not known and func._schema.returns and func._schema.returns[0].alias_info is None:
                    self.allocations.append(str(func))
        return result

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Of a state's size, or one of the states itself."""
        return tensor.numel() == self.size or tensor.untyped_storage().data_ptr() in self.storages


@contextmanager
def watched(cache: rt.ReplayCache) -> Iterator[StateTraffic]:
    """Traffic of the size of the cache's states; nothing else may have that size."""
    states = [layer.checkpoint for layer in cache.replay_layers]
    others = [tensor for name, tensor in tensors(cache).items() if not name.endswith("checkpoint")]
    assert states[0].numel() not in {tensor.numel() for tensor in others}
    with StateTraffic(states) as traffic:
        yield traffic


def assert_only_folds_move(traffic: StateTraffic, cache: rt.ReplayCache, folds: bool) -> None:
    """Nothing of the states' size is written or made unless a row folds, which writes each checkpoint once."""
    assert len(traffic.writes) == (len(cache.replay_layers) if folds else 0), traffic.writes
    assert folds or traffic.allocations == []
    assert bool(traffic.allocations) == folds, "the watch sees nothing"


# heads x head_dim x state_dim is larger than anything else that a step of a few tokens makes
BIG_STATES = {
    "qwen3_5": {"linear_key_head_dim": 40, "linear_value_head_dim": 36},
    "nemotron_h": {"ssm_state_size": 72, "mamba_head_dim": 20},
}


@EVERY_FAMILY
def test_plain_steps_move_nothing_of_the_states_size(family: str) -> None:
    """No operator of a plain step writes or makes such a tensor; a flush writes each layer's checkpoint once."""
    model, window = models.FAMILIES[family](**BIG_STATES[family]), 4
    cache = new_cache(model, window)
    feed(model, cache, ids(2, 7), 7)
    for step in range(2 * window + 1):
        due = int(cache.cursor.committed[0]) + 1 > window
        with watched(cache) as traffic:
            feed(model, cache, ids(2, 1, seed=step))
        assert_only_folds_move(traffic, cache, due)


def folds_next(cache: rt.ReplayCache, tokens: int) -> bool:
    """Whether a forward of so many tokens folds records of any row."""
    _, committed, pending = cache.cursor.tensors()
    assert cache.cursor.early is not None
    return bool(rows_due(committed, pending, tokens, cache.replay_config.window, cache.cursor.early).any())


@EVERY_FAMILY
@GROWING_AND_FIXED
def test_verifications_move_nothing_of_the_states_size(family: str, fixed: bool) -> None:
    """Nor do forwards of several tokens and the commits behind them, of other numbers in each row, if no row folds."""
    model, drafts, seen = models.FAMILIES[family](**BIG_STATES[family]), 5, []
    cache = new_cache(model, 24, drafts, max_cache_len=96 if fixed else None)
    cache.activate_past_recording()
    feed(model, cache, ids(2, 7), 7)
    cache.crop(0)
    for step, rejected in enumerate([(0, 3), (5, 1), (2, 2), (1, 4), (4, 0), (3, 5), (0, 1), (2, 3), (1, 0), (5, 2)]):
        folds = folds_next(cache, drafts)
        with watched(cache) as traffic:
            feed(model, cache, ids(2, drafts, seed=step), drafts)
            cache.crop(-torch.tensor(rejected))
        assert_only_folds_move(traffic, cache, folds)
        seen.append(folds)
    assert cache.cursor.ragged
    assert 1 <= sum(seen) <= 3, "rounds of both kinds"


@EVERY_FAMILY
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
def test_rounds_of_speculation_move_nothing_of_the_states_size(
    family: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the target's forward to the drafter that hears what was accepted."""
    model, inputs, drafts, seen = models.FAMILIES[family](**BIG_STATES[family]), models.prompt(3, 9), 4, []
    truth = models.greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 24)
    begin = Loop._round

    def round_of(self: Any, rows: Any, draft: Any, *rest: Any) -> Any:
        cache = self.target.cache
        folds = folds_next(cache, draft.tokens.shape[1] + 1)
        with watched(cache) as traffic:
            answer = begin(self, rows, draft, *rest)
        assert_only_folds_move(traffic, cache, folds)
        seen.append(folds)
        return answer

    monkeypatch.setattr(Loop, "_round", round_of)
    with observed(model, lambda drafter: Oracle(truth, drafts)) as rounds:
        output = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, cache_implementation=implementation,
            cache_config={"window": 16, "draft_length": "fixed"}, prompt_lookup_num_tokens=drafts,
        )  # fmt: skip
    assert torch.equal(output, truth)
    assert any(len(set(added)) > 1 for added in rounds.added), "rows accept different numbers of drafts"
    assert seen.count(False) >= 4
    assert True in seen


@EVERY_FAMILY
@GROWING_AND_FIXED
def test_memory_footprint(family: str, fixed: bool) -> None:
    """Equals the bytes of all buffers, by kind; and a new cache takes none."""
    model = model_for(family)
    cache = new_cache(model, 4, 3, max_cache_len=20 if fixed else None)
    assert cache.memory_footprint() == dict.fromkeys(("checkpoint", "readout", "ring", "convolution", "attention"), 0)
    feed(model, cache, ids(2, 9), 7, 1, 1)
    footprint, expected = cache.memory_footprint(), dict.fromkeys(cache.memory_footprint(), 0)
    for name, tensor in tensors(cache).items():
        kind = name.split(".")[-1]
        if kind in ("keys", "values"):
            expected["attention"] += tensor.nbytes
        elif kind in ("checkpoint", "conv_ring"):
            expected["checkpoint" if kind == "checkpoint" else "convolution"] += tensor.nbytes
        elif "." in name and kind not in ("rate", "cumulative_length"):
            expected["ring"] += tensor.nbytes
    assert footprint == expected

    geometry = cache.replay_layers[0].geometry
    states = len(cache.replay_layers) * 2 * geometry.heads * geometry.head_dim * geometry.state_dim
    slots = geometry.conv_kernel - 1 + 3 + 4  # before what can be rejected, that, and a forward
    assert footprint["checkpoint"] == 4 * states
    assert footprint["convolution"] == 4 * len(cache.replay_layers) * 2 * slots * geometry.conv_dim
    # 20 tokens, a rejected forward of 4 behind them, in eights
    length, config = 24 if fixed else 9, model.config
    keys = len(cache.attention_layers) * 2 * config.num_key_value_heads * length * config.head_dim
    assert footprint["attention"] == 2 * 4 * keys


def test_plain_steps_allocate_nothing_that_stays() -> None:
    """The cache's own tensors stay in place, step after step, flush after flush, rollback after rollback."""
    model = model_for("nemotron_h")
    cache = new_cache(model, 3, 3, max_cache_len=64)
    feed(model, cache, ids(2, 5), 5)
    cache.activate_past_recording()
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(cache).items()}
    for step, count in enumerate([1, 1, 4, 2, 6, 1, 3, 1, 1, 4]):
        feed(model, cache, ids(2, count, seed=step), count)
        cache.crop(-(step % (min(count, 3) + 1)))
    assert {name: tensor.data_ptr() for name, tensor in tensors(cache).items()} == addresses
