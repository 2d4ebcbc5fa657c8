"""Graphs and compilation: a cache that changes hands between compiled and eager forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import replay_transformers as rt
from tests.reports.phases import EVERY_FAMILY, WINDOW
from tests.support import models
from tests.support.cached import assert_logits, assert_states, ids, layers, new_cache, stock_cache, stock_state
from tests.support.generation import CACHE_ARGUMENT

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]

LENGTH = 7 + 3 * WINDOW


def forward(run: Any, cache: rt.ReplayCache, tokens: torch.Tensor, seen: int) -> torch.Tensor:
    """Logits of the next tokens, by the model or by its compiled forward."""
    with torch.no_grad():
        positions = torch.arange(seen, seen + tokens.shape[1])[None]
        return run(input_ids=tokens, position_ids=positions, use_cache=True, **{CACHE_ARGUMENT: cache}).logits


@EVERY_FAMILY
def test_compiled_and_eager_forwards_take_turns(family: str) -> None:
    """Fault: warm-up advances the state, a graph keeps a former prompt, or prefill and decode disagree about the ring.

    Prefill compiled and decode eager, the reverse, and in turns; every phase comes up, twice with other tokens.
    """
    model = models.FAMILIES[family](["linear_attention", "full_attention"] if family == "qwen3_5" else "M*")
    models.assert_state_matters(model)
    compiled = torch.compile(model.forward, backend="eager", dynamic=False)
    cache = new_cache(model, WINDOW, max_cache_len=32)
    cache.allocate(1, torch.float32, torch.device("cpu"))
    turns = {"prefill": lambda step: step == 0, "decode": lambda step: step > 0, "both": lambda step: step % 2 == 0}
    for number, is_compiled in enumerate([*turns.values(), turns["both"]]):
        cache.reset()
        tokens, seen, parts = ids(1, LENGTH, seed=number), 0, []
        for step, part in enumerate(tokens.split([7] + [1] * (LENGTH - 7), dim=1)):
            parts.append(forward(compiled if is_compiled(step) else model, cache, part, seen))
            seen += part.shape[1]
            assert cache.cursor.lengths().tolist() == [seen]
        assert_logits(torch.cat(parts, dim=1), models.full_logits(model, tokens))
        stock = stock_cache(model)
        models.cached_forward(model, stock, tokens)
        for index in layers(cache):
            assert_states(cache.state(index), stock_state(stock, index))
    assert counters["stats"]["unique_graphs"] == 2, "one for the prompt, one for all steps"
