"""A model spread over two devices, which are pretended: the results of one, and few copies between the two."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import set_module_tensor_to_device

import replay_transformers as rt
from replay_transformers.generation.row_cache import RowCache
from tests.support import mtp
from tests.support.batches import observed
from tests.support.devices import Devices, devices
from tests.support.dispatch import (
    EVERY_CALL,
    FULL,
    LINEAR,
    MODELS,
    Call,
    assert_same,
    assistant_for,
    dispatched,
    gathered,
    generated,
    inputs,
    places_of,
    sequences,
    session,
    splits,
    spread,
)
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import assert_state_matters, build_nemotron_h, build_qwen3_5, positions, prompt
from tests.support.mtp import sample_qwen3_5

pytestmark = pytest.mark.usefixtures("enabled")

GPUS = ["cuda:0", "cuda:1"]
SPLITS = list(splits(4))
REFERENCE: dict[str, Any] = {"impl": "reference"}  # "auto" would write small states through, and keep no records
ROWS = 5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", MODELS)
def test_a_cache_by_hand(family: str, split: str) -> None:
    """Prompt, steps, rollbacks row by row, chosen rows; buffers are where the layers are."""
    model = MODELS[family]()
    assert_state_matters(model)
    places = splits(model.config.num_hidden_layers)[split]
    for max_cache_len in (None, 64):
        truth, _ = session(model, max_cache_len=max_cache_len)
        with devices():
            got, cache = session(spread(model, places, GPUS), "cuda:0", max_cache_len, **REFERENCE)
            assert_same(got, truth)
            kinds = [cache.layers.index(layer) for layer in (*cache.replay_layers, *cache.attention_layers)]
            assert places_of(cache) == [GPUS[places[index]] for index in kinds]


def _check_generate(family: str, split: str, device: str, calls: list[Call]) -> None:
    model = MODELS[family]()
    assistant, places = assistant_for(model), splits(model.config.num_hidden_layers)[split]
    truth = sequences(model, assistant, calls)
    with devices():
        placed, its = spread(model, places, GPUS), spread(assistant, places[::-1], GPUS)
        assert sequences(placed, its, calls, device, **REFERENCE) == truth


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_generate(family: str) -> None:
    calls = [("greedy", "replay"), ("beams", "replay_static"), ("lookup", "replay"), ("assistant", "replay_static")]
    _check_generate(family, "inside a run", "cuda:0", calls)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_ids_where_no_layer_is(device: str) -> None:
    """Or where only later ones are."""
    _check_generate("qwen3_5", "inside a run", device, [("lookup", "replay"), ("greedy", "replay_static")])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", *GPUS])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", MODELS)
def test_generate_every_kind_of_call(family: str, split: str, device: str) -> None:
    """Wherever the ids are."""
    _check_generate(family, split, device, EVERY_CALL)


@pytest.mark.parametrize("split", ["inside a run", "first elsewhere"])
@pytest.mark.parametrize("family", MODELS)
def test_layers_whose_weights_wait_on_the_cpu(family: str, split: str) -> None:
    """They run on the GPU, and their buffers are there."""
    model = MODELS[family]()
    truth, _ = session(model)
    calls: list[Call] = [("lookup", "replay"), ("greedy", "replay_static")]
    tokens = sequences(model, None, calls)
    where = [("cuda:0", "cpu")[place] for place in splits(model.config.num_hidden_layers)[split]]
    with devices():
        placed = dispatched(model, where, "cuda:0", "cuda:0")
        assert any(parameter.is_meta for parameter in placed.parameters())
        got, cache = session(placed, "cuda:0", **REFERENCE)
        assert_same(got, truth)
        assert set(places_of(cache)) == {"cuda:0"}
        assert sequences(placed, None, calls, "cuda:0", **REFERENCE) == tokens


@pytest.mark.parametrize("precision", [{"readout": "fp8"}, {"checkpoint": "nvfp4"}, {}], ids=str)
def test_other_precisions_and_written_through(precision: dict[str, Any]) -> None:
    for family in ("qwen3_5", "nemotron_h"):
        model = MODELS[family]()
        split = splits(model.config.num_hidden_layers)["to and fro"]
        truth, _ = session(model, **precision)
        with devices():
            got, _ = session(spread(model, split, GPUS), "cuda:0", **precision)
        assert_same(got, truth)


def _large_and_small(family: str) -> tuple[Any, list[int], Any, list[int]]:
    """The same model with many layers on the second device and with few."""
    if family == "qwen3_5":
        large = build_qwen3_5([FULL, LINEAR, FULL, *[LINEAR, LINEAR, FULL] * 3])
        return large, [0, 0, 0] + [1] * 9, build_qwen3_5([FULL, LINEAR, LINEAR, FULL]), [0, 0, 1, 1]
    return build_nemotron_h("*M*" + "MM*" * 3), [0, 0, 0] + [1] * 9, build_nemotron_h("*MM*"), [0, 0, 1, 1]


@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_pointers_move_once_per_device_and_step(family: str, max_cache_len: int | None) -> None:
    """However many layers there are; and the host waits for nothing."""
    large, its_split, small, split = _large_and_small(family)
    counted = [_moved(model, where, max_cache_len) for model, where in ((large, its_split), (small, split))]
    assert counted[0] == counted[1]
    for name, (moved, waits) in counted[0].items():
        most = {"choose": 1, "choose there": 1, "reject": 0, "reject there": 1}.get(name, 5)
        assert sum(moved.values()) <= most, name
        assert waits == 0, name
    assert all(moved for name, (moved, _) in counted[0].items() if "reject" not in name)


def _moved(model: Any, split: list[int], max_cache_len: int | None) -> dict[str, tuple[dict[Any, int], int]]:
    counted = {}
    ids = prompt(ROWS, 40)["input_ids"]
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, max_draft=4, **REFERENCE), max_cache_len)
    with devices() as pretended, torch.no_grad():
        ids, placed = ids.to("cuda:0"), spread(model, split, GPUS)

        def count(name: str, action: Any) -> None:
            pretended.clear()
            action()
            counted[name] = dict(pretended.pointers_moved(ROWS)), pretended.waits

        def forward(begin: int, end: int, **more: Any) -> Any:
            return placed(input_ids=ids[:, begin:end], **{CACHE_ARGUMENT: cache}, **more)

        order = torch.tensor([1, 0, 2, 2, 4]).to("cuda:0")
        forward(0, 9)
        for place in range(9, 13):
            count(f"step {place}", lambda place=place: forward(place, place + 1))
        count("choose", lambda: cache.reorder_cache(order))
        elsewhere = order.to("cuda:1")
        count("choose there", lambda: cache.reorder_cache(elsewhere))
        cache.activate_past_recording()
        cache.separate_rows()
        for place in range(13, 22, 3):
            count(f"rows {place}", lambda place=place: forward(place, place + 3))
            rejected = torch.tensor([0, 1, 2, 0, 3])
            there = rejected.to("cuda:0" if place == 13 else "cuda:1")
            name = "reject" if place == 13 else "reject there"
            count(name, lambda there=there: cache.reject_rows(there, cache.cursor.longest))
    return counted


@mtp.NEEDS_MTP
@pytest.mark.parametrize("split", ["inside a run", "first elsewhere"])
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
def test_multi_token_prediction(split: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is where the last layer is; embeddings come to it from elsewhere."""
    from transformers.modeling_layers import MtpModel

    model, load, loaded_on = sample_qwen3_5(), MtpModel.from_pretrained, []

    def from_pretrained(target: Any, device_map: dict[str, Any]) -> Any:
        built = load(target, device_map={"": "cpu"})  # a pretended device cannot be loaded to
        for name, _ in built.layers.named_parameters():
            set_module_tensor_to_device(built.layers, name, device_map[""])
        loaded_on.append(device_map[""])
        return built

    monkeypatch.setattr(MtpModel, "from_pretrained", from_pretrained)
    places = splits(model.config.num_hidden_layers)[split]
    settings = {"max_new_tokens": mtp.STEPS, "do_sample": False, "num_assistant_tokens": 3, "use_mtp": True}
    settings |= {"cache_implementation": implementation, "cache_config": REFERENCE | {"draft_length": "fixed"}}
    with devices():
        placed = spread(model, places, GPUS)
        given = {name: value.to("cuda:0") for name, value in mtp.inputs("qwen3_5", 3).items()}
        with observed(placed) as rounds:
            output = placed.generate(**given, **settings)
        assert torch.equal(output.cpu(), mtp.truth("qwen3_5")[:3])
    assert max(rounds.accepted()) >= 2
    assert loaded_on == [torch.device(GPUS[places[-1]])]


