"""Rounds that begin before the host knows how the last one ended: the same tokens, and one round in vain.

On a GPU with fixed shapes; here the CPU is taken for one.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay_transformers.generation import loop
from replay_transformers.generation.rows import Rows
from tests.support import mtp
from tests.support.batches import Oracle, observed
from tests.support.models import FAMILIES, greedy_without_cache, prompt
from tests.support.speculation import perturbed
from tests.test_assisted import tiny_llama

pytestmark = pytest.mark.usefixtures("enabled")
STEPS = 30


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rounds the host had not heard of, whenever one began."""
    unheard: list[int] = []
    begin = loop.Loop._round

    def round_of(self: Any, rows: Rows, *rest: Any) -> Any:
        unheard.append(rows.unheard)
        return begin(self, rows, *rest)

    monkeypatch.setattr(loop, "AHEAD_ON", "cpu")
    monkeypatch.setattr(loop.Loop, "_round", round_of)
    return unheard


def _settings(**more: Any) -> dict[str, Any]:
    settings = {"cache_implementation": "replay_static", "cache_config": {"window": 5, "draft_length": "fixed"}}
    return {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, **settings, **more}


@pytest.mark.parametrize("pattern", ["mixed", "wrong", "right"])
@pytest.mark.parametrize("pads", [[0], [0, 3, 6, 1, 2]], ids=len)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_greedy_decoding(family: str, pads: list[int], pattern: str, ahead: list[int]) -> None:
    model, inputs = FAMILIES[family](), prompt(len(pads), 9, pads)
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
    oracle = Oracle(truth, 4, pattern)
    with observed(model, lambda drafter: oracle) as rounds:
        output = model.generate(**inputs, **_settings(), prompt_lookup_num_tokens=4)
    assert torch.equal(output, truth)
    rounds.check(accepting={"mixed": 2, "wrong": 0, "right": 4}[pattern], rejecting=pattern != "right")
    assert max(ahead[1:]) > 0
    assert not any(rounds.added[-1]), "one round in vain"
    assert any(rounds.added[-2]), "and no more"


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_end(family: str, ahead: list[int]) -> None:
    model, inputs = FAMILIES[family](), prompt(3, 9, [0, 3, 6])
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
    ends = [int(truth[row, 9 + place]) for row, place in ((0, 7), (1, 11), (2, 4))]
    arguments = _settings(eos_token_id=ends, assistant_model=perturbed(model, 0.03))
    plain = model.generate(**inputs, **_settings(eos_token_id=ends))
    assert torch.equal(model.generate(**inputs, **arguments), plain)
    assert max(ahead) > 0


def test_what_the_host_must_see_is_waited_for(ahead: list[int]) -> None:
    model, inputs = FAMILIES["qwen3_5"](), prompt(2, 9, [0, 3])
    lookup = _settings(prompt_lookup_num_tokens=4)
    for more in ({"repetition_penalty": 1.3}, {"return_dict_in_generate": True, "output_scores": True}):
        plain = model.generate(**inputs, **_settings(**more))
        output = model.generate(**inputs, **lookup, **more)
        pairs = [(output, plain)] if isinstance(output, torch.Tensor) else [(output.sequences, plain.sequences)]
        assert all(torch.equal(got, want) for got, want in pairs)
    growing = lookup | {"cache_implementation": "replay"}
    model.generate(**inputs, **growing)
    assert not any(ahead)


def test_bounds_on_lengths() -> None:
    rows = Rows(torch.ones(2, 4, dtype=torch.int64), None, 0)
    rows.limit = 9
    first = torch.tensor([3, 1])
    rows.append(torch.ones(2, 3, dtype=torch.int64), first)
    one = rows.ask()
    rows.append(torch.ones(2, 3, dtype=torch.int64), torch.tensor([0, 2]))
    two = rows.ask(torch.tensor([5, 6]))
    assert rows.longest == 9  # 4 + 3 + 3, and no more than the limit
    assert rows.hear(one) == []
    assert (rows.host_lengths, rows.unheard, rows.longest) == ([7, 5], 3, 9)
    assert rows.hear(two) == [[5, 6]]
    assert (rows.host_lengths, rows.unheard, rows.longest) == ([7, 7], 0, 7)
    assert rows.hear(two) == [[5, 6]]
    assert rows.unheard == 0


READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique", "is_nonzero")


class Waiting(TorchDispatchMode):
    """Notes where values are read, for which the host waits on a GPU, but for what asks only on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            frames = [frame for frame in traceback.extract_stack() if "test_ahead" not in frame.filename]
            if not any(frame.name == "_folds" for frame in frames):
                self.places.add(f"{func}: {' < '.join(f'{frame.name}:{frame.lineno}' for frame in frames[:-5:-1])}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafter", ["lookup", "state-space assistant", "attention assistant"])
@pytest.mark.parametrize("ends", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_reads_nothing_in_a_round(
    family: str, ends: bool, drafter: str, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where rows are finished: all that it is told was sent beforehand."""
    model, inputs, more = FAMILIES[family](), prompt(5, 9, [0, 3, 6, 1, 2]), {}
    if ends:
        truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], STEPS)
        more["eos_token_id"] = [int(truth[row, 9 + place]) for row, place in ((0, 7), (1, 11))]
    plain = model.generate(**inputs, **_settings(**more))
    drafters: dict[str, dict[str, Any]] = {
        "lookup": {"prompt_lookup_num_tokens": 4},
        "state-space assistant": {"assistant_model": perturbed(model, 0.03)},
        "attention assistant": {"assistant_model": tiny_llama()},
    }
    assert_no_reads(monkeypatch, lambda: model.generate(**inputs, **_settings(**more, **drafters[drafter])), plain)
    assert max(ahead) > 0


@mtp.NEEDS_MTP
@pytest.mark.parametrize("family", FAMILIES)
def test_the_host_reads_nothing_in_a_round_of_a_head(
    family: str, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = mtp.MODELS[family](), mtp.inputs(family)
    arguments = _settings(use_mtp=True, num_assistant_tokens=3, max_new_tokens=mtp.STEPS)
    assert_no_reads(monkeypatch, lambda: model.generate(**inputs, **arguments), mtp.truth(family))
    assert max(ahead) > 0


def assert_no_reads(
    monkeypatch: pytest.MonkeyPatch, generate: Callable[[], torch.Tensor], expected: torch.Tensor
) -> None:
    waiting = Waiting()
    for name in ("_round", "_draft"):
        function = getattr(loop.Loop, name)

        def watched(self: Any, *arguments: Any, function: Any = function) -> Any:
            with waiting:
                return function(self, *arguments)

        monkeypatch.setattr(loop.Loop, name, watched)
    assert torch.equal(generate(), expected)
    assert not waiting.places
