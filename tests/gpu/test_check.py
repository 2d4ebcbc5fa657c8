"""The peak of memory that `replay-transformers check` predicts, against what the allocator saw."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers.cli.check_memory import Load, predict_peak
from scripts.benchmarks.presets import load_presets
from scripts.benchmarks.weights import build_model

# tens of GiB: with pytest-xdist, one after the other
pytestmark = [pytest.mark.no_poison, pytest.mark.xdist_group("large")]

# of the layers that are kept, beside embeddings of up to 1.2 GiB; of all layers of Nemotron-3-Nano-4B
WEIGHTS, ALL_WEIGHTS = 3 * 2**30, 9 * 10**9
NEW_TOKENS, MOST_PROMPT = 20, 256


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    rt.disable()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _check(name: str, weight_bytes: int, rows: int, prompt: int, **settings: Any) -> int:
    """Predict, then measure; the number of layers. Nothing can take a token back in such a call: caches have no room
    for drafts."""
    preset = load_presets()[name]
    model, layers = build_model(preset, "cuda", weight_bytes=weight_bytes)
    ids = torch.randint(1, model.config.vocab_size, (rows, prompt), device="cuda")
    load = Load(rt.ReplayConfig(max_draft=0, **settings), prompt + NEW_TOKENS, prompt, torch.bfloat16)
    predicted = predict_peak(preset.build("meta", torch.bfloat16, layers).eval(), load, rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with rt.enable():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            cache_implementation="replay_static",
            cache_config=settings,
            compile_config=CompileConfig(backend="cudagraphs"),
        )
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated()
    assert predicted.total == pytest.approx(measured, rel=0.1), (predicted, measured)
    return layers


@pytest.mark.parametrize("settings", [{}, {"readout": "fp8"}, {"checkpoint": "nvfp4"}], ids=str)
@pytest.mark.parametrize("name", ["nemotron-3-nano-4b", "qwen3.5-4b"])
@pytest.mark.parametrize(("rows", "prompt"), [(128, 64), (8, MOST_PROMPT)])
def test_predicted_peaks(name: str, rows: int, prompt: int, settings: dict[str, str]) -> None:
    """Prompts are scanned plainly: flash-linear-attention is left out here, and mamba-ssm is not installed."""
    _check(name, WEIGHTS, rows, prompt, **settings)


def test_a_whole_model() -> None:
    """Nemotron-3-Nano-4B with all its layers, batch 256."""
    layers = _check("nemotron-3-nano-4b", ALL_WEIGHTS, 256, 64)
    assert layers == len(load_presets()["nemotron-3-nano-4b"].geometries())
