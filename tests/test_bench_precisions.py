"""The kernel benchmark's precisions: checks that refuse, traffic, cells that grow, tables; the page about memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

pytest.importorskip("triton")

import replay_transformers as rt
from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.formats import FORMATS, StoredState
from replay_transformers.traffic import cache_buffers
from scripts.benchmarks import kernel_cells, operators
from scripts.benchmarks.checks import WrongResultError, check_replay
from scripts.benchmarks.plots import plot_precision_steps
from scripts.benchmarks.precision_grid import Setting, parse_precisions
from scripts.benchmarks.presets import load_presets
from scripts.benchmarks.results import ROOT
from scripts.benchmarks.summary import PRECISION_SUMMARY, precision_summary
from scripts.benchmarks.tables import KERNEL_COLUMNS, kernel_rows, speed_up
from scripts.benchmarks.weights import build_model
from tests.support.generation import CACHE_ARGUMENT
from tests.support.scripts import runner

CPU = torch.device("cpu")
PRESETS = load_presets()
TINY = [name for name, preset in PRESETS.items() if preset.is_tiny]
GEOMETRIES = {
    "mamba2": LayerGeometry("mamba2", heads=2, groups=1, head_dim=12, state_dim=16, conv_kernel=4),
    "gated_delta": LayerGeometry("gated_delta", heads=2, groups=1, head_dim=12, state_dim=16, conv_kernel=4),
}
NAMES = [
    "float32", "float32/bfloat16", "float32/fp8", "float32/nvfp4", "fp8", "fp8_sr", "float16_sr", "nvfp4", "fp8/nvfp4",
    "float32/s0.3", "float32/fp8/s0.3",
]  # fmt: skip
WINDOW = 3
WIDE = (1e-3, 1.0)
EVERY_KIND = pytest.mark.parametrize("kind", GEOMETRIES)
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    return runner(monkeypatch)


def make(kind: str, name: str, rows: int = 3, tokens: int = 1) -> operators.ReplayLayer:
    return operators.replay_layer(
        GEOMETRIES[kind], rows, tokens, capacity=WINDOW + tokens, dtype=torch.bfloat16, precision=Setting.parse(name),
        device=CPU, time_steps=WIDE,
    )  # fmt: skip


def kernel(kind: str, name: str) -> Callable[..., Any]:
    step: Callable[..., Any] = import_module(f"replay_transformers.kernels.{kind}.{name}").replay_step
    return step


def due(rows: int) -> dict[str, torch.Tensor | None]:
    """The first row is not due, the others are."""
    full = torch.full((rows,), WINDOW)
    return operators.cursor(full, torch.where(torch.arange(rows) > 0, full, 0))


def test_precisions_are_settings_without_a_window() -> None:
    settings = parse_precisions([*NAMES, "float32"], "triton")
    assert [setting.label for setting in settings] == NAMES
    assert [FORMATS[setting.read].name for setting in settings[:3]] == ["float32", "bfloat16", "fp8"]
    for wrong in ("float32/w8", "float8", "fp8/fp8_sr", "float64", "float32/s1", ""):
        with pytest.raises(ValueError, match=r"expected|must|impl"):
            parse_precisions([wrong], "triton")


@INTERPRETED
@EVERY_KIND
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_every_precision_pass_the_check(kind: str, name: str) -> None:
    layer, middle = make(kind, name), torch.full((3,), 1)
    before = {key: ring.clone() for key, ring in layer.rings.items()}
    for place in (operators.cursor(middle, None), operators.cursor(middle, torch.zeros_like(middle)), due(3)):
        check_replay(name, kernel(kind, "triton"), kernel(kind, "reference"), layer, place)
    assert all(torch.equal(layer.rings[key], ring) for key, ring in before.items())


@EVERY_KIND
@pytest.mark.parametrize("name", ["float32/fp8", "fp8_sr", "nvfp4", "float32/bfloat16"])
def test_wrong_steps_are_refused(kind: str, name: str) -> None:
    reference = kernel(kind, "reference")

    def refused(step: Callable[..., Any], message: str) -> None:
        layer = make(kind, name)
        check_replay(name, reference, reference, layer, due(3))
        with pytest.raises(WrongResultError, match=message):
            check_replay(name, step, reference, layer, due(3))

    def written(states: dict[str, Any], change: Callable[[torch.Tensor], None]) -> None:
        last = list(states.values())[-1]
        change(last.parts["values"] if isinstance(last, StoredState) else last)

    def states_of(arguments: dict[str, Any]) -> dict[str, Any]:
        return {key: arguments[key] for key in ("state", "readout") if key in arguments}

    def spoils_a_row(*operands: Any, **arguments: Any) -> Any:
        output = reference(*operands, **arguments)
        written(states_of(arguments), lambda values: values[0].add_(1))
        return output

    def folds_too_little(*operands: Any, **arguments: Any) -> Any:
        return reference(*operands, **{**arguments, "folds": (arguments["folds"] - 1).clamp(min=0)})

    def reads_the_checkpoint(*operands: Any, **arguments: Any) -> Any:
        readout = arguments.pop("readout")
        output = reference(*operands, **arguments)
        values = arguments["state"].float()
        readout.write(values, arguments["base"]) if isinstance(readout, StoredState) else readout.copy_(values)
        return output

    refused(spoils_a_row, "not due|NaN|relative error")
    refused(folds_too_little, "apart|differ|relative error")
    if "/" in name:
        refused(reads_the_checkpoint, "output")


def test_random_bits_of_another_row_are_refused() -> None:
    """Stochastic rounding is checked to the bit, by the place of a row in the whole batch."""
    reference = kernel("mamba2", "reference")

    def other_bits(*operands: Any, **arguments: Any) -> Any:
        state = arguments.pop("state")
        wrong = StoredState(state.format, state.parts, state.states, state.transposed, state.key + 1)
        return reference(*operands, state=wrong, **arguments)

    layer = make("mamba2", "fp8_sr", rows=9)
    place = operators.cursor(torch.full((9,), WINDOW), torch.where(torch.arange(9) % 5 == 4, WINDOW, 0))
    check_replay("due in rows 4", reference, reference, layer, place)
    with pytest.raises(WrongResultError, match=r"values differ|output: relative"):
        check_replay("due in rows 4", other_bits, reference, layer, place)


@EVERY_KIND
def test_the_share_of_heads_that_are_skipped(kind: str) -> None:
    layer = make(kind, "float32/s0.3", rows=40)
    place = operators.cursor(torch.full((40,), 2), None)
    share = operators.skipped_share(layer, place)
    assert 0 < share < 1
    ring, index = ("ring_dt", 1) if kind == "mamba2" else ("ring_g", 3)
    logs, new, rate = layer.rings[ring], layer.operands[index], layer.operands[4] if kind == "mamba2" else 1
    count = 0
    for row in range(40):
        slots = [(int(place["base"][row]) + age) % (WINDOW + 1) for age in range(2)]  # type: ignore[index]
        total = logs[row, :, slots].sum(-1) + new[row, 0]
        count += int((total * rate < torch.tensor(0.3).log()).sum())
    assert share == pytest.approx(count / 80)
    assert operators.skipped_share(make(kind, "float32"), place) == 0
    usual = operators.replay_operands(GEOMETRIES[kind], 40, 1, torch.float32, CPU)
    assert float(usual[1].max() if kind == "mamba2" else -usual[3].min() / 16) <= operators.TIME_STEPS[1]


def test_layers_and_traffic_follow_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = GEOMETRIES["mamba2"]
    monkeypatch.setattr(kernel_cells, "cache_bytes", lambda device: 50 * 2 * 12 * 16)
    counts = {name: kernel_cells.layer_count(geometry, 1, FORMATS[name], CPU) for name in ("float32", "fp8", "nvfp4")}
    assert counts["float32"] == 50
    assert 170 < counts["fp8"] < 200 < 300 < counts["nvfp4"] < 400
    assert kernel_cells.layer_count(geometry, 1, FORMATS["float32"], CPU, skipped=0.5) == 100
    assert kernel_cells.layer_count(geometry, 1, FORMATS["float32"], CPU, skipped=1.0) == kernel_cells.MOST_LAYERS
    read, written = operators.plain_bytes(geometry, 2, 1, 0, FORMATS["fp8"])
    assert read == 2 * 2 * 12 * (16 + 2)
    more, _ = operators.plain_bytes(geometry, 2, 1, 1, FORMATS["fp8"])
    assert more - read == written == 2 * (2 * 2 * 12 + 2 * 16 + 4 * 2)


def test_time_is_by_the_bytes_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = replace(GEOMETRIES["mamba2"], head_dim=128, state_dim=128)
    precisions = tuple(parse_precisions(["float32", "float32/fp8", "float32/s0.3"], "reference"))
    settings = kernel_cells.Settings("reference", 2, (1,), precisions, ceiling=1e12, device=CPU, time_steps=WIDE)
    monkeypatch.setattr(kernel_cells, "measure", lambda calls, *_: kernel_cells.Timing(1, 1, 1))
    found = {name: kernel_cells.measure_step(geometry, 8, *step, settings) for name, step in settings.steps.items()}
    whole, copy, skip = (step["plain_bytes"] for step in found.values())
    assert 3.5 < whole / copy < 4
    share = found["t1/float32/s0.3"]["skipped"]
    assert 0 < share < 1
    assert skip == pytest.approx(whole - share * 8 * 2 * 128 * 128 * 4, rel=1e-3)
    shares = [step["share_of_ceiling"] for step in found.values()]
    assert shares == [round(size / 1e6, 4) for size in (whole, copy, skip)]


@pytest.mark.parametrize("preset", [TINY[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TINY[1:])])
def test_precisions_are_added_to_a_cell(call: Callable[..., Result], tmp_path: Path, preset: str) -> None:
    path = tmp_path / "kernels.json"
    arguments = ("--device=cpu", "--implementation=reference", "--batch=2", f"--output={path}", "--ceiling-gb=0.001")

    def run(*more: str) -> dict[str, Any]:
        assert call("bench_kernels", *arguments, f"--preset={preset}", "--tokens=1", *more).exit_code == 0
        cell: dict[str, Any] = json.loads(path.read_text())["cells"][f"{preset}/b2"]
        return cell

    first = run("--checkpoint=float32")
    both = run("--checkpoint=float32", "--checkpoint=float32/fp8")
    assert list(both["replay"]) == ["t1/float32", "t1/float32/fp8"]
    assert both["replay"]["t1/float32"] == first["replay"]["t1/float32"]
    assert both["eager"] == first["eager"]
    added = both["replay"]["t1/float32/fp8"]
    assert speed_up(both, "t1/float32/fp8") == pytest.approx(added["eager_us"] / added["amortised"])
    assert run("--checkpoint=float32/fp8") == both
    assert run("--eager-only") == both
    again = run("--checkpoint=float32/fp8", "--redo")
    assert again["replay"]["t1/float32"] == first["replay"]["t1/float32"]
    assert again["replay"]["t1/float32/fp8"] != added
    skip = run("--checkpoint=float32/s0.3", "--time-steps", "0.001", "1")["replay"]["t1/float32/s0.3"]
    assert 0 < skip["skipped"] < 1
    assert skip["time_steps"] == [0.001, 1]
    nothing = tmp_path / "generate.json"
    nothing.write_text(json.dumps({"environments": [], "cells": {}}))
    plotted = call("plot_results", f"--kernels={path}", f"--generate={nothing}", f"--output={tmp_path}")
    assert f"| {preset} | 2 | float32/fp8 |" in plotted.output
    assert (tmp_path / "kernels-precision.svg").stat().st_size > 1000


def test_a_step_that_fails_does_not_take_the_others_along(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    runner(monkeypatch)
    script = import_module("bench_kernels")
    measure = script.measure_step

    def broken(geometry: Any, rows: int, tokens: int, precision: Any, settings: Any) -> Any:
        if precision.checkpoint == "fp8":
            raise RuntimeError("out of [bold] registers")
        return measure(geometry, rows, tokens, precision, settings)

    monkeypatch.setattr(script, "measure_step", broken)
    result = call(
        "bench_kernels", "--device=cpu", "--implementation=reference", "--batch=1", "--tokens=1", f"--output={path}",
        "--ceiling-gb=0.001", "--preset=tiny-nemotron-h", "--checkpoint=fp8", "--checkpoint=nvfp4",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "out of [bold] registers" in result.output
    assert list(json.loads(path.read_text())["cells"]["tiny-nemotron-h/b1"]["replay"]) == ["t1/nvfp4"]


def test_tables_of_precisions(tmp_path: Path) -> None:
    def step(time: float, **more: Any) -> dict[str, Any]:
        us = {"p20": time, "p50": time, "p80": time}
        return {"plain": us, "plain_with_folds": us, "flush": us, "amortised": time, "share_of_ceiling": 0.5, **more}

    cell = {
        "preset": "made up", "batch": 8, "eager": {"p20": 8, "p50": 8, "p80": 8, "share_of_ceiling": 0.5},
        "replay": {
            "t1/float32": step(4.0), "t1/float32/fp8": step(2.0, eager_us=10.0),
            "t1/float32/s0.001": step(3.0, skipped=0.25), "t4/fp8": step(8.0),
        },
    }  # fmt: skip
    rows = list(kernel_rows({"": cell}))
    assert all(len(row) == len(KERNEL_COLUMNS) for row in rows)
    names = [row[KERNEL_COLUMNS.index("checkpoint")] for row in rows]
    assert names == ["float32", "float32/fp8", "float32/s0.001", "fp8"]
    assert [row[KERNEL_COLUMNS.index("skipped")] for row in rows] == ["-", "-", "25.0%", "-"]
    assert speed_up(cell, "t4/fp8") == 4
    summary = list(precision_summary({"": cell}))
    assert [row[PRECISION_SUMMARY.index("speed-up")] for row in summary] == ["2.00", "5.00", "2.67"]
    assert [row[PRECISION_SUMMARY.index("over float32")] for row in summary] == ["1.00", "2.50", "1.33"]
    assert all(len(row) == len(PRECISION_SUMMARY) for row in summary)
    assert plot_precision_steps({"": cell}, tmp_path / "steps.svg", "made up").stat().st_size > 1000


@pytest.mark.no_poison  # buffers on the device "meta" have no memory
def test_the_page_about_memory_is_what_the_script_gives(call: Callable[..., Result]) -> None:
    page = (ROOT / "docs" / "memory.md").read_text()
    assert call("memory_table").output == page
    assert len(page.split("\n## ")) == 5


@pytest.mark.no_poison
@pytest.mark.parametrize("name", TINY)
def test_figures_of_memory_are_those_of_caches_in_use(
    name: str, enabled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner(monkeypatch)
    script, preset = import_module("memory_table"), PRESETS[name]
    model, _ = build_model(preset, "cpu", weight_bytes=2**30, dtype=torch.bfloat16)
    ids, cache = torch.tensor([[1, 2, 3]]), rt.ReplayCache(model.config, rt.ReplayConfig(readout="fp8", max_draft=0))
    with torch.no_grad():
        stock = model(ids, use_cache=True).past_key_values
        model(ids, **{CACHE_ARGUMENT: cache})
    grown = {"attention": 0}
    assert script.footprint(preset, Setting("float32", "fp8")) | grown == cache.memory_footprint() | grown
    held = {kind: sum(tensor.numel() for tensor in tensors) for kind, tensors in cache_buffers(stock).items()}
    assert 4 * held["state"] == script.footprint(preset, Setting("float32"))["checkpoint"]
    row = dict(zip(script.COLUMNS, next(script.stock_rows(preset)), strict=True))
    assert row["convolution"] == f"{2 * held['convolution'] / 2**20:.2f}"
