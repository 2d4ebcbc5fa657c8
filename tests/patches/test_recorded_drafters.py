"""Drafters of compiled targets: their forwards are recorded as CUDA graphs (a stand-in here) or compiled with them.

What a wrong cache does to a drafter is not seen in the tokens, which the target decides: the drafts are compared.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers.generation.drafters.assistant import Assistant
from replay_transformers.generation.drafters.mtp import MultiTokenPrediction
from replay_transformers.generation.row_cache import RowCache
from replay_transformers.generation.row_forward import RowForward
from replay_transformers.generation.watch import watched
from replay_transformers.patches import capture, registry
from tests.support.batches import observed
from tests.support.captures import Recorder
from tests.support.models import FAMILIES, greedy_without_cache, prompt
from tests.support.mtp import MODELS, NEEDS_MTP, inputs, truth
from tests.support.speculation import never_right, never_unsure, perturbed
from tests.test_assisted import tiny_llama

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]
STEPS, DRAFTS = 24, 3


def arguments(is_compiled: bool, steps: int = STEPS, **more: Any) -> dict[str, Any]:
    given = {"max_new_tokens": steps, "do_sample": False, "cache_implementation": "replay_static", **more}
    given.setdefault("cache_config", {"window": 3, "draft_length": "fixed"})
    if is_compiled:
        given["compile_config"] = CompileConfig(backend="cudagraphs", fullgraph=True)
        given["compile_config"]._compile_all_devices = True
    return given


class Drafts:
    """The tokens of every draft, by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[list[int]]] = []
        for kind in (Assistant, MultiTokenPrediction):
            self._watch(monkeypatch, kind)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
        start, draft = kind.start, kind.draft

        def started(drafter: Any, *args: Any) -> None:
            self.calls.append([])
            start(drafter, *args)

        def drafted(drafter: Any, *args: Any) -> Any:
            found = draft(drafter, *args)
            self.calls[-1] += found.tokens.tolist()
            return found

        monkeypatch.setattr(kind, "start", started)
        monkeypatch.setattr(kind, "draft", drafted)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    return Drafts(monkeypatch)


@NEEDS_MTP
@pytest.mark.parametrize(("family", "rows"), [("qwen3_5", 1), ("nemotron_h", 5)])
def test_heads(family: str, rows: int, recorder: Recorder, drafts: Drafts) -> None:
    model, given, replays = MODELS[family](), inputs(family, rows), []
    more = {"use_mtp": True, "num_assistant_tokens": DRAFTS}
    assert torch.equal(model.generate(**given, **arguments(False, **more)), truth(family)[:rows])
    assert not recorder.recorded
    for _ in range(3):
        before = recorder.replayed
        with observed(model, is_compiled=True) as rounds:
            assert torch.equal(model.generate(**given, **arguments(True, **more)), truth(family)[:rows])
        replays.append(recorder.replayed - before)
        assert set(rounds.drafted) == {DRAFTS}
    assert drafts.calls[0] == drafts.calls[1] == drafts.calls[2] == drafts.calls[3]
    # the target's, the head's of one token, and of what a round had verified
    assert recorder.recorded == 3, "later calls find what the first one recorded"
    count = len(rounds.drafted)
    assert replays[1:] == [count + count * (DRAFTS - 1) + count - 1] * 2, "and run nothing else behind the prompts"


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_5", "attention"), ("nemotron_h", "attention"), ("nemotron_h", "states")]
)
def test_assistants(family: str, kind: str, recorder: Recorder, drafts: Drafts) -> None:
    model, given = FAMILIES[family](), prompt(1, 9, [2])
    assistant = tiny_llama() if kind == "attention" else perturbed(model, 0.03)
    assistant.generation_config.num_assistant_tokens = DRAFTS
    expected, replays = greedy_without_cache(model, given["input_ids"], given["attention_mask"], STEPS), []
    assert torch.equal(model.generate(**given, **arguments(False), assistant_model=assistant), expected)
    for _ in range(3):
        before = recorder.replayed
        with watched() as rounds:
            assert torch.equal(model.generate(**given, **arguments(True), assistant_model=assistant), expected)
        replays.append(recorder.replayed - before)
    assert drafts.calls[0] == drafts.calls[1] == drafts.calls[2] == drafts.calls[3]
    # the target's of a draft and one more, at the very end perhaps of one token, the assistant's of two and of one
    without = rounds.forwards - len(drafts.calls[-1])
    assert without in (0, 1)
    assert recorder.recorded == 3 + without
    assert replays[1:] == [rounds.forwards + DRAFTS * (rounds.forwards - without)] * 2


@pytest.mark.parametrize("kind", ["attention", "states"])
def test_a_row_of_a_batch_that_ends_early(kind: str, recorder: Recorder) -> None:
    """It takes part until the others end, and grows in the assistant's cache: that of a batch is not fixed."""
    model, given, steps = FAMILIES["nemotron_h"](), prompt(2, 9), 120
    assistant = never_unsure(tiny_llama() if kind == "attention" else never_right(model))
    assistant.generation_config.num_assistant_tokens = 12
    plain = model.generate(**given, **arguments(False, steps))
    only_first = set(plain[0, 14:].tolist()) - set(plain[1].tolist())
    assert only_first, "tokens that end the first row and not the second one"
    ends = {"eos_token_id": sorted(only_first), "pad_token_id": 0}
    expected = model.generate(**given, **arguments(False, steps, **ends))
    assert torch.equal(model.generate(**given, **arguments(True, steps, **ends), assistant_model=assistant), expected)
    assert recorder.recorded <= 2, "the target's"


