"""States that are not finite show in the outputs, and `check_finite` says where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replay_transformers as rt
from replay_transformers.kernels.formats import StoredState
from tests.support.cached import feed, ids
from tests.support.models import FAMILIES

pytestmark = pytest.mark.usefixtures("enabled")

SETTINGS: list[dict[str, Any]] = [
    {},
    *({"checkpoint": name} for name in ("bfloat16", "float16", "float16_sr", "fp8", "fp8_sr", "nvfp4")),
    *({"readout": name} for name in ("float16", "fp8", "nvfp4")),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_finite_is_found(family: str, settings: dict[str, Any]) -> None:
    model, tokens = FAMILIES[family](), ids(3, 12)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=3, **settings))
    cache.check_finite()  # nothing yet
    feed(model, cache, tokens[:, :8], 6, 1, 1)
    cache.check_finite()
    layer = cache.replay_layers[0]
    if isinstance(layer.checkpoint, StoredState):
        broken = layer.checkpoint.read()
        broken[1, 0, 0, 0] = torch.inf
        layer.checkpoint.write(broken, torch.zeros(3, dtype=torch.int64))
    else:
        layer.checkpoint[1, 0, 0, 0] = torch.inf
    index = cache.layers.index(layer)
    with pytest.raises(ValueError, match=rf"layer {index}, checkpoint, rows \[1\]"):
        cache.check_finite()
    logits = feed(model, cache, tokens[:, 8:], 1, 1, 1, 1)  # over a flush, which renews the copy
    assert logits[[0, 2]].isfinite().all()
    assert not logits[1].isfinite().all()
    if cache.replay_config.readout is not None:
        with pytest.raises(ValueError, match="readout"):
            cache.check_finite()
    cache.reset()
    cache.check_finite()
