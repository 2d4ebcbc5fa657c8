"""CUDA graphs without inductor, with a stand-in for the graph: what is captured, copied, replayed, and not advanced."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers.patches import capture
from tests.support.captures import Recorder
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, greedy_without_cache, prompt

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]


def _arguments(steps: int = 20, **more: Any) -> dict[str, Any]:
    config = CompileConfig(backend="cudagraphs", fullgraph=True)
    config._compile_all_devices = True
    return {"max_new_tokens": steps, "do_sample": False, "compile_config": config, **more}


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_one_capture_serves_all_steps_and_calls(family: str, recorder: Recorder) -> None:
    model = FAMILIES[family]()
    arguments = _arguments(cache_implementation="replay_static", cache_config={"window": 3})
    for call in range(3):
        inputs = prompt(2, 9, [0, 3], seed=call)
        output = model.generate(**inputs, **arguments)
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 20))
    assert counters["stats"]["unique_graphs"] == 1
    assert recorder.recorded == 1
    assert recorder.replayed == 3 * 19 - 1, "all but the prompts and the very first step"
    assert arguments["compile_config"].backend == "cudagraphs", "the user's own is left alone"


def test_a_cache_of_the_users_own_and_outputs_that_are_kept(recorder: Recorder) -> None:
    model, inputs = FAMILIES["qwen3_5"](), prompt(2, 9, [0, 3])
    wanted = {"return_dict_in_generate": True, "output_logits": True}
    truth = model.generate(**inputs, max_new_tokens=20, do_sample=False, **wanted)
    for _ in range(2):
        cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4), max_cache_len=40)
        output = model.generate(**inputs, **_arguments(**{CACHE_ARGUMENT: cache}), **wanted)
        assert torch.equal(output.sequences, truth.sequences)
        torch.testing.assert_close(torch.stack(output.logits), torch.stack(truth.logits), rtol=0, atol=2e-4)
        assert int(cache.get_seq_length()) == 9 + 19
    assert recorder.recorded == 2, "another cache lies at other addresses"
    assert recorder.replayed == 18 + 19, "of the first cache's steps the first was the warm-up"


def test_other_caches_and_backends_are_left_alone(recorder: Recorder) -> None:
    model, inputs = FAMILIES["nemotron_h"](), prompt(2, 9)
    config = CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    assert capture.with_own_backend(config) is config
    assert capture.with_own_backend(None) is None
    seen = []
    compiled = type(model).get_compiled_call

    def get_compiled_call(self: Any, compile_config: Any) -> Any:
        seen.append(compile_config.backend)
        return compiled(self, config)

    model.get_compiled_call = get_compiled_call.__get__(model)
    model.generate(**inputs, **_arguments(4, cache_implementation="static"))
    assert seen == ["cudagraphs"]
    assert not recorder.recorded


def test_inputs_that_move_are_copied_and_the_others_are_not(recorder: Recorder) -> None:
    weight, state = torch.nn.Parameter(torch.randn(3)), torch.zeros(3)
    torch._dynamo.mark_static_address(state)

    def function(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state.add_(x)
        return ((state * weight).detach(),)

    step = capture.cuda_graphs(torch.fx.symbolic_trace(function), ())
    total, outputs = torch.zeros(3), []
    for _ in range(5):
        x = torch.randn(3)
        total += x
        outputs.append((step(x, weight, state)[0], total * weight))
        assert torch.equal(state, total), "the state advances once per call"
    assert (recorder.recorded, recorder.replayed) == (1, 4)
    assert all(torch.equal(got, truth) for got, truth in outputs), "an output is not overwritten by later steps"
    other = state.clone()
    torch._dynamo.mark_static_address(other)
    step(x, weight, other)
    assert torch.equal(other, total + x)
    assert torch.equal(state, total)
    assert recorder.recorded == 2


def test_without_a_gpu_it_runs_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    capture._say_once.cache_clear()
    model, inputs = FAMILIES["qwen3_5"](), prompt(2, 9, [0, 3])
    output = model.generate(**inputs, **_arguments(8, cache_implementation="replay_static"))
    assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 8))
    assert caplog.text.count("one GPU") == 1


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_another_batch_and_length_get_graphs_of_their_own(family: str, recorder: Recorder) -> None:
    """Sizes as inputs of one graph for all would mean no capture at all."""
    model = FAMILIES[family]()
    for rows, steps in ((2, 8), (1, 8), (2, 14), (2, 8)):
        recorder.replayed, inputs = 0, prompt(rows, 5)
        output = model.generate(**inputs, **_arguments(steps, cache_implementation="replay_static"))
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], steps))
        assert recorder.replayed >= steps - 2 - 1  # all decode steps but the first, a warm-up
