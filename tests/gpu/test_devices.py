"""Models spread over a GPU and the CPU, and over all GPUs there are: the results of one device.

The bodies are those of tests/test_devices.py, where the devices are pretended.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch._dynamo.utils import counters
from transformers import CompileConfig

from replay_transformers.patches import capture
from tests.support import mtp
from tests.support.dispatch import (
    EVERY_CALL,
    MODELS,
    assert_same,
    assistant_for,
    dispatched,
    places_of,
    sequences,
    session,
    splits,
)
from tests.support.generation import CACHE_ARGUMENT

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]

SEVERAL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more")
SPLITS = list(splits(4))
GPUS = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
FIRST = "cuda:0"


def places(layers: int, split: str, devices: list[Any]) -> list[Any]:
    """Each layer's device; the layers that a split has on the second one are dealt out among all but the first."""
    return [
        devices[1 + i % (len(devices) - 1)] if other else devices[0] for i, other in enumerate(splits(layers)[split])
    ]


def check(family: str, split: str, devices: list[str], ids: str, impl: str) -> None:
    """All kinds of calls, and a session with rollbacks, on these devices against the CPU."""
    model = MODELS[family]()
    assistant, count, last = assistant_for(model), model.config.num_hidden_layers, devices[-1]
    where, last = places(count, split, devices), FIRST if last == "cpu" else last
    truth = sequences(model, assistant, EVERY_CALL)
    placed, its = dispatched(model, where, FIRST, last), dispatched(assistant, where[::-1], FIRST, last)
    assert sequences(placed, its, EVERY_CALL, ids, impl, disable_compile=True) == truth
    for max_cache_len in (None, 64):
        wanted, _ = session(model, max_cache_len=max_cache_len)
        got, cache = session(placed, ids, max_cache_len, impl=impl)
        assert_same(got, wanted)
        kinds = [cache.layers.index(layer) for layer in (*cache.replay_layers, *cache.attention_layers)]
        assert places_of(cache) == [FIRST if where[index] == "cpu" else where[index] for index in kinds]


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", MODELS)
def test_layers_whose_weights_wait_on_the_cpu(family: str, split: str, impl: str) -> None:
    """They run on the GPU, and their buffers are there."""
    check(family, split, [FIRST, "cpu"], FIRST, impl)


@SEVERAL
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", MODELS)
def test_layers_on_several_gpus(family: str, split: str, impl: str, current: int) -> None:
    """Between and inside runs of state-space layers, whichever device is the current one."""
    with torch.cuda.device(current):
        check(family, split, GPUS, FIRST, impl)


@SEVERAL
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("backend", ["cudagraphs", "inductor"])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_compiled_steps(family: str, backend: str, current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph of dynamo's through accelerate's hooks; with our backend a CUDA graph for each stretch on a GPU."""
    captured: list[torch.device] = []

    def record(function: Any, operands: Any) -> Any:
        captured.append(operands[0].device)
        return original(function, operands)

    original = capture.record
    monkeypatch.setattr(capture, "record", record)
    model = MODELS[family]()
    devices: list[Any] = GPUS if current == 0 else list(range(len(GPUS)))  # numbers, as `device_map="auto"` has them
    assistant, where = assistant_for(model), places(model.config.num_hidden_layers, "to and fro", devices)
    calls = [("greedy", "replay_static"), ("lookup", "replay_static")]
    truth = sequences(model, assistant, calls)
    config = CompileConfig(backend=backend, fullgraph=True)
    placed = dispatched(model, where, devices[0], devices[-1])
    with torch.cuda.device(current):
        for _ in range(2):
            assert sequences(placed, assistant, calls, FIRST, "triton", compile_config=config) == truth
    assert not counters["graph_break"]
    assert set(captured) == (set(map(torch.device, GPUS)) if backend == "cudagraphs" else set())


@SEVERAL
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_ids_elsewhere(device: str) -> None:
    """On the host, or on a GPU that does not have the embedding."""
    check("qwen3_5", "inside a run", GPUS, device, "auto")


@SEVERAL
@pytest.mark.parametrize("precision", [{"readout": "fp8"}, {"checkpoint": "nvfp4"}, {"checkpoint": "fp8_sr"}], ids=str)
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_precisions_on_several_gpus(family: str, precision: dict[str, str]) -> None:
    """The kernels for states in other formats are launched on each layer's device, from any other."""
    model = MODELS[family]()
    where = places(model.config.num_hidden_layers, "to and fro", GPUS)
    truth, _ = session(dispatched(model, [FIRST] * len(where), FIRST, FIRST), FIRST, impl="triton", **precision)
    placed = dispatched(model, where, FIRST, GPUS[-1])
    for current in GPUS:
        with torch.cuda.device(current):
            assert_same(session(placed, FIRST, impl="triton", **precision)[0], truth)


@SEVERAL
@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23.0"), reason="no use_mtp before 5.23")
@pytest.mark.parametrize("family", list(mtp.MODELS))
def test_multi_token_prediction(family: str) -> None:
    """The head is where the last layer is, behind the embeddings of another GPU."""
    model = mtp.MODELS[family]()
    truth, given = mtp.truth(family)[:3], {name: value.to(FIRST) for name, value in mtp.inputs(family, 3).items()}
    where = places(model.config.num_hidden_layers, "inside a run", GPUS)
    placed = dispatched(model, where, FIRST, GPUS[-1])
    settings = {"max_new_tokens": mtp.STEPS, "do_sample": False, "use_mtp": True, "num_assistant_tokens": 3}
    for implementation in ("replay", "replay_static"):
        output = placed.generate(**given, **settings, cache_implementation=implementation, disable_compile=True)
        assert torch.equal(output.cpu(), truth)


@SEVERAL
def test_a_model_that_is_moved_between_two_turns() -> None:
    """An error that says what to do."""
    model = MODELS["qwen3_5"]().to("cuda:0")
    _, cache = session(model, "cuda:0")
    with pytest.raises(ValueError, match=r"holds .* on cuda:0, got .* on cuda:1: .*reset\(\)"), torch.no_grad():
        model.to("cuda:1")(input_ids=torch.tensor([[5], [6]], device="cuda:1"), **{CACHE_ARGUMENT: cache})
