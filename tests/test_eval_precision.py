"""What the state's precision costs: settings, divergence, decay, layers that remember, and the script as a whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

import replay_transformers as rt
from replay_transformers.cli.loading import Loaded
from scripts.benchmarks import precision_cells, precision_synthetic
from scripts.benchmarks.precision_cells import Lane, Run, measure_group, text_ids
from scripts.benchmarks.precision_decay import DecayReader, log_decay
from scripts.benchmarks.precision_grid import DEFAULT_GRID, Setting, bins, parse_grid
from scripts.benchmarks.precision_synthetic import KINDS, Inputs, measure_synthetic, separate
from scripts.benchmarks.precision_tables import (
    HEADS_COLUMNS,
    PRECISION_COLUMNS,
    RATIO_COLUMNS,
    SYNTHETIC_COLUMNS,
    heads_rows,
    precision_rows,
    precision_summary,
    ratio_rows,
    summary_columns,
    synthetic_rows,
)
from tests.support.models import FAMILIES, build_nemotron_h, build_qwen3_5, cached_forward, prompt
from tests.support.scripts import runner

SMALL = {
    "qwen3_5": lambda: build_qwen3_5(["linear_attention", "full_attention"]),
    "nemotron_h": lambda: build_nemotron_h("M*"),
}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    return runner(monkeypatch)


def run_of(rows: int, length: int, tokens: int = 6, backend: str = "none", impl: str = "auto") -> Run:
    return Run(prompt(rows, tokens + length + 1)["input_ids"], tokens, impl, backend)


def test_settings_are_read_from_text() -> None:
    assert Setting.parse("fp8") == Setting("fp8")
    assert Setting.parse("float32/fp8") == Setting("float32", "fp8")
    assert Setting.parse("nvfp4/w4") == Setting("nvfp4", window=4)
    assert Setting.parse("float32/w8/s1e-3") == Setting("float32", window=8, decay_skip=1e-3)
    assert Setting.parse("fp8_sr").name == "fp8_sr/w16"  # neither a window nor a skip
    for name in DEFAULT_GRID:
        setting = Setting.parse(name)
        assert Setting.parse(setting.name) == setting
        setting.config("auto")
    assert parse_grid(["fp8", "fp8/w16", "fp8/w4"]) == [Setting("fp8"), Setting("fp8", window=4)]
    for wrong in ("", "/fp8", "fp8/", "fp8/w4/w8", "float32/fp8/nvfp4"):
        with pytest.raises(ValueError, match="expected checkpoint"):
            Setting.parse(wrong)


def test_bins_cover_all_steps() -> None:
    assert bins(10) == [(0, 10)]
    assert bins(64) == [(0, 64)]
    assert bins(300) == [(0, 64), (64, 256), (256, 300)]
    assert bins(20000)[-2:] == [(4096, 16384), (16384, 20000)]


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("family", FAMILIES)
def test_divergence_is_that_of_two_decodings(family: str) -> None:
    model, setting = FAMILIES[family](), Setting("bfloat16", window=4)
    run = run_of(2, 70, tokens=12)
    reports: list[int] = []
    found, _ = measure_group(model, [setting, Setting("float32")], run, reports.append)
    assert reports == [64, 70]
    logs = []
    for config in (rt.ReplayConfig(), rt.ReplayConfig(checkpoint="bfloat16", window=4)):
        cache = rt.ReplayCache(model.config, config)
        cached_forward(model, cache, run.ids[:, :12])
        steps = [cached_forward(model, cache, run.ids[:, i : i + 1])[:, 0] for i in range(12, 82)]
        logs.append(torch.stack(steps).double().log_softmax(-1))
    want, got = logs
    divergence = torch.nn.functional.kl_div(got, want, reduction="none", log_target=True).sum(-1)
    truth = run.ids[:, 13:].T[..., None]
    difference = (got - want).gather(2, truth)[..., 0]
    record = found[setting]
    assert isinstance(record, dict)
    for part, (begin, end) in zip(record["bins"], [(0, 64), (64, 70)], strict=True):
        here = divergence[begin:end]
        assert (part["from"], part["to"]) == (begin, end)
        assert part["kl"] == pytest.approx(here.mean().item(), rel=1e-2)
        assert part["kl_error"] == pytest.approx((here.std() / here.numel() ** 0.5).item(), rel=1e-2)
        assert part["kl_rows"] == pytest.approx(sorted(here.mean(0).tolist()), rel=1e-2)
        assert part["log_likelihood_difference"] == pytest.approx(difference[begin:end].mean().item(), abs=1e-4)
        assert part["agreement"] == pytest.approx((got.argmax(-1) == want.argmax(-1))[begin:end].double().mean().item())
    assert record["bins"][0]["kl"] > 1e-7
    exact = found[Setting("float32")]
    assert isinstance(exact, dict)
    assert all(part["kl"] == part["kl_max"] == 0 and part["agreement"] == 1 for part in exact["bins"])


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(("rows", "tokens", "window"), [(2, 20, 16), (2, 5, 4), (33, 12, 6)])
@pytest.mark.parametrize("family", SMALL)
def test_decay_is_read_from_the_rings(family: str, rows: int, tokens: int, window: int) -> None:
    """Against a sum over the records of each step, rows in phase and out of phase, a prompt in the ring and not."""
    model, threshold, steps = SMALL[family](), 0.3, 45
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(-4, 4, len(weight)))
    run = run_of(rows, steps, tokens)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=window, max_draft=6))
    cached_forward(model, cache, run.ids[:, :tokens])
    reader, layer = DecayReader(cache, tokens, threshold), cache.replay_layers[0]
    history: dict[int, torch.Tensor] = {}
    if tokens <= cache.replay_config.max_step:
        history |= {i: log_decay(layer)[:, :, i].double() for i in range(tokens)}
    under, count = torch.zeros(2), torch.zeros(2)
    for position in range(tokens, tokens + steps):
        assert cache.cursor.base is not None
        base = cache.cursor.base.tolist()
        reader.before()
        cached_forward(model, cache, run.ids[:, position : position + 1])
        reader.after()
        history[position] = log_decay(layer)[:, :, position % cache.replay_config.capacity].double().clone()
        for row, (first, later) in enumerate(zip(base, cache.cursor.base.tolist(), strict=True)):
            records = range(first, position + (later == first))
            total = sum((history[i][row] for i in records), torch.zeros(history[position].shape[1]))
            under[int(later != first)] += (total.exp() < threshold).float().mean()
            count[int(later != first)] += 1
    reader.close()
    found = reader.skipped()
    assert (under > 0).all()
    assert (under < count).all()
    assert [found["skipped_plain"], found["skipped_flush"]] == pytest.approx((under / count).tolist(), rel=1e-4)
    assert found["skipped"] == pytest.approx((under.sum() / count.sum()).item(), rel=1e-4)
    decoded = torch.stack([history[i] for i in range(tokens, tokens + steps)])
    decay = decoded.exp().mean((0, 1))
    memory = reader.memory()
    assert [memory["decay"]["0"], memory["decay"]["1"]] == pytest.approx([decay.min().item(), decay.max().item()])
    assert memory["memory_tokens"]["1"] == pytest.approx(1 / (1 - decay.max().item()), rel=1e-4)
    assert memory["memory_windows"]["0.5"] == pytest.approx(memory["memory_tokens"]["0.5"] / window)
    assert memory["heads"] == len(decay)


def test_what_raises_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """At construction or in a step; the others go on."""
    original = Lane.step

    def step(self: Lane, index: int) -> torch.Tensor:
        if self.cache.replay_config.window == 3 and index == 2:
            raise RuntimeError("out of order")
        values = original(self, index)
        return values * float("nan") if self.cache.replay_config.window == 5 and index == 4 else values

    monkeypatch.setattr(Lane, "step", step)
    names = ("unheard-of", "float32/w3", "float32/w5", "float32/w2")
    found, memory = measure_group(SMALL["nemotron_h"](), parse_grid(list(names)), run_of(1, 8))
    unheard, late, broken, right = (found[Setting.parse(name)] for name in names)
    assert isinstance(unheard, (ValueError, NotImplementedError))
    assert isinstance(late, RuntimeError)
    assert isinstance(broken, dict)
    assert broken["status"] == "wrong: not finite from token 4 on"
    assert "bins" not in broken
    assert isinstance(right, dict)
    assert right["status"] == "measured"
    assert memory["heads"] == 4


def test_a_cache_that_keeps_no_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay_transformers.cursor.THROUGH_DEVICE", "cpu")
    with pytest.raises(ValueError, match="updated eagerly"):
        measure_group(SMALL["nemotron_h"](), [Setting("float32")], run_of(1, 4))


@pytest.mark.no_poison
def test_compiled_steps_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    original = precision_cells.cuda_graphs

    def backend(*arguments: Any, **options: Any) -> Any:
        graphs.append(None)
        return original(*arguments, **options)

    monkeypatch.setattr(precision_cells, "cuda_graphs", backend)
    model, settings = SMALL["nemotron_h"](), parse_grid(["float32/w3", "bfloat16"])
    eager, compiled = (
        measure_group(model, settings, run_of(2, 20, backend=name))[0] for name in ("none", "cudagraphs")
    )
    assert len(graphs) == 3, "one graph per cache, for all steps"
    for setting in settings:
        one, other = eager[setting], compiled[setting]
        assert isinstance(one, dict)
        assert isinstance(other, dict)
        assert other["bins"][0]["kl"] == pytest.approx(one["bins"][0]["kl"], rel=0.1, abs=1e-9)


def test_texts_begin_at_equal_distances() -> None:
    class Ids:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(1, 1)
            self.model.device = torch.device("cpu")  # type: ignore[assignment]

        def tokenizer(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.arange(len(text))[None]}

    loaded: Loaded = Ids()  # type: ignore[assignment]
    assert text_ids(loaded, "x" * 21, 2, 3).tolist() == [[0, 1, 2], [10, 11, 12]]
    with pytest.raises(ValueError, match="need 22, the text given has 21"):
        text_ids(loaded, "x" * 21, 2, 11)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_copies_lose_more_than_separate_ones(kind: str) -> None:
    record = measure_synthetic(kind, Setting("bfloat16"), rows=2, steps=300)
    assert record["kept_after_windows"] > 0.5
    ratios = [part["ratio"] for part in record["bins"]]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 2
    last = record["bins"][-1]
    assert 1e-4 < last["separate"] < last["shared"] < 0.05
    assert last["ratio_rows"][0] <= last["ratio"] <= last["ratio_rows"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_remember_half_of_their_state_for_many_windows(kind: str) -> None:
    geometry = precision_synthetic.LayerGeometry(kind, **precision_synthetic.DIMENSIONS)
    for window in (4, 16):
        inputs = Inputs(kind, geometry, 2, window)
        total = sum(inputs.log_decay(inputs.draw()) for _ in range(precision_synthetic.WINDOWS * window))
        assert isinstance(total, torch.Tensor)
        assert (total.exp() > 0.5).all()
    assert separate(Setting("fp8_sr", window=4)) == Setting("float32", "fp8", 4)


def test_from_end_to_end_resumed_and_plotted(call: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "precision.json"
    arguments = ("--device=cpu", "--texts=2", "--length=20", "--prompt=9", f"--output={path}", "--together=2")
    grid = ("--grid=float32", "--grid=bfloat16/w4", "--grid=float32/s0.01")
    first = call("eval_precision", *arguments, *grid, "--model=nemotron_h")
    assert first.exit_code == 0, first.output
    assert first.output.count("nemotron_h/float32/2x20: 20 of 20 tokens") == 2, "two groups"
    data = json.loads(path.read_text())
    keys = [f"nemotron_h/float32/2x20/{name}" for name in ("float32/w16", "bfloat16/w4", "heads", "float32/w16/s0.01")]
    assert list(data["cells"]) == keys
    assert "skipped" in data["cells"][keys[3]]
    assert "skipped" not in data["cells"][keys[0]]
    again = call("eval_precision", *arguments, *grid, "--model=nemotron_h")
    assert "measured" not in again.output
    assert json.loads(path.read_text()) == data
    assert f"{keys[1]}  done" in call("eval_precision", *arguments, *grid, "--model=nemotron_h", "--cells").output
    failing = call("eval_precision", *arguments, "--model=nemotron_h", "--grid=unheard-of")
    assert failing.exit_code == 1
    assert json.loads(path.read_text()) == data
    layers = call("eval_precision", *arguments, "--synthetic", "--grid=bfloat16/w4")
    assert layers.exit_code == 0, layers.output
    with pytest.raises(ValueError, match="--synthetic"):
        call("eval_precision", *arguments, "--synthetic", "--grid=float32/fp8")
    nothing = tmp_path / "nothing.json"
    nothing.write_text(json.dumps({"environments": [], "cells": {}}))
    others = (f"--{name}={nothing}" for name in ("kernels", "generate", "speculative"))
    plotted = call("plot_results", *others, f"--precision={path}", f"--output={tmp_path}")
    assert plotted.exit_code == 0
    for start in ("| nemotron_h | bfloat16/w4 |", "| nemotron_h | 40 |", "| gated_delta | bfloat16/w4 |"):
        assert start in plotted.output
    assert (tmp_path / "precision-divergence.svg").stat().st_size > 1000
    cells = json.loads(path.read_text())["cells"]
    check_tables(cells)


def check_tables(cells: dict[str, Any]) -> None:
    records = {key: cell for key, cell in cells.items() if "decay_skip" in cell}
    wrong = {name: value for name, value in next(iter(records.values())).items() if name != "bins"}
    records["wrong"] = wrong | {"status": "wrong: not finite"}
    assert all(len(row) == len(PRECISION_COLUMNS) for row in precision_rows(records))
    assert all(len(row) == len(summary_columns(records)) for row in precision_summary(records))
    shared = next(cell for cell in records.values() if cell["checkpoint"] == "bfloat16")
    smaller = [part | {"kl": part["kl"] / 4} for part in shared["bins"]]
    pair = {"shared": shared, "copy": shared | {"checkpoint": "float32", "readout": "bfloat16", "bins": smaller}}
    ratios = list(ratio_rows(pair))
    assert [(row[0], row[1], row[-1]) for row in ratios] == [("nemotron_h", "bfloat16/w4", "4.0")] * len(smaller)
    assert {len(row) for row in ratios} == {len(RATIO_COLUMNS)}
    assert not list(ratio_rows({"shared": shared}))
    heads = {key: cell for key, cell in cells.items() if "memory_tokens" in cell}
    assert {len(row) for row in heads_rows(heads)} == {len(HEADS_COLUMNS)}
    layers = {key: cell for key, cell in cells.items() if "kind" in cell}
    assert {len(row) for row in synthetic_rows(layers)} == {len(SYNTHETIC_COLUMNS)}


def test_help(call: Callable[..., Result]) -> None:
    result = call("eval_precision", "--help")
    assert result.exit_code == 0
    assert "--synthetic" in result.output
