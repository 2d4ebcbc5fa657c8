"""Drafters of compiled targets on a GPU: their forwards are CUDA graphs as well, and draft what they drafted before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from tests.patches.test_recorded_drafters import DRAFTS, Drafts
from tests.support.models import WITHOUT_EXPERTS, greedy_without_cache, prompt
from tests.support.mtp import MODELS, NEEDS_MTP, STEPS, inputs
from tests.support.speculation import perturbed
from tests.test_assisted import tiny_llama

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]
GRAPHS = {"compile_config": CompileConfig(backend="cudagraphs")}
FIXED = {"do_sample": False, "cache_implementation": "replay_static", "cache_config": {"draft_length": "fixed"}}


def check(model: Any, given: dict[str, torch.Tensor], drafts: Drafts, captures: list[torch.device], **more: Any) -> int:
    """Without graphs, and four times with them; how many graphs were captured."""
    expected = greedy_without_cache(model, given["input_ids"], given["attention_mask"], STEPS)
    arguments, captured = {"max_new_tokens": STEPS, **FIXED, **more}, []
    for compiling in ({"disable_compile": True}, GRAPHS, GRAPHS, GRAPHS, GRAPHS):
        assert torch.equal(model.generate(**given, **arguments, **compiling), expected)
        captured.append(len(captures))
    assert captured[0] == 0
    assert captured[1] >= 3
    assert captured[-1] == captured[-2], "later calls find what earlier ones captured"
    assert all(call == drafts.calls[0] for call in drafts.calls)
    return captured[-1]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    return Drafts(monkeypatch)


@NEEDS_MTP
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("family", list(MODELS))
def test_heads(family: str, rows: int, drafts: Drafts, captures: list[torch.device]) -> None:
    given = {name: tensor.cuda() for name, tensor in inputs(family, rows).items()}
    check(MODELS[family]().cuda(), given, drafts, captures, use_mtp=True, num_assistant_tokens=DRAFTS)


@pytest.mark.parametrize("pads", [[0], [2]], ids=["plain", "padded"])
@pytest.mark.parametrize("kind", ["attention", "states"])
@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_assistants(family: str, kind: str, pads: list[int], drafts: Drafts, captures: list[torch.device]) -> None:
    cpu = WITHOUT_EXPERTS[family]()
    assistant = (tiny_llama() if kind == "attention" else perturbed(cpu, 0.03)).cuda()
    assistant.generation_config.num_assistant_tokens = DRAFTS
    given = {name: tensor.cuda() for name, tensor in prompt(len(pads), 9, pads).items()}
    check(cpu.cuda(), given, drafts, captures, assistant_model=assistant)