def test_positions_of_ones_own() -> None:
    """Positions that do not count tokens from 0, where the cursor is not on the device of the ids."""
    model, given = MODELS["qwen3_5"](), inputs(3)
    given["position_ids"] = positions(given["attention_mask"]) + 5
    settings = {"prompt_lookup_num_tokens": 3, "do_sample": False, "cache_implementation": "replay"}
    truth = model.generate(**given, **settings, max_new_tokens=12)
    with devices():
        placed = spread(model, [1, 1, 0, 0], GPUS)
        given = {name: value.to("cuda:0") for name, value in given.items()}
        assert torch.equal(placed.generate(**given, **settings, max_new_tokens=12).cpu(), truth)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_a_call_that_broke_off(family: str) -> None:
    """What its last round took in is taken back, wherever the cursor is; the cache goes on."""
    model = MODELS[family]()
    settings = {"prompt_lookup_num_tokens": 3, "do_sample": False, "max_new_tokens": 12}

    def breaks(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if ids.shape[1] > 14:
            raise KeyboardInterrupt
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    for device in ("cpu", "cuda:0"):
        with devices():
            placed = spread(model, splits(model.config.num_hidden_layers)["first elsewhere"], GPUS)
            cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, **REFERENCE))
            given = {name: value.to(device) for name, value in inputs(3).items()}
            with pytest.raises(KeyboardInterrupt):
                placed.generate(**given, **settings, **{CACHE_ARGUMENT: cache}, stopping_criteria=[breaks])
            assert not cache.cursor.broken
            assert min(cache.row_lengths().tolist()) >= 11


