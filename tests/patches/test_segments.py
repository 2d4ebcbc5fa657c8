"""Steps of a model on several GPUs as CUDA graphs, with stand-ins for both: graphs in pieces, hooks that are traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers.patches import capture, segments
from tests.patches.test_capture import Recorder
from tests.support.dispatch import MODELS, device_map, dispatched, gathered
from tests.support.models import greedy_without_cache, prompt
from tests.support.speculation import perturbed

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Everything is captured that runs on one device."""
    stand_in = Recorder()
    monkeypatch.setattr(capture, "record", stand_in)
    monkeypatch.setattr(capture, "is_capturable", lambda inputs: all(map(torch.is_tensor, inputs)))
    return stand_in


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


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
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
    assistant = perturbed(model, 0.05)
    assert torch.equal(placed.generate(**inputs, **settings, assistant_model=assistant), truth)
    assert recorder.recorded > pieces


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
    rt.disable()
    assert not any("pre_forward" in vars(hook) or "post_forward" in vars(hook) for hook in hooks)
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
    step = capture.cuda_graphs(_traced(lambda x: (x.add_(1),), torch.zeros(2)), ())
    for _ in range(4):
        x = torch.zeros(2)
        step(x)
        assert x.tolist() == [1, 1]
    assert not recorder.recorded
    assert caplog.text.count("new each time") == 1
