"""The traffic counter, on operators of known traffic and on the decode steps of both families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mktestdocs import check_docstring
from transformers import DynamicCache

import replay_transformers as rt
from replay_transformers.traffic import (
    KINDS,
    StepTraffic,
    TrafficCounter,
    cache_buffers,
    count_steps,
    mean_traffic,
    whole_windows,
)
from tests.support.models import FAMILIES, cached_forward, prompt

ROWS, COLUMNS = 4, 6
ALL = ROWS * COLUMNS
INDEX = torch.tensor([[0], [2], [5], [5]])
MASK = torch.arange(ALL).view(ROWS, COLUMNS) % 4 == 0  # true in two rows of the first column

# what is done with a watched [4, 6] tensor -> elements read, elements written
OPERATORS: dict[str, tuple[Callable[[torch.Tensor], Any], int, int]] = {
    "sum": (lambda s: s.sum(), ALL, 0),
    "add": (lambda s: s + 1, ALL, 0),
    "twice": (lambda s: s * s, 2 * ALL, 0),
    "cat": (lambda s: torch.cat([s, torch.zeros(1, COLUMNS), s]), 2 * ALL, 0),
    "matmul": (lambda s: s @ torch.ones(COLUMNS, 3), ALL, 0),
    "batched_matmul": (lambda s: s.view(2, 2, COLUMNS) @ torch.ones(2, COLUMNS, 3), ALL, 0),
    "clone": (lambda s: s.clone(), ALL, 0),
    "cast": (lambda s: s.to(torch.float64), ALL, 0),
    "cast_to_itself": (lambda s: s.to(torch.float32), 0, 0),
    "contiguous_transpose": (lambda s: s.T.contiguous(), ALL, 0),
    "where": (lambda s: torch.where(MASK, s, 0.0), ALL, 0),
    "item": (lambda s: s[1, 2].item(), 1, 0),
    "views": (lambda s: s.view(-1)[2:8].unsqueeze(0).expand(5, -1).T.detach().select(0, 1), 0, 0),
    "split": (lambda s: s.unflatten(1, (2, 3)).split(1, dim=1), 0, 0),
    "in_place_view": (lambda s: s.view(-1).unsqueeze_(0), 0, 0),
    "like": (lambda s: (torch.empty_like(s), torch.zeros_like(s), s.new_zeros(3)), 0, 0),
    "row": (lambda s: s[1] + 1, COLUMNS, 0),
    "strided": (lambda s: s[:, ::2] + 1, ALL // 2, 0),
    "broadcast": (lambda s: s[1].expand(100, COLUMNS) + 1, COLUMNS, 0),
    "overlapping": (lambda s: s.view(-1).unfold(0, 5, 1) + 1, ALL, 0),
    "empty": (lambda s: s[:0] + 1, 0, 0),
    "gather": (lambda s: s.gather(1, INDEX), ROWS, 0),
    "index_select": (lambda s: s.index_select(0, torch.tensor([1, 3])), 2 * COLUMNS, 0),
    "index": (lambda s: s[torch.tensor([1, 3])], 2 * COLUMNS, 0),
    "index_mask": (lambda s: s[MASK], ALL // 4, 0),
    "copy": (lambda s: s.copy_(torch.ones(ROWS, COLUMNS)), 0, ALL),
    "copy_row": (lambda s: s[1].copy_(torch.ones(COLUMNS)), 0, COLUMNS),
    "copy_own_row": (lambda s: s[1].copy_(s[0]), COLUMNS, COLUMNS),
    "assign": (lambda s: s.__setitem__((slice(None), 0), 1.0), 0, ROWS),
    "zero": (lambda s: s.zero_(), 0, ALL),
    "fill": (lambda s: s[:, 1].fill_(2.0), 0, ROWS),
    "mul_in_place": (lambda s: s.mul_(2), ALL, ALL),
    "add_in_place": (lambda s: s[0].add_(s[1]), 2 * COLUMNS, COLUMNS),
    "out": (lambda s: torch.add(torch.ones(ROWS, COLUMNS), 1, out=s), 0, ALL),
    "out_of_itself": (lambda s: torch.mul(s, 2, out=s), ALL, ALL),
    "scatter": (lambda s: s.scatter_(1, INDEX, torch.ones(ROWS, COLUMNS)), 0, ROWS),
    "scatter_value": (lambda s: s.scatter_(1, INDEX, 1.0), 0, ROWS),
    "scatter_add": (lambda s: s.scatter_add_(1, INDEX, torch.ones(ROWS, COLUMNS)), ROWS, ROWS),
    "scatter_reduce": (lambda s: s.scatter_reduce_(1, INDEX, torch.ones(ROWS, 1), "amax"), ROWS, ROWS),
    "index_copy": (lambda s: s.index_copy_(1, torch.tensor([0, 2]), torch.ones(ROWS, 2)), 0, 2 * ROWS),
    "index_fill": (lambda s: s.index_fill_(0, torch.tensor([0, 2]), 1.0), 0, 2 * COLUMNS),
    "index_add": (lambda s: s.index_add_(1, torch.tensor([0, 2]), torch.ones(ROWS, 2)), 2 * ROWS, 2 * ROWS),
    "index_put": (lambda s: s.__setitem__(torch.tensor([0, 3]), 1.0), 0, 2 * COLUMNS),
    "index_put_pairs": (
        lambda s: s.index_put_((torch.tensor([[0], [1]]), torch.tensor([2, 3, 4])), torch.ones(2, 3)),
        0,
        6,
    ),
    "index_put_mask": (lambda s: s.index_put_((MASK,), torch.tensor(1.0)), 0, ALL // 4),
    "index_put_accumulate": (
        lambda s: s.index_put_((torch.tensor([0, 3]),), torch.ones(COLUMNS), accumulate=True),
        2 * COLUMNS,
        2 * COLUMNS,
    ),
    "masked_fill": (lambda s: s.masked_fill_(MASK, 0.0), 0, ALL // 4),
    "masked_fill_rows": (lambda s: s.masked_fill_(MASK[:, :1], 0.0), 0, 2 * COLUMNS),
    "foreach": (lambda s: torch._foreach_mul_([s[0], s[1]], 2.0), 2 * COLUMNS, 2 * COLUMNS),
    "other_memory": (lambda s: torch.ones(3).mul_(2) + torch.ones(3), 0, 0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str) -> None:
    operate, read, written = OPERATORS[name]
    state = torch.arange(ALL, dtype=torch.float32).view(ROWS, COLUMNS)
    with torch.no_grad(), TrafficCounter({"state": [state]}) as counter:
        operate(state)
    assert counter.reads == {"state": read * 4}
    assert counter.writes == {"state": written * 4}


def test_bytes_are_those_of_the_dtype() -> None:
    state = torch.ones(5, dtype=torch.bfloat16)
    with TrafficCounter({"state": [state]}) as counter:
        state.float().sum()
        state.copy_(torch.ones(5))
    assert (counter.reads, counter.writes) == ({"state": 10}, {"state": 10})


def test_kinds_are_told_apart() -> None:
    state, ring, other = torch.ones(2), torch.ones(3), torch.ones(3)
    with TrafficCounter({"state": [state], "ring": [ring]}) as counter:
        ring.copy_(other)
        other.copy_(ring * state.sum())
    assert counter.reads == {"state": 8, "ring": 12}
    assert counter.writes == {"state": 0, "ring": 12}


def test_what_the_counter_sees_is_what_happens() -> None:
    plain, counted = torch.ones(3, 4), torch.ones(3, 4)
    results = []
    for state in (plain, counted):
        with TrafficCounter({"state": [counted]}):
            state[1:].mul_(3).add_(state[0])
            results.append(state.softmax(-1) @ state.T)
    assert torch.equal(*results)
    assert torch.equal(plain, counted)


def test_a_replaced_buffer_counts_as_written() -> None:
    state = torch.ones(4)
    with TrafficCounter({"state": [state]}) as counter:
        successor = state + 1
    counter.add_replaced({"state": [state]})
    assert counter.writes == {"state": 0}
    counter.add_replaced({"state": [successor]})
    assert (counter.reads, counter.writes) == ({"state": 16}, {"state": 16})


def test_an_unused_custom_operator_name_does_not_matter() -> None:
    """Operators of other libraries follow their schema, even if they are called like one of PyTorch's."""
    with torch.library._scoped_library("traffic_test", "DEF") as library:
        library.define("copy_(Tensor(a!) state, Tensor source) -> ()")
        library.impl("copy_", lambda state, source: None, "CompositeExplicitAutograd")
        state = torch.ones(4)
        with TrafficCounter({"state": [state]}) as counter:
            torch.ops.traffic_test.copy_(state, torch.ones(4))
    assert (counter.reads, counter.writes) == ({"state": 16}, {"state": 16})


