"""Small states on a GPU: single tokens are written through, as in eager decoding, and no record is kept.

Here the CPU counts as the GPU, and the reference runs in place of the kernel.
"""

from __future__ import annotations

import pytest
import torch

import replay_transformers as rt
from replay_transformers import cursor as cursor_module
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, greedy_without_cache, prompt

pytestmark = pytest.mark.usefixtures("enabled")

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor_module, "THROUGH_DEVICE", "cpu")


def _pointers(cache: rt.ReplayCache) -> list[list[int]]:
    return [tensor.tolist() for tensor in cache.cursor.tensors()]


@EVERY_FAMILY
@pytest.mark.parametrize("padding", [[0], [0, 3]], ids=["one-row", "left-padding"])
def test_tokens_equal_a_forward_without_cache(family: str, padding: list[int]) -> None:
    model, inputs = FAMILIES[family](), prompt(len(padding), 12, padding)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4))
    output = model.generate(**inputs, max_new_tokens=14, do_sample=False, **{CACHE_ARGUMENT: cache})
    assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 14))
    rows = len(padding)
    assert _pointers(cache) == [[12 + 13] * rows, [0] * rows, [0] * rows]  # everything is in the state


@EVERY_FAMILY
def test_the_state_is_that_of_the_ring(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = FAMILIES[family](), prompt(2, 12, [0, 3])
    caches = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(cursor_module, "THROUGH_DEVICE", device)
        caches.append(rt.ReplayCache(model.config, rt.ReplayConfig(window=4)))
        model.generate(**inputs, max_new_tokens=9, do_sample=False, **{CACHE_ARGUMENT: caches[-1]})
    through, ring = caches
    assert any(any(row) for row in _pointers(ring)[1:])
    for index, layer in enumerate(through.layers):
        if layer in through.replay_layers:
            # float32 over 21 tokens, in another order
            torch.testing.assert_close(through.state(index), ring.state(index), rtol=1e-4, atol=1e-5)


@EVERY_FAMILY
def test_recording_goes_back_to_the_ring_and_rolls_back(family: str) -> None:
    model, ids = FAMILIES[family](), prompt(1, 20, [0])["input_ids"]
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, max_draft=3))
    with torch.no_grad():
        model(ids[:, :8], **{CACHE_ARGUMENT: cache})
        model(ids[:, 8:9], **{CACHE_ARGUMENT: cache})
        assert _pointers(cache) == [[9], [0], [0]]
        cache.activate_past_recording()
        model(ids[:, 9:12], **{CACHE_ARGUMENT: cache})
        assert _pointers(cache) == [[9], [0], [3]]
        cache.crop(-2)
        logits = model(ids[:, 10:11], **{CACHE_ARGUMENT: cache}).logits
        expected = model(ids[:, :11], use_cache=False).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_large_states_and_explicit_choices_use_the_ring(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = FAMILIES["qwen3_5"](), prompt(1, 12, [0])
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, impl=impl))
    if impl == "auto":
        monkeypatch.setattr(cursor_module, "WRITE_THROUGH_BYTES", cache.cursor.state_bytes - 1)
    model.generate(**inputs, max_new_tokens=3, do_sample=False, **{CACHE_ARGUMENT: cache})
    assert _pointers(cache) == [[12], [2], [0]]


def test_flush_and_reset_empty_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = FAMILIES["nemotron_h"](), prompt(1, 20, [0])["input_ids"]
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4))
    with torch.no_grad():
        monkeypatch.setattr(cursor_module, "THROUGH_DEVICE", "cuda")
        model(ids[:, :3], **{CACHE_ARGUMENT: cache})
        monkeypatch.setattr(cursor_module, "THROUGH_DEVICE", "cpu")
        model(ids[:, 3:4], **{CACHE_ARGUMENT: cache})
        assert _pointers(cache) == [[0], [4], [0]]  # what is in the ring stays there
        cache.flush()
        logits = model(ids[:, 4:5], **{CACHE_ARGUMENT: cache}).logits
        assert _pointers(cache) == [[5], [0], [0]]
        expected = model(ids[:, :5], use_cache=False).logits[:, -1:]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        cache.reset()
        model(ids[:, :1], **{CACHE_ARGUMENT: cache})
    assert _pointers(cache) == [[1], [0], [0]]
