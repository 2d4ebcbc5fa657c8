"""Assisted generation of batches on a GPU: the tokens of decoding without a cache, also compiled; flat memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from tests.support.batches import Oracle, observed
from tests.support.models import FAMILIES, WITHOUT_EXPERTS, greedy_without_cache, prompt
from tests.support.speculation import never_right, never_unsure, perturbed

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]

PADS, STEPS = [0, 4, 2, 0, 6], 40


def _inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompt(5, 9, PADS, seed=seed).items()}


def _settings(implementation: str, **more: Any) -> dict[str, Any]:
    return {
        "max_new_tokens": STEPS,
        "do_sample": False,
        "cache_implementation": implementation,
        "cache_config": {"window": 7, "draft_length": "fixed"},
        **more,
    }


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_accept_apart(family: str, implementation: str) -> None:
    """Fixed shapes are compiled by themselves; the second call replays the graphs of the first with another prompt."""
    cpu = FAMILIES[family]()
    truths = [
        greedy_without_cache(cpu, *(tensor.cpu() for tensor in _inputs(seed).values()), STEPS) for seed in range(2)
    ]
    model = cpu.cuda()
    for seed, truth in enumerate(truths):
        oracle = Oracle(truth.cuda(), 4)
        is_compiled = implementation == "replay_static"
        with observed(model, lambda drafter, oracle=oracle: oracle, is_compiled) as rounds:
            output = model.generate(**_inputs(seed), **_settings(implementation), prompt_lookup_num_tokens=4)
        assert torch.equal(output.cpu(), truth)
        rounds_seen = [added - 1 for row in rounds.added for added in row if added]
        assert max(rounds_seen) >= 2
        assert 0 in rounds_seen


@pytest.mark.parametrize("family", FAMILIES)
def test_an_assistant(family: str) -> None:
    cpu = FAMILIES[family]()
    truth = greedy_without_cache(cpu, *(tensor.cpu() for tensor in _inputs().values()), STEPS)
    assistant = perturbed(cpu, 0.03).cuda()
    model = cpu.cuda()
    with observed(model) as rounds:
        output = model.generate(**_inputs(), **_settings("replay"), assistant_model=assistant)
    assert torch.equal(output.cpu(), truth)
    rounds.check()


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_lengths_by_the_clock(family: str, implementation: str) -> None:
    """Drafts as long as they pay, which is the default; compiled, a graph for each length that is tried."""
    cpu = WITHOUT_EXPERTS[family]()
    truth = greedy_without_cache(cpu, *(tensor.cpu() for tensor in _inputs().values()), STEPS)
    model, oracle = cpu.cuda(), Oracle(truth.cuda(), 4, "right")
    settings = _settings(implementation, cache_config={"window": 7}, prompt_lookup_num_tokens=4)
    with observed(model, lambda drafter: oracle, implementation == "replay_static") as rounds:
        output = model.generate(**_inputs(), **settings)
    assert torch.equal(output.cpu(), truth)
    assert max(rounds.drafted) > 0
    assert max(rounds.accepted()) >= 1


EAGER, GRAPHS = {"disable_compile": True}, {"compile_config": CompileConfig(backend="cudagraphs")}


@pytest.mark.parametrize(
    ("implementation", "compiling"),
    [("replay", EAGER), ("replay_static", EAGER), ("replay_static", GRAPHS)],
    ids=["growing", "fixed", "graphs"],
)
@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_memory_is_flat_over_fifty_calls_with_rejections(
    family: str, implementation: str, compiling: dict[str, Any], captures: list[torch.device]
) -> None:
    model = WITHOUT_EXPERTS[family]().cuda()
    assistant = never_unsure(never_right(model).cuda())
    arguments = _settings(implementation, max_new_tokens=12, **compiling)
    with observed(model, is_compiled=compiling is GRAPHS) as rounds:
        model.generate(**_inputs(), **arguments, assistant_model=assistant)
    assert set(rounds.accepted()) == {0}
    assert max(rounds.drafted) == 4
    if compiling is EAGER:
        rounds.check(accepting=0)
    del rounds
    gc.collect()  # the observer is a cycle; without it nothing may wait for the collector
    allocated = []
    for _ in range(50):
        model.generate(**_inputs(), **arguments, assistant_model=assistant)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[2:] == allocated[2:3] * 48
    assert bool(captures) == (compiling is GRAPHS)