# -- decode steps -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return FAMILIES[request.param]()


def counted(model: Any, tokens: int, length: int = 12, **arguments: Any) -> list[StepTraffic]:
    with rt.enable(), count_steps(model) as steps:
        model.generate(**prompt(2, length), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **arguments)
    return steps


def state_bytes(model: Any, element: int = 4) -> int:
    cache = rt.ReplayCache(model.config)
    per_row = sum(g.heads * g.head_dim * g.state_dim for g in (layer.geometry for layer in cache.replay_layers))
    return 2 * per_row * element


@pytest.mark.core
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_stock_reads_and_writes_its_state_once_a_step(model: Any, cache: dict[str, Any]) -> None:
    steps = counted(model, 6, **cache)
    assert len(steps) == 5
    for step in steps:
        assert step.reads["state"] == step.writes["state"] == state_bytes(model)
        assert step.reads["convolution"] == step.writes["convolution"] > 0
        assert step.reads["ring"] == step.writes["ring"] == 0
        assert step.wrote_state


@pytest.mark.core
@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("name", ["replay", "replay_static"])
def test_replay_writes_its_state_once_a_window(model: Any, name: str, window: int) -> None:
    steps = counted(model, 3 * window + 2, cache_implementation=name, cache_config={"window": window})
    assert len(steps) == 3 * window + 1
    # the prompt goes straight into the state, so the ring is full after `window` steps, and the next one flushes
    assert [i for i, step in enumerate(steps) if step.wrote_state] == [window, 2 * window, 3 * window]
    for step in steps:
        assert step.writes["state"] == (state_bytes(model) if step.wrote_state else 0)
        assert step.reads["state"] >= state_bytes(model)
        if not step.wrote_state:
            assert step.reads["state"] == state_bytes(model)
        assert step.reads["ring"] > 0
        assert step.writes["ring"] > 0


