"""The benchmarks on several GPUs, as far as they run without any: where parts go, building, decoding, records."""

from __future__ import annotations

import copy
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

pytest.importorskip("triton")

from scripts.benchmarks import generate_cells, speculative_cells, timing, weights
from scripts.benchmarks.largest_batch import LargestBatch
from scripts.benchmarks.presets import Preset, load_presets
from scripts.benchmarks.several_gpus import byte_count, deal, devices_for, devices_of, layer_map, spread
from scripts.benchmarks.speculative_loop import copy_all
from scripts.benchmarks.speculative_tables import speculative_rows
from scripts.benchmarks.speculative_tables import speed_up as over
from scripts.benchmarks.tables import generate_rows, model_title
from scripts.benchmarks.weights import assert_usable, build_model
from tests.support.devices import devices
from tests.support.scripts import runner

PRESETS = load_presets()
TINY = {name: preset for name, preset in PRESETS.items() if preset.is_tiny}
QWEN, NEMOTRON = TINY["tiny-qwen3.5"], TINY["tiny-nemotron-h"]
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1, "routed_scaling_factor": 5.0,
}  # fmt: skip
BUILT = TINY | {
    "tied": replace(QWEN, settings=QWEN.settings | {"tie_word_embeddings": True}),
    "experts": replace(NEMOTRON, settings=NEMOTRON.settings | EXPERTS | {"hybrid_override_pattern": "MEM*EME"}),
}
MANY_EXPERTS = {
    "hidden_size": 128, "vocab_size": 256, "num_attention_heads": 4, "head_dim": 32, "mamba_num_heads": 8,
    "mamba_head_dim": 32, "ssm_state_size": 32, "n_routed_experts": 128, "intermediate_size": 64,
    "moe_intermediate_size": 64, "moe_latent_size": 64, "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
GPUS = ["cuda:0", "cuda:1"]
LARGE = ["nemotron-3-super-120b-a12b", "qwen3.5-122b-a10b"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    return runner(monkeypatch)


def built(preset: Preset, device: str | list[str] = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    return build_model(preset, device, weight_bytes=2**30, dtype=dtype)[0]


@pytest.mark.no_poison
def test_rounding_in_routers_does_not_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many layers with many experts: two caches' logits agree, which they do not without the experts' scale."""
    preset, settings = PRESETS["nemotron-3-super-120b-a12b"], generate_cells.Settings(short=2, long=4)
    preset = replace(preset, settings=preset.settings | MANY_EXPERTS)
    errors = []
    for scale in (weights.EXPERT_SCALE, 1.0):
        monkeypatch.setattr(weights, "EXPERT_SCALE", scale)
        model, layers = build_model(preset, "cpu", weight_bytes=40 * 2**20)
        assert layers > 30
        expected = generate_cells.expected_output(model, 2, 16, settings.checked)
        cell = generate_cells.Cell(preset, "replay", 2, 16)
        errors.append(generate_cells.measure_cell(model, cell, settings, expected)["logit_error"])
    assert errors[0] <= settings.tolerance / 2
    assert errors[1] > settings.tolerance


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_runs_are_as_even_as_they_can_be() -> None:
    draw = random.Random(0)
    for hands in (1, 2, 3, 4):
        for _ in range(20):
            sizes = [draw.choice([1, 2, 5, 20]) for _ in range(draw.randint(hands, 9))]
            cuts = [[0, *cut, len(sizes)] for cut in itertools.combinations(range(1, len(sizes)), hands - 1)]
            sums = [[sum(sizes[a:b]) for a, b in itertools.pairwise(cut)] for cut in cuts]
            lengths = deal(sizes, hands)
            ends = [0, *itertools.accumulate(lengths)]
            mine = [sum(sizes[a:b]) for a, b in itertools.pairwise(ends)]
            assert len(lengths) == hands
            assert min(lengths) >= 1
            assert ends[-1] == len(sizes)
            assert max(mine) == min(map(max, sums))
    with pytest.raises(ValueError, match="2 layers cannot be spread over 3 GPUs"):
        deal([1, 1], 3)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", BUILT)
def test_every_part_has_a_place(name: str, count: int) -> None:
    model, names = BUILT[name].build("meta", torch.float32), [f"cuda:{index}" for index in range(count)]
    places = layer_map(model, names)
    covered = [f"{part}.{name}" for part in places for name, _ in model.get_submodule(part).named_parameters()]
    everything = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(covered) == sorted(everything)
    layers = [places[f"model.layers.{index}"] for index in range(len(model.model.layers))]
    assert list(dict.fromkeys(layers)) == names
    assert layers == sorted(layers)
    assert places["lm_head"] == names[0 if name == "tied" else -1]
    inputs = next(part for part in places if "embed" in part)
    norm = next(part for part in places if "norm" in part)
    assert (places[inputs], places[norm]) == (names[0], names[-1])


@pytest.mark.no_poison  # which takes real memory
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", LARGE)
def test_large_models_are_balanced_by_bytes(name: str, count: int) -> None:
    model = PRESETS[name].build("meta", torch.bfloat16)
    assert not model.config.tie_word_embeddings
    places = layer_map(model, [f"cuda:{index}" for index in range(count)])
    shares = dict.fromkeys(places.values(), 0)
    for part, place in places.items():
        shares[place] += byte_count(model.get_submodule(part))
    assert sum(shares.values()) == byte_count(model)
    assert max(shares.values()) < 1.01 * byte_count(model) / count + max(map(byte_count, model.model.layers)) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BUILT)
def test_a_spread_model_is_the_model(name: str, dtype: torch.dtype) -> None:
    """Weights, norms, biases, buffers that no checkpoint has, and outputs."""
    whole, parts = built(BUILT[name], dtype=dtype), built(BUILT[name], ["cpu", "cpu"], dtype)
    assert_usable(parts)
    assert list(tensors(parts)) == list(tensors(whole))
    for (key, mine), its in zip(tensors(parts).items(), tensors(whole).values(), strict=True):
        assert mine.dtype == its.dtype, key
        assert torch.equal(mine, its), key
    assert (parts.lm_head.weight is parts.get_input_embeddings().weight) == (name == "tied")
    ids = torch.arange(1, 20)[None]
    assert torch.equal(parts(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(parts.generate(ids, **settings), whole.generate(ids, **settings))


def test_a_list_of_one_is_that_device() -> None:
    model = built(QWEN, ["cpu"])
    assert not hasattr(model, "hf_device_map")
    assert devices_of(model) == [torch.device("cpu")]


def test_fewer_gpus_than_asked_for(
    call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_for("cuda", 2) == GPUS
    assert devices_for("cuda", 1) == ["cuda"]
    assert devices_for("cpu", 3) == ["cpu"] * 3
    with pytest.raises(ValueError, match="takes the first GPUs"):
        devices_for("cuda:1", 2)
    for script in ("bench_generate", "bench_speculative"):
        with pytest.raises(ValueError, match="--gpus is 3, and 2 of them are visible"):
            call(script, "--gpus=3", "--preset=tiny-qwen3.5", f"--output={tmp_path / 'results.json'}")
    with pytest.raises(ValueError, match="--real runs the sample models, on one GPU"):
        call("bench_speculative", "--gpus=2", "--real")


def test_keys_name_several_gpus_only() -> None:
    one, two = (
        generate_cells.all_cells([QWEN], [(2, 5)], None)[0],
        generate_cells.all_cells([QWEN], [(2, 5)], None, gpus=2)[0],
    )
    assert (one.key, two.key) == ("tiny-qwen3.5/dynamic/b2/p5", "tiny-qwen3.5/dynamic/b2/p5/2gpus")
    assert LargestBatch(QWEN, "static", 8, 5).key == "tiny-qwen3.5/static/largest/p5"
    assert LargestBatch(QWEN, "static", 8, 5, gpus=3).key == "tiny-qwen3.5/static/largest/p5/3gpus"
    for gpus, end in ((1, ""), (2, "/2gpus")):
        cell = speculative_cells.all_cells([QWEN], [2], [4], None, ["none"], ["replay/b2"], gpus)[0]
        assert cell.key == f"tiny-qwen3.5/replay/b2/t4/a2/none{end}"


class Mark:
    """An event of a pretended GPU."""

    def __init__(self, **options: Any) -> None: ...

    def record(self, *stream: Any) -> None:
        """Take the time."""
        self.taken = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, other: Mark) -> float:
        """Milliseconds until the other one."""
        return 1e3 * (other.taken - self.taken)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The fullest of the pretended GPUs is the second one; the devices whose peaks were reset."""
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: (device.index + 1) * 2**30)
    return reset


def test_peaks_of_every_gpu(memory: list[torch.device]) -> None:
    gpus = [torch.device(name) for name in GPUS]
    timing.reset_peaks([*gpus, torch.device("cpu")])
    assert memory == gpus
    assert timing.peak_memory(gpus) == {"peak_gib": 2.0, "peak_gib_by_gpu": [1.0, 2.0]}
    assert timing.peak_memory(gpus[:1]) == {"peak_gib": 1.0}
    assert timing.peak_memory([torch.device("cpu")]) == {"peak_gib": 0.0}


@pytest.mark.parametrize("name", TINY)
def test_drafts_on_pretended_gpus(name: str, memory: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method, with operations between devices refused as on real ones."""
    settings = speculative_cells.Settings(prompt=5, new_tokens=6, warm=2, checked=6, window=3, tolerance=1e-3)
    model, preset = built(TINY[name]), TINY[name]
    with devices():
        monkeypatch.setattr(torch.cuda, "Event", Mark)
        placed = copy.deepcopy(model)
        spread(placed, layer_map(model, GPUS))
        assert devices_of(placed) == [torch.device(name) for name in GPUS]
        cells = speculative_cells.all_cells([preset], [2], [4], None, ["none"], None, gpus=2)
        expected = speculative_cells.expected_logits(placed, 2, settings)
        for cell in cells:
            record = speculative_cells.measure_cell(placed, cell, settings, expected)
            assert record["status"] == "measured"
            assert record["logit_error"] < 1e-4
            assert (record["gpus"], record["peak_gib"], record["peak_gib_by_gpu"]) == (2, 2.0, [1.0, 2.0])
    assert set(memory) == {torch.device(name) for name in GPUS}


@pytest.mark.parametrize("name", TINY)
def test_steps_on_pretended_gpus(name: str, memory: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = generate_cells.Settings(short=2, long=5, checked=3, tolerance=1e-3, check_kernels=False)
    model, preset = built(TINY[name]), TINY[name]
    with devices():
        monkeypatch.setattr(torch.cuda, "Event", Mark)
        placed = copy.deepcopy(model)
        spread(placed, layer_map(model, GPUS))
        expected = generate_cells.expected_output(placed, 2, 5, 3)
        for cell in generate_cells.all_cells([preset], [(2, 5)], ["/dynamic/", "/replay/"], gpus=2):
            record = generate_cells.measure_cell(placed, cell, settings, expected)
            assert record["status"] == "measured"
            assert (record["gpus"], record["peak_gib"], record["peak_gib_by_gpu"]) == (2, 2.0, [1.0, 2.0])


def test_copies_on_several_devices() -> None:
    with devices():
        sources = [torch.randn(3), torch.randn(2).to(GPUS[0]), torch.randn(4).to(GPUS[1]), torch.randn(5).to(GPUS[1])]
        targets = [torch.zeros_like(source) for source in sources]
        copy_all(targets, sources)
        assert all(torch.equal(mine.cpu(), its.cpu()) for mine, its in zip(targets, sources, strict=True))


@pytest.mark.parametrize("name", TINY)
def test_from_end_to_end(call: Callable[..., Result], tmp_path: Path, name: str) -> None:
    """On a CPU, which stands for both GPUs; a cell on one GPU stays beside that on two."""
    path, whole = tmp_path / "generate.json", byte_count(built(TINY[name]))
    arguments = ("--device=cpu", "--dtype=float32", "--allow-slow-stock", "--shape=2x5", "--short=2", "--long=5")
    where = (f"--output={path}", "--only=/dynamic/", "--only=/replay/", f"--preset={name}")
    per_gpu = f"--weights-gib={0.6 * whole / 2**30}"
    assert call("bench_generate", *arguments, *where).exit_code == 0
    result = call("bench_generate", *arguments, *where, "--gpus=2", per_gpu)
    assert result.exit_code == 0, result.output
    assert f"{name} on 2 GPUs" in result.output
    assert f"{name}, 2 GPUs" in result.output
    cells = json.loads(path.read_text())["cells"]
    keys = [f"{name}/dynamic/b2/p5", f"{name}/replay/b2/p5"]
    assert list(cells) == [*keys, *(f"{key}/2gpus" for key in keys)]
    assert [cell["gpus"] for cell in cells.values()] == [1, 1, 2, 2]
    assert all(cell["status"] == "measured" and cell["is_whole"] for cell in cells.values())
    assert all(cell["logit_error"] < 1e-3 for cell in cells.values())
    assert "dynamic/b2/p5/2gpus  measured" in call("bench_generate", *arguments, *where, "--gpus=2", "--cells").output


@pytest.mark.parametrize("name", TINY)
def test_drafts_from_end_to_end(call: Callable[..., Result], tmp_path: Path, name: str) -> None:
    path = tmp_path / "speculative.json"
    arguments = ("--device=cpu", "--dtype=float32", f"--preset={name}", "--batch=2", "--tokens=4", f"--output={path}")
    arguments += ("--prompt=4", "--new-tokens=3", "--warm=1", "--window=2", "--gpus=2")
    result = call("bench_speculative", *arguments)
    assert result.exit_code == 0, result.output
    assert f"{name} on 2 GPUs" in result.output
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 4
    assert all(key.endswith("/none/2gpus") for key in cells)
    assert all(cell["status"] == "measured" and cell["gpus"] == 2 and cell["is_whole"] for cell in cells.values())


def test_experts_of_prompts_and_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' way for few tokens copies an expert's weights for every token: prompts go without it."""
    model, seen = built(BUILT["experts"]), list[tuple[int, bool]]()
    context = type(model)._optimize_model_for_decode
    inside: list[int] = []

    def entered(self: Any) -> Any:
        inside.append(1)
        return context(self)

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((kwargs["input_ids"].shape[1], bool(inside)))

    monkeypatch.setattr(type(model), "_optimize_model_for_decode", entered)
    model.register_forward_pre_hook(forward, with_kwargs=True)
    settings = speculative_cells.Settings(prompt=5, new_tokens=6, warm=2, checked=6, window=3, tolerance=1e-3)
    expected = speculative_cells.expected_logits(model, 2, settings)
    seen.clear()
    cell = speculative_cells.Cell(BUILT["experts"], "replay", 2, 4, 2, "none")
    record = speculative_cells.measure_cell(model, cell, settings, expected)
    assert record["status"] == "measured"
    assert seen[0] == (5, False)
    assert set(seen[1:]) == {(4, True)}


def test_tables_compare_cells_on_as_many_gpus() -> None:
    common = {"preset": "x", "batch": 1, "backend": "none", "prompt": 4, "window": 2, "checkpoint": "float32"}
    times = {"p20": 1.0, "p50": 1.0, "p80": 1.0, "mean": 1.0}
    common |= {"row_tokens_per_s": 1.0, "round_ms": times, "peak_gib": 0.0, "logit_error": 0.0, "status": "measured"}
    cells = {
        "older": {**common, "method": "plain", "tokens": 1, "accepted": 0, "tokens_per_s": 10.0},
        "plain": {**common, "method": "plain", "tokens": 1, "accepted": 0, "tokens_per_s": 8.0, "gpus": 2},
        "replay": {**common, "method": "replay", "tokens": 5, "accepted": 3, "tokens_per_s": 24.0, "gpus": 2},
        "one": {**common, "method": "replay", "tokens": 5, "accepted": 3, "tokens_per_s": 24.0, "gpus": 1},
    }
    assert over(cells, cells["replay"], "plain") == 3.0
    assert over(cells, cells["one"], "plain") == 2.4
    assert [row[0] for row in speculative_rows(cells)] == ["x", "x, 2 GPUs", "x, 2 GPUs", "x"]
    cut = {"preset": "x", "is_whole": False, "layers": 8, "gpus": 3}
    assert model_title(cut) == "x, 8 layers, 3 GPUs"
    cell = {**cut, "batch": 1, "prompt": 4, "configuration": "replay", "status": "does not fit"}
    assert next(iter(generate_rows({"": cell})))[0] == model_title(cut)
