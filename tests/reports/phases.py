"""Caches at the phases of the ring at which such faults have shown: empty, one record, one short of full, full."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replay_transformers as rt
from tests.support import models
from tests.support.cached import assert_logits, assert_states, feed, ids, layers, new_cache

WINDOW = 4
PROMPT = 11  # longer than the ring takes in one forward (max_draft <= 8), so that the ring is empty after it
EVERY_FAMILY = pytest.mark.parametrize("family", models.FAMILIES)
EVERY_PHASE = pytest.mark.parametrize("phase", [0, 1, WINDOW - 1, WINDOW])
WITHOUT_ATTENTION = pytest.mark.parametrize("model", ["nemotron_h-M", "qwen3_5-no-attention"])


def at_phase(
    model: Any, phase: int, rows: int = 1, max_draft: int = 0, fixed: bool = False
) -> tuple[rt.ReplayCache, torch.Tensor]:
    """A cache with ``phase`` records in every ring, recording if ``max_draft`` is given; the tokens it has seen."""
    cache = new_cache(model, WINDOW, max_draft, max_cache_len=64 if fixed else None)
    tokens = ids(rows, PROMPT + phase, seed=phase)
    feed(model, cache, tokens, PROMPT, *[1] * phase)
    assert cache.cursor.committed.tolist() == [phase] * rows
    if max_draft:
        cache.activate_past_recording()
    return cache, tokens


def assert_holds(model: Any, cache: rt.ReplayCache, seen: torch.Tensor, then: int = WINDOW + 2) -> None:
    """The cache is as if it had seen these tokens and no others: states now, logits of the next tokens."""
    assert int(cache.get_seq_length()) == seen.shape[1]
    cold = new_cache(model, WINDOW)
    models.cached_forward(model, cold, seen)
    for index in layers(cache):
        assert_states(cache.state(index), cold.state(index))
    later = ids(seen.shape[0], then, seed=99)
    truth = models.full_logits(model, torch.cat([seen, later], dim=1))[:, seen.shape[1] :]
    assert_logits(feed(model, cache, later), truth)


def poison(cache: rt.ReplayCache) -> None:
    """NaN in every slot that belongs neither to a record nor to the context of the convolution."""
    for row, (base, committed, pending) in enumerate(torch.stack(cache.cursor.tensors(), dim=1).tolist()):
        end = base + committed + pending
        for layer in cache.replay_layers:
            context = max(0, base + committed - (layer.geometry.conv_kernel - 1))
            slots, inputs = cache.replay_config.capacity, layer.conv_ring.shape[1]
            dead = sorted(set(range(slots)) - {position % slots for position in range(base, end)})
            for ring in layer.rings.values():
                ring[row, :, dead] = float("nan")
            dead = sorted(set(range(inputs)) - {position % inputs for position in range(context, end)})
            layer.conv_ring[row, dead] = float("nan")