@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "fixed"])
def test_rows_after_a_forward_that_broke_off(max_cache_len: int | None) -> None:
    """Attention that has come before the break has not fixed where the next forward's tokens go."""
    model = MODELS["qwen3_5-attention-first"]()
    ids, lengths = prompt(2, 12)["input_ids"], [8, 7]
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, max_draft=4), max_cache_len)
    cache.activate_past_recording()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        truth = model(input_ids=ids, use_cache=False).logits
        model(input_ids=ids[:, :9], **{CACHE_ARGUMENT: cache})
        cache.separate_rows()
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids[:, 9:11], **{CACHE_ARGUMENT: cache})
        hook.remove()
        cache.crop(torch.tensor([-1, -2]))
        new = torch.stack([row[length : length + 3] for row, length in zip(ids, lengths, strict=True)])
        got = model(input_ids=new, **{CACHE_ARGUMENT: cache}).logits
    assert_same(list(got), [truth[row, length : length + 3] for row, length in enumerate(lengths)])


def test_an_assistants_pointers_move_once_per_device_and_step() -> None:
    cache = RowCache(4)
    with devices() as pretended:
        cache.begin(torch.zeros(ROWS, dtype=torch.int64).to("cuda:0"))
        for _ in range(3):
            cache.advance(2)
            pretended.clear()
            for layer in range(4):
                new = torch.ones(ROWS, 1, 2, 3, device="cuda:1")
                cache.update(new, new, layer)
            assert pretended.pointers_moved(ROWS) == {("cuda:0", "cuda:1"): 1}


def _two_turns(model: Any, cache: rt.ReplayCache, ids: torch.Tensor, between: Any) -> torch.Tensor:
    with torch.no_grad():
        model(input_ids=ids[:, :9], **{CACHE_ARGUMENT: cache})
        between()
        return model(input_ids=ids[:, 9:12], **{CACHE_ARGUMENT: cache}).logits


