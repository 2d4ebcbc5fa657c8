"""The shortest way through all of it, for every family: generate with a replay cache, compare, switch off."""

from __future__ import annotations

import pytest
import torch

import replay_transformers as rt
from tests.support import models

pytestmark = [pytest.mark.core, pytest.mark.smoke]


@pytest.mark.parametrize("cache", ["replay", "replay_static"])
@pytest.mark.parametrize("family", models.ALL_FAMILIES)
def test_generate_as_stock(family: str, cache: str) -> None:
    model = models.ALL_FAMILIES[family]()
    arguments = models.prompt(2, 9, pads=[3, 0]) | {"max_new_tokens": 40, "do_sample": False}
    stock = model.generate(**arguments)
    with rt.enable():
        models.assert_state_matters(model)
        replayed = model.generate(**arguments, cache_implementation=cache)
    assert torch.equal(replayed, stock)
    assert not rt.is_enabled()
    assert torch.equal(model.generate(**arguments), stock)
