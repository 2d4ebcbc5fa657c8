"""Models spread over a GPU and the CPU, and over all GPUs there are: the results of one device.

The bodies are those of tests/test_devices.py, where the devices are pretended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from transformers import CompileConfig

import replay_transformers as rt
from tests.support import mtp
from tests.support.dispatch import (
    EVERY_CALL,
    MODELS,
    Call,
    assert_same,
    assistant_for,
    dispatched,
    places_of,
    sequences,
    session,
    splits,
)
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import prompt

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


@pytest.mark.parametrize("waiting", range(1, 2**4))
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_every_map_of_the_first_four_layers(family: str, waiting: int) -> None:
    """The bits of ``waiting`` say whose weights wait on the CPU."""
    model = MODELS[family]()
    where = ["cpu" if waiting >> layer & 1 else FIRST for layer in range(model.config.num_hidden_layers)]
    calls: list[Call] = [("greedy", "replay"), ("lookup", "replay_static")]
    truth, (logits, _) = sequences(model, None, calls), session(model)
    placed = dispatched(model, where, FIRST, FIRST)
    assert sequences(placed, None, calls, FIRST, "auto", disable_compile=True) == truth
    assert_same(session(placed, FIRST, impl="auto")[0], logits)


def check_loaded(family: str, folder: Path, memory: dict[int | str, float], impl: str) -> None:
    """Loaded with `device_map="auto"` and room for these shares of the weights by device, against all on the CPU."""
    MODELS[family]().save_pretrained(folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder)
    total = sum(parameter.nbytes for parameter in model.parameters())
    calls: list[Call] = [("greedy", "replay"), ("beams", "replay_static"), ("lookup", "replay_static")]
    truth, (logits, _) = sequences(model, None, calls), session(model)
    room = {device: int(share * total) for device, share in memory.items()}
    placed = load(folder, device_map="auto", max_memory=room)
    assert set(placed.hf_device_map.values()) == set(memory)
    assert any(parameter.is_meta for parameter in placed.parameters()) == ("cpu" in memory)
    assert sequences(placed, None, calls, FIRST, impl, disable_compile=True) == truth
    assert_same(session(placed, FIRST, impl=impl)[0], logits)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("family", MODELS)
def test_loaded_into_too_little_memory(family: str, impl: str, tmp_path: Path) -> None:
    """What does not fit waits on the CPU. The first GPU keeps room for the largest layer of those."""
    check_loaded(family, tmp_path, {0: 0.7, "cpu": 100.0}, impl)


@SEVERAL
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("family", MODELS)
def test_loaded_into_the_memory_of_two_gpus(family: str, impl: str, tmp_path: Path) -> None:
    check_loaded(family, tmp_path, {0: 0.8, 1: 0.8}, impl)


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
def test_compiled_steps(family: str, backend: str, current: int, captures: list[torch.device]) -> None:
    """One graph of dynamo's through accelerate's hooks; with our backend a CUDA graph for each stretch on a GPU."""
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
    assert set(captures) == (set(map(torch.device, GPUS)) if backend == "cudagraphs" else set())


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
@mtp.NEEDS_MTP
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


@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", MODELS)
def test_a_cache_filled_on_the_cpu(family: str, max_cache_len: int | None) -> None:
    """And a model that then moves to a GPU: an error that says what to do, after which the cache is the GPU's."""
    model, ids = MODELS[family](), prompt(2, 12)["input_ids"]
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4), max_cache_len)
    with torch.no_grad():
        truth = model(input_ids=ids, use_cache=False).logits
        model(input_ids=ids[:, :9], **{CACHE_ARGUMENT: cache})
        model, ids = model.to(FIRST), ids.to(FIRST)
        with pytest.raises(ValueError, match=r"holds .* on cpu, got .* on cuda:0: .*reset\(\)"):
            model(input_ids=ids[:, 9:], **{CACHE_ARGUMENT: cache})
        cache.reset()
        parts = [model(input_ids=part, **{CACHE_ARGUMENT: cache}).logits for part in ids.split([9, 1, 1, 1], dim=1)]
    assert_same([torch.cat(parts, dim=1).cpu()], [truth])
    assert set(places_of(cache)) == {FIRST}
