"""Steps of a model on several GPUs as CUDA graphs, with stand-ins for both: graphs in pieces, hooks that are traced."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch._dynamo.utils import counters
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers.patches import capture, segments
from replay_transformers.patches.placement import parts_of
from tests.support.captures import Recorder
from tests.support.dispatch import MODELS, device_map, dispatched, gathered
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import build_nemotron_h, greedy_without_cache, prompt

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def odd_layers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every second layer's tensors were on another GPU."""

    def devices_of(node: torch.fx.Node) -> set[torch.device]:
        if not isinstance(node.meta.get("example_value"), torch.Tensor) or node.op == "placeholder":
            return set()
        names = [str(name) for name, _ in node.meta.get("nn_module_stack", {}).values()]
        layers = [int(found[1]) for name in names if (found := re.search(r"layers\D*(\d+)", name))]
        return {SECOND if layers and layers[0] % 2 else FIRST}

    monkeypatch.setattr(segments, "devices_of", devices_of)
    monkeypatch.setattr(capture, "devices_of", devices_of)


def _config(**more: Any) -> CompileConfig:
    config = CompileConfig(fullgraph=True, dynamic=False, **more)
    config._compile_all_devices = True
    return config


def _on_hooks(model: Any) -> Any:
    """Under accelerate's hooks, which move everything from one name of the CPU to the other."""
    return dispatched(model, ["cpu"] * model.config.num_hidden_layers, "cpu", "cpu")


@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.slow), "nemotron_h"])
def test_pieces_of_a_step_are_captured_one_by_one(family: str, recorder: Recorder, odd_layers_elsewhere: None) -> None:
    """Greedy, then drafts with rejections; two calls on one cache need no new captures."""
    model = MODELS[family]()
    placed = _on_hooks(model)
    settings = {"cache_implementation": "replay_static", "cache_config": {"window": 3}, "do_sample": False}
    settings |= {"compile_config": _config(backend="cudagraphs"), "max_new_tokens": 12}
    for call in range(2):
        inputs = prompt(2, 9, [0, 3], seed=call)
        truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
        assert torch.equal(placed.generate(**inputs, **settings), truth)
    pieces = recorder.recorded
    assert pieces > model.config.num_hidden_layers / 2
    assert recorder.replayed == pieces * (2 * 11 - 1), "each piece, all steps but the first"
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    if family == "qwen3_5":  # drafts, which take another compilation
        settings["cache_config"] = {"window": 3, "draft_length": "fixed"}
        assert torch.equal(placed.generate(**inputs, **settings, prompt_lookup_num_tokens=3), truth)
        assert recorder.recorded > pieces


def test_what_a_step_gives_is_kept(recorder: Recorder, odd_layers_elsewhere: None) -> None:
    """Hidden states of all steps, which come out of the pieces as they are."""
    model, inputs = MODELS["qwen3_5"](), prompt(2, 9, [0, 3])
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True, "cache_implementation": "replay_static"}
    settings = {"max_new_tokens": 6, "do_sample": False, **wanted}
    truth = model.generate(**inputs, **settings).hidden_states
    got = _on_hooks(model).generate(**inputs, **settings, compile_config=_config(backend="cudagraphs")).hidden_states
    assert recorder.replayed
    for step, want in zip(got, truth, strict=True):
        torch.testing.assert_close(step, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("failing", [3, 6])
def test_a_step_that_breaks_off_between_pieces(
    failing: int, recorder: Recorder, odd_layers_elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces before have run: a cache of the user's own is marked, and says so when it is used again."""
    model, inputs, captured = MODELS["qwen3_5"](), prompt(2, 9), itertools.count(1)

    def record(function: Any, operands: Any) -> Any:
        if next(captured) == failing:
            raise torch.OutOfMemoryError("pretended")
        return recorder(function, operands)

    monkeypatch.setattr(capture, "record", record)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4), max_cache_len=40)
    settings = {"max_new_tokens": 12, "do_sample": False, "compile_config": _config(backend="cudagraphs")}
    with pytest.raises(torch.OutOfMemoryError):
        _on_hooks(model).generate(**inputs, **settings, **{CACHE_ARGUMENT: cache})
    with pytest.raises(ValueError, match="broke off"):
        model(torch.tensor([[1], [2]]), **{CACHE_ARGUMENT: cache})