def test_modes_of_torch_that_change_between_calls(recorder: Recorder) -> None:
    model, given, assistant = FAMILIES["nemotron_h"](), prompt(1, 9), tiny_llama()
    assistant.generation_config.num_assistant_tokens = DRAFTS
    expected = greedy_without_cache(model, given["input_ids"], given["attention_mask"], 8)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert torch.equal(model.generate(**given, **arguments(True, 8), assistant_model=assistant), expected)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(**given, **arguments(True, 8), assistant_model=assistant)
    assert torch.equal(model.generate(**given, **arguments(True, 8), assistant_model=assistant), expected)


def test_what_a_call_leaves_is_freed_without_the_collector() -> None:
    cache = RowCache(1, slots=8)
    forward = RowForward(
        cache, lambda tokens, mask, positions, cache: tokens, "sdpa", torch.float32, capture.recorded, (1,)
    )
    cache.begin(torch.zeros(1, dtype=torch.int64))
    for _ in range(3):
        forward(torch.ones(1, 1, dtype=torch.int64))
    reference = weakref.ref(forward)
    gc.disable()
    try:
        del forward
        assert reference() is None
    finally:
        gc.enable()


@NEEDS_MTP
def test_drafts_of_changing_length(recorder: Recorder) -> None:
    """Forwards of other lengths run as they are, on the same buffers."""
    model, given = MODELS["nemotron_h"](), inputs("nemotron_h")
    more = {"use_mtp": True, "num_assistant_tokens": 6, "cache_config": {"window": 3}}
    for _ in range(2):
        output = model.generate(**given, **arguments(True, **more))
        assert torch.equal(output, truth("nemotron_h"))


@NEEDS_MTP
def test_what_cannot_be_captured_runs_as_it_is(
    recorder: Recorder, drafts: Drafts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(function: Any, operands: Any) -> Any:
        if getattr(function, "__name__", "") == "run_weakly":
            raise RuntimeError("operation not permitted when stream is capturing")
        return recorder(function, operands)

    monkeypatch.setattr(capture, "record", record)
    model, given, more = MODELS["nemotron_h"](), inputs("nemotron_h"), {"use_mtp": True, "num_assistant_tokens": DRAFTS}
    model.generate(**given, **arguments(False, **more))
    assert torch.equal(model.generate(**given, **arguments(True, **more)), truth("nemotron_h"))
    assert drafts.calls[0] == drafts.calls[1]
    assert caplog.text.count("a forward cannot be captured, running without them: operation not permitted") == 2
    assert recorder.recorded == 1, "the target's"


def test_what_is_kept_fits_the_weights_and_goes_with_the_assistant(recorder: Recorder, drafts: Drafts) -> None:
    model, given, kept = FAMILIES["qwen3_5"](), prompt(1, 9), []
    assistant, other = tiny_llama(), tiny_llama(seed=1)
    assistant.generation_config.num_assistant_tokens = other.generation_config.num_assistant_tokens = DRAFTS
    pool = registry._active.settings.forwards
    model.generate(**given, **arguments(True), assistant_model=assistant)
    assistant.load_state_dict(copy.deepcopy(other).state_dict(), assign=True)
    for drafter in (assistant, other):
        model.generate(**given, **arguments(True), assistant_model=drafter)
        kept += [weakref.ref(forward) for forward in pool._idle[drafter].values()]
    assert drafts.calls[0] != drafts.calls[1] == drafts.calls[2]
    assert len(kept) == 3, "two of the first one, which had other weights before"
    del assistant, drafter
    gc.collect()
    assert [reference() is None for reference in kept] == [True, True, False]
    rt.disable()
    gc.collect()
    assert kept[2]() is None


def test_a_cache_of_fixed_width() -> None:
    cache = RowCache(1, slots=60)
    cache.begin(torch.tensor([0, 2]))
    cache.advance(60)
    keys = cache.update(torch.ones(2, 1, 60, 4), torch.ones(2, 1, 60, 4), 0)[0]
    assert keys.shape[2] == 60, "a prompt sees itself"
    held = cache.layers[0].keys
    with pytest.raises(ValueError, match="60 tokens in the longest row and 5 new ones exceed the 64 slots"):
        cache.advance(5)
    assert cache.rows.lengths.tolist() == [60, 60]
    cache.advance(4)
    assert cache.update(torch.ones(2, 1, 4, 4), torch.ones(2, 1, 4, 4), 0)[0] is held
    cache.begin(torch.tensor([0, 0]), torch.tensor([3, 4]))
    assert cache.layers[0].keys is held
    assert not held.any()
    cache.advance(2)
    assert cache.positions().tolist() == [[3, 4], [4, 5]]
    with pytest.raises(ValueError, match="fixed width"):
        RowForward(RowCache(1), lambda: torch.zeros(1), "sdpa", torch.float32, record=capture.recorded)