def test_replay_layer_by_layer(model: Any) -> None:
    window = 4
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=window))
    with rt.enable():
        cached_forward(model, cache, prompt(1, 20)["input_ids"])
        checkpoints = {str(i): [layer.checkpoint] for i, layer in enumerate(cache.replay_layers)}
        size = {name: buffer.numel() * 4 for name, (buffer,) in checkpoints.items() if buffer is not None}
        nothing = dict.fromkeys(size, 0)
        assert len(size) >= 2
        for step in range(2 * window + 1):
            flushes = step in (window, 2 * window)
            with TrafficCounter(checkpoints) as counter:
                cached_forward(model, cache, torch.tensor([[5 + step]]))
            assert counter.writes == (size if flushes else nothing)
            if not flushes:
                assert counter.reads == size


def test_a_checkpoint_in_bfloat16_halves_the_bytes(model: Any) -> None:
    settings = {"window": 8, "checkpoint": "bfloat16"}
    (step,) = counted(model, 2, cache_implementation="replay", cache_config=settings)
    assert step.reads["state"] == state_bytes(model, element=2)


def test_prompts_are_not_counted(model: Any) -> None:
    assert counted(model, 1) == []
    assert len(counted(model, 3, length=1)) == 2
    # pooled: its buffers exist before the prompt
    for _ in range(2):
        assert len(counted(model, 3, length=1, cache_implementation="replay")) == 2
    with count_steps(model) as steps:
        model(**prompt(1, 1), use_cache=False)
    assert steps == []


def test_counting_leaves_nothing_behind(model: Any) -> None:
    hook = model.lm_head.register_forward_hook(stop_at_the_third_call())
    with pytest.raises(RuntimeError, match="stop"), count_steps(model) as steps:
        model.generate(**prompt(1, 4), max_new_tokens=8, do_sample=False)
    hook.remove()
    assert len(steps) == 1
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def stop_at_the_third_call() -> Callable[..., None]:
    calls = []

    def hook(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("stop")

    return hook


def test_buffers_of_caches(model: Any) -> None:
    empty = {kind: [] for kind in KINDS}
    assert cache_buffers(DynamicCache(config=model.config)) == empty
    cache = rt.ReplayCache(model.config)
    assert cache_buffers(cache) == empty
    with rt.enable():
        cached_forward(model, cache, prompt(1, 3)["input_ids"])
    sizes = {kind: sum(b.numel() * b.element_size() for b in group) for kind, group in cache_buffers(cache).items()}
    footprint = cache.memory_footprint()
    assert sizes == {
        "state": footprint["checkpoint"] + footprint["readout"],
        "ring": footprint["ring"],
        "convolution": footprint["convolution"],
    }


@pytest.mark.parametrize("example", [TrafficCounter, count_steps])
def test_docstring(example: Any) -> None:
    check_docstring(example, lang="python")


# -- means ------------------------------------------------------------------------------------------------------------


def step_of(read: int, written: int) -> StepTraffic:
    rest = {"ring": 1, "convolution": 2}
    return StepTraffic({"state": read, **rest}, {"state": written, **rest})


def test_mean_over_whole_windows() -> None:
    plain, flush = step_of(10, 0), step_of(30, 10)
    assert mean_traffic([]) is None
    steps = [plain, plain, plain, flush, plain, flush, plain, flush, plain, plain]
    assert whole_windows(steps) == [flush, plain, flush, plain]
    mean = mean_traffic(whole_windows(steps))
    assert mean == StepTraffic({"state": 20, "ring": 1, "convolution": 2}, {"state": 5, "ring": 1, "convolution": 2})
    assert mean is not None
    assert mean.total == 31
    for few in ([], [plain], [plain, flush, plain]):
        assert whole_windows(few) == few