@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_that_is_moved_between_two_turns(family: str, max_cache_len: int | None) -> None:
    """An error that says what to do, after which `reset` makes the cache one of the new device."""
    model, ids = MODELS[family](), prompt(2, 12)["input_ids"]
    with torch.no_grad():
        truth = model(input_ids=ids, use_cache=False).logits
    count = model.config.num_hidden_layers
    # all layers, one inside a run or of attention alone
    for moved in ([1] * count, [0, 1] + [0] * (count - 2), [0] * (count - 1) + [1]):
        cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4, **REFERENCE), max_cache_len)
        with devices(), torch.no_grad():
            before, after = spread(model, [0] * count, ["cuda:0"]), spread(model, moved, GPUS)
            with pytest.raises(ValueError, match=r"holds .* on cuda:0, got .* on cuda:1: .*reset\(\)"):
                _two_turns(before, cache, ids.to("cuda:0"), functools.partial(_becomes, before, after))
            cache.reset()
            got = after(input_ids=ids.to("cuda:0"), **{CACHE_ARGUMENT: cache}).logits
            assert_same([got.cpu()], [truth])


def _becomes(model: Any, other: Any) -> None:
    """Put another model's modules, with their hooks, in place of this one's."""
    gathered(model)
    model.__dict__ |= other.__dict__


@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_that_is_cast_between_two_turns(family: str, max_cache_len: int | None) -> None:
    model, ids = MODELS[family](), prompt(2, 12)["input_ids"]
    with torch.no_grad():
        truth = model(input_ids=ids, use_cache=False).logits
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=4), max_cache_len)
    with pytest.raises(ValueError, match=r"float32 on cpu, got .*float64 on cpu: .*reset\(\)"):
        _two_turns(model, cache, ids, model.double)
    assert int(cache.get_seq_length()) == 9
    with torch.no_grad():  # nothing was taken in: back in float32 the cache goes on
        got = model.float()(input_ids=ids[:, 9:], **{CACHE_ARGUMENT: cache}).logits
        assert_same([got], [truth[:, 9:]])
        cache.reset()
        got = model.double()(input_ids=ids, **{CACHE_ARGUMENT: cache}).logits
    assert_same([got.float()], [truth])


def test_caches_of_generate_follow_the_model() -> None:
    """The pool rebuilds what was made for another dtype or device."""
    for family in ("qwen3_5", "nemotron_h"):
        model = MODELS[family]()
        count = model.config.num_hidden_layers
        for implementation in ("replay", "replay_static"):
            settings: dict[str, Any] = {"cache_implementation": implementation}
            truth = generated(model, "greedy", 2, **settings)
            assert torch.equal(generated(model.double(), "greedy", 2, **settings), truth)
            assert torch.equal(generated(model.float(), "greedy", 2, **settings), truth)
            with devices():
                placed = spread(model, [0] * count, ["cuda:0"])
                for split in ([0] * count, [0] + [1] * (count - 1), [index % 2 for index in range(count)]):
                    _becomes(placed, spread(model, split, GPUS))
                    assert torch.equal(generated(placed, "greedy", 2, device="cuda:0", **settings), truth)


LAUNCHES = [
    ("mamba2.triton", "_launch"), ("mamba2.triton", "_launch_stored"), ("mamba2.update", "_launch"),
    ("gated_delta.triton", "_launch"), ("gated_delta.triton", "_launch_stored"), ("gated_delta.update", "_launch"),
    ("causal_conv.triton", "_launch"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), LAUNCHES)
def test_kernels_are_launched_on_the_device_of_their_tensors(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those for states in other formats."""
    pytest.importorskip("triton")
    launch = getattr(importlib.import_module(f"replay_transformers.kernels.{module}"), name)
    entered: list[Any] = []

    class Current:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *exc_info: Any) -> None: ...

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Current)
    for index in (0, 1):
        first = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        with pytest.raises(TypeError, match="missing"):  # the operands: the launch itself was reached
            launch(first)
    assert entered == [torch.device("cuda", 1)]


def test_operands_on_different_pretended_devices_are_refused() -> None:
    """The stand-in for a second device refuses what a real one would."""
    with devices() as pretended:
        first, second = torch.ones(3, device="cuda:0"), torch.ones(3).to("cuda:1")
        with pytest.raises(RuntimeError, match="one device"):
            first + second
        assert (first + second.to("cuda:0")).tolist() == [2, 2, 2]
        assert pretended.copies["cuda:1", "cuda:0", torch.float32, (3,)] == 1
        assert pretended.waits == 1
    assert isinstance(pretended, Devices)