def test_a_refusal_of_a_compiled_step_changes_nothing() -> None:
    model = MODELS["nemotron_h"]()
    cache = rt.ReplayCache(model.config, max_cache_len=40)
    call = model.get_compiled_call(_config(backend="eager", mode=None))
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), **{CACHE_ARGUMENT: cache})
        model.train()
        with torch.enable_grad(), pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException)):
            call(input_ids=torch.tensor([[4]]), **{CACHE_ARGUMENT: cache})
        model.eval()
        got = model(torch.tensor([[4]]), **{CACHE_ARGUMENT: cache}).logits[:, -1]
        truth = model(torch.tensor([[1, 2, 3, 4]]), use_cache=False).logits[:, -1]
    torch.testing.assert_close(got, truth, rtol=0, atol=1e-4)


def test_more_shapes_than_dynamo_takes_by_itself() -> None:
    """Each batch size and length has a graph of its own; none runs uncompiled."""
    model = build_nemotron_h("M")
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(1, 5):
            settings = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "replay_static"}
            model.generate(**prompt(rows, 5), **settings, compile_config=_config(backend="eager", mode=None))
            assert counters["stats"]["unique_graphs"] == rows
        assert torch._dynamo.config.recompile_limit == 2


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_the_compiler_sees_hooks_that_only_move(family: str) -> None:
    model = MODELS[family]()
    placed, inputs = _on_hooks(model), prompt(2, 9, [0, 3])
    hooks = [module._hf_hook for module in placed.modules() if hasattr(module, "_hf_hook")]
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "replay_static"}
    output = placed.generate(**inputs, **settings, compile_config=_config(backend="eager", mode=None))
    assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 6))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert all("pre_forward" in vars(hook) and "post_forward" in vars(hook) for hook in hooks)
    nested = next(module for module in placed.modules() if hasattr(module, "_hf_hook"))
    for _ in range(2):
        add_hook_to_module(nested, AlignDevicesHook("cpu"), append=True)
    removed = remove_hook_from_module(placed.lm_head)
    placed.generate(**inputs, **settings, disable_compile=True)
    hooks += parts_of(nested)
    rt.disable()
    assert not any("pre_forward" in vars(hook) or "post_forward" in vars(hook) for hook in hooks)
    assert not hasattr(removed, "_hf_hook")
    gathered(placed)(**inputs)


def test_hooks_that_load_weights_stay_hidden(tmp_path: Path) -> None:
    placed = MODELS["nemotron_h"]()
    places = ["cpu"] * (placed.config.num_hidden_layers - 1) + ["disk"]
    accelerate.dispatch_model(placed, device_map(placed, places, "cpu", "cpu"), offload_dir=tmp_path)
    placed.generate(**prompt(2, 9), max_new_tokens=2, do_sample=False, cache_implementation="replay")
    offloading = [
        module._hf_hook for module in placed.modules() if getattr(getattr(module, "_hf_hook", None), "offload", False)
    ]
    assert offloading
    assert not any("pre_forward" in vars(hook) for hook in offloading)


def _traced(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    found: list[torch.fx.GraphModule] = []

    def backend(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found.append(graph_module)
        return graph_module.forward

    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return found[0]


def test_where_graphs_are_cut() -> None:
    """At operations between devices, which stay alone; in order, writes in place and unused results included."""
    state = torch.zeros(3)

    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        first = x + 1
        state.add_(first)
        moved = first.clone()
        second = moved * 2
        state.add_(second.sum())
        return second - state

    def reference(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state += x + 1
        state += ((x + 1) * 2).sum()
        return (x + 1) * 2 - state

    x = torch.randn(3)
    graph_module, places = _traced(function, x, state.clone()), iter(["a", "a", "ab", "b", "b", "b", "b"])
    devices = {"a": {FIRST}, "b": {SECOND}, "ab": {FIRST, SECOND}}
    chosen = {n: devices[next(places)] for n in graph_module.graph.nodes if n.op in ("call_method", "call_function")}
    original = segments.devices_of
    segments.devices_of = lambda node: chosen.get(node, set())  # type: ignore[assignment]
    try:
        whole, alone = segments.in_pieces(graph_module)
    finally:
        segments.devices_of = original
    assert list(alone.values()) == [True, False, True]
    got_state, want_state = torch.ones(3), torch.ones(3)
    (got,) = whole(x, got_state)
    torch.testing.assert_close(got, reference(x, want_state))
    torch.testing.assert_close(got_state, want_state)


def test_a_step_that_writes_into_what_it_is_given_is_not_captured(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    for is_inference in (False, True):
        step = capture.cuda_graphs(_traced(lambda x: (x.add_(1),), torch.zeros(2)), ())
        for _ in range(4):
            with torch.inference_mode(is_inference):
                x = torch.zeros(2)
                step(x)
            assert x.tolist() == [1, 1]
    assert not recorder.recorded
    assert caplog.text.count("new each time") == 2
