"""After every round of assisted generation the cache holds what a new one would that was fed with each row's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replay_transformers as rt
from replay_transformers.generation.loop import Loop
from tests.support.batches import Oracle, observed
from tests.support.cached import assert_states, layers
from tests.support.models import FAMILIES, cached_forward, greedy_without_cache, prompt

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.core]
STEPS = 20


def assert_rows_as_if_fed(model: Any, cache: rt.ReplayCache, ids: torch.Tensor, padding: torch.Tensor) -> None:
    """States, what the convolution still sees, keys, and lengths of rows ``[B, T]``, of which each has its own."""
    for row, length in enumerate(cache.row_lengths().tolist()):
        fresh = rt.ReplayCache(model.config, cache.replay_config, max_cache_len=cache.max_cache_len)
        mask = (torch.arange(length) >= padding[row]).long()[None]
        cached_forward(model, fresh, ids[row : row + 1, :length], mask)
        for index, layer in layers(cache).items():
            assert_states(cache.state(index)[row : row + 1], fresh.state(index))
            seen = torch.arange(length - layer.geometry.conv_kernel + 1, length) % layer.conv_ring.shape[1]
            known = (
                torch.arange(length - layer.geometry.conv_kernel + 1, length) % layers(fresh)[index].conv_ring.shape[1]
            )
            got, want = layer.conv_ring[row, seen], layers(fresh)[index].conv_ring[0, known]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        for held, new in zip(cache.attention_layers, fresh.attention_layers, strict=True):
            slots = slice(int(padding[row]), length)
            torch.testing.assert_close(held.keys[row, :, slots], new.keys[0, :, slots], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(held.values[row, :, slots], new.values[0, :, slots], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("pads", [[2], [0, 3, 6, 1, 2]], ids=len)
@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_commit(
    family: str, window: int, pads: list[int], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, checked = FAMILIES[family](), prompt(len(pads), 9, pads), []
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
    begin = Loop._round

    def round_of(self: Any, rows: Any, *rest: Any) -> Any:
        answer = begin(self, rows, *rest)
        cache = self.target.cache
        assert torch.equal(cache.row_lengths()[rows.active], (rows.lengths - 1)[rows.active])
        assert_rows_as_if_fed(model, cache, rows.ids, rows.padding)
        checked.append(cache.row_lengths().tolist())
        return answer

    monkeypatch.setattr(Loop, "_round", round_of)
    settings = {"window": window, "draft_length": "fixed"}
    with observed(model, lambda drafter: Oracle(truth, 4)) as rounds:
        output = model.generate(
            **inputs, max_new_tokens=STEPS, do_sample=False, cache_implementation=implementation,
            cache_config=settings, prompt_lookup_num_tokens=4,
        )  # fmt: skip
    assert torch.equal(output, truth)
    assert max(rounds.accepted()) >= 2
    assert sum(map(sum, rounds.proposed)) > sum(rounds.accepted()), "some drafts are rejected"
    assert len(checked) > 5
    assert len(pads) == 1 or any(len(set(lengths)) > 2 for lengths in checked), "rows at different places"
