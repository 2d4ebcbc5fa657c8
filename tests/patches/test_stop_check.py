"""When all rows are finished is read a step late on a GPU; what `generate` returns is the same.

On the CPU transformers' class runs with an event that is always over; tests/gpu has the real one.
"""

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import utils

import replay_transformers as rt
from tests.support.models import FAMILIES, build_qwen3_5, prompt

pytestmark = [
    pytest.mark.usefixtures("enabled"),
    pytest.mark.skipif(not hasattr(utils, "DeferredStopCheck"), reason="transformers reads it at once before 5.24"),
]

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_who_reads_late() -> None:
    model = build_qwen3_5()
    replay, other = rt.ReplayCache(model.config), DynamicCache(config=model.config)
    asked = itertools.product((CUDA, CPU), (replay, other), (False, True), (False, True))
    late = [case for case in asked if utils.DeferredStopCheck.is_supported(*case)]
    assert late == [(CUDA, replay, False, False)]


class _Event:
    """Of a device that has done everything at once."""

    def __init__(self, **options: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Streamer:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens.append(tokens)

    def end(self) -> None: ...


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_end_early(family: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = FAMILIES[family](), prompt(2, 9, [0, 4])
    arguments: dict[str, Any] = {"cache_implementation": implementation, "do_sample": False, "max_new_tokens": 24}
    plain = model.generate(**inputs, **arguments)
    ends = [int(plain[row, 9 + place]) for row, place in ((0, 5), (1, 9))]
    arguments |= {"eos_token_id": ends, "pad_token_id": 0}
    want = model.generate(**inputs, **arguments)
    assert want.shape[1] < plain.shape[1]

    forwards, checks = [0], list[int]()
    model.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    original = utils.DeferredStopCheck
    monkeypatch.setattr(utils.torch, "Event", _Event)
    monkeypatch.setattr(original, "is_supported", staticmethod(lambda *_, **__: checks.append(1) or True))
    assert torch.equal(model.generate(**inputs, **arguments), want)
    assert forwards == [want.shape[1] - 9 + 1], "one forward in vain"
    streamer, first = _Streamer(), {name: value[:1] for name, value in inputs.items()}
    alone = model.generate(**first, **arguments, streamer=streamer)
    assert torch.equal(torch.cat([tokens.flatten() for tokens in streamer.tokens]), alone[0])
    assert len(checks) == 2
