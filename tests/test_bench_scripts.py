"""The benchmarks as far as they run without a GPU: presets, checks, resuming, plots, and both from end to end."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

pytest.importorskip("triton")

from replay_transformers.cache import ReplayCache
from replay_transformers.geometry import STATE_SPACE, LayerGeometry
from replay_transformers.kernels.mamba2 import reference as mamba2
from scripts.benchmarks import kernel_cells, operators
from scripts.benchmarks.checks import WrongResultError, check_eager, check_replay, check_update
from scripts.benchmarks.eager import EAGER, Tile, tiles
from scripts.benchmarks.generate_cells import Settings, logit_error
from scripts.benchmarks.generate_steps import StepRecorder, run_generate
from scripts.benchmarks.precision_grid import Setting, parse_precisions
from scripts.benchmarks.presets import layers_that_fit, load_presets, parameter_count
from scripts.benchmarks.profiles import step_profile
from scripts.benchmarks.results import Budget, Results
from scripts.benchmarks.stock import SlowStockError, provide_mamba_ssm, require_fast
from scripts.benchmarks.summary import kernel_summary
from scripts.benchmarks.tables import KERNEL_COLUMNS, kernel_rows, speed_up
from scripts.benchmarks.timing import Timing, measure, quantile
from scripts.benchmarks.weights import assert_usable, build_model
from tests.kernels import oracles
from tests.support.generation import CACHE_ARGUMENT
from tests.support.scripts import runner

PRESETS = load_presets()
RELEASED = [name for name, preset in PRESETS.items() if not preset.is_tiny]
TINY = [name for name, preset in PRESETS.items() if preset.is_tiny]
CPU = torch.device("cpu")
GEOMETRIES = {
    "mamba2": LayerGeometry("mamba2", heads=4, groups=2, head_dim=12, state_dim=16, conv_kernel=4),
    "gated_delta": LayerGeometry("gated_delta", heads=4, groups=2, head_dim=12, state_dim=8, conv_kernel=4),
}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    return runner(monkeypatch)


@pytest.mark.slow
@pytest.mark.no_poison  # which takes real memory
@pytest.mark.parametrize("name", RELEASED)
def test_released_presets_have_the_layers_and_parameters_of_the_models(name: str) -> None:
    preset = PRESETS[name]
    assert sum(geometry.kind in STATE_SPACE for geometry in preset.geometries()) == preset.ssm_layers
    assert parameter_count(preset.build("meta", torch.bfloat16)) / 1e9 == pytest.approx(preset.billions, abs=0.006)


@pytest.mark.slow
@pytest.mark.no_poison  # which takes real memory
@pytest.mark.parametrize("name", RELEASED)
def test_what_does_not_fit_is_cut_where_the_pattern_of_layers_repeats(name: str) -> None:
    preset = PRESETS[name]
    kinds = [geometry.kind in STATE_SPACE for geometry in preset.geometries()]
    count = layers_that_fit(preset, 30 * 2**30)
    cut = [geometry.kind in STATE_SPACE for geometry in preset.geometries(count)]
    assert cut == kinds[:count]
    assert count == len(kinds) or (kinds[count] and not kinds[count - 1])
    assert (count == len(kinds)) == (preset.billions * 2e9 < 30 * 2**30)
    with pytest.raises(ValueError, match="no part"):
        layers_that_fit(preset, 1000)


@pytest.mark.parametrize("name", TINY)
def test_random_weights_remember(name: str) -> None:
    model, layers = build_model(PRESETS[name], "cpu", weight_bytes=2**30, dtype=torch.float32)
    assert layers == len(PRESETS[name].geometries())
    assert_usable(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="finite"):
        assert_usable(model)


@pytest.mark.parametrize("name", TINY)
def test_logits_without_the_state_are_refused(name: str, enabled: None) -> None:
    model, _ = build_model(PRESETS[name], "cpu", weight_bytes=2**30, dtype=torch.float32)
    ids, errors = torch.randint(1, 128, (2, 65)), []
    with torch.no_grad():
        want = model(ids, use_cache=False).logits[None, :, -1]
        for keeps in (1, 0):
            cache = ReplayCache(model.config)
            model(ids[:, :64], **{CACHE_ARGUMENT: cache})
            for index, geometry in enumerate(PRESETS[name].geometries()):
                if geometry.kind in STATE_SPACE:
                    cache.layers[index].checkpoint.mul_(keeps)
            errors.append(logit_error(model(ids[:, 64:], **{CACHE_ARGUMENT: cache}).logits[None, :, -1], want))
    assert errors[0] < 1e-3
    assert errors[1] > 2 * Settings.tolerance


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("tile", [Tile(4, 1), Tile(8, 2), Tile(16, 1)], ids=str)
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_eager_kernels_equal_the_recurrence(kind: str, tile: Tile) -> None:
    layer = operators.eager_layer(GEOMETRIES[kind], 3, torch.float32, CPU)
    inputs = {name: x[:, None] if x.ndim > 1 else x for name, x in layer.items() if name not in ("state", "y")}
    output, state = getattr(oracles, kind)(**inputs, state=layer["state"].clone())
    EAGER[kind].update(tile, **layer)
    torch.testing.assert_close(layer["y"], output[:, 0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer["state"], state.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", GEOMETRIES)
def test_a_wrong_eager_kernel_is_refused(kind: str) -> None:
    operator, layer = EAGER[kind], operators.eager_layer(GEOMETRIES[kind], 3, torch.float32, CPU)
    tile = tiles(GEOMETRIES[kind])[0]
    check_eager(operator, tile, layer)
    broken = type(operator)(lambda tile, **tensors: tensors["y"].zero_(), operator.plain)
    with pytest.raises(WrongResultError, match="eager output"):
        check_eager(broken, tile, layer)


def test_a_wrong_replay_step_is_refused() -> None:
    geometry = GEOMETRIES["mamba2"]
    layer = operators.replay_layer(
        geometry, 5, 2, capacity=26, dtype=torch.float32, precision=Setting("float32"), device=CPU
    )
    rings = {name: ring.clone() for name, ring in layer.buffers.items() if name != "state"}
    committed = torch.tensor([16, 3, 16, 0, 9])
    place = operators.cursor(committed, torch.where(committed == 16, committed, 0))

    def check(step: Callable[..., Any]) -> None:
        check_replay("step", step, mamba2.replay_step, layer, place)

    def scaled(*operands: Any, **buffers: Any) -> Any:
        return 1.01 * mamba2.replay_step(*operands, **buffers)

    def never_folds(*operands: Any, **buffers: Any) -> Any:
        return mamba2.replay_step(*operands, **{**buffers, "state": buffers["state"].clone()})

    def reads_dead_slots(*operands: Any, **buffers: Any) -> Any:
        return mamba2.replay_step(*operands, **buffers) + 0 * buffers["ring_x"].sum()

    check(mamba2.replay_step)
    for step, message in ((scaled, "output"), (never_folds, "state"), (reads_dead_slots, "NaN")):
        with pytest.raises(WrongResultError, match=message):
            check(step)
    assert all(torch.equal(layer.buffers[name], ring) for name, ring in rings.items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_steps_that_fold_pass_the_check(kind: str) -> None:
    kernel, reference = (
        import_module(f"replay_transformers.kernels.{kind}.{name}").replay_step for name in ("triton", "reference")
    )
    geometry, rows, window = replace(GEOMETRIES[kind], heads=2, groups=1), 3, 2
    full = torch.full((rows,), window)
    layer = operators.replay_layer(
        geometry, rows, 1, capacity=5, dtype=torch.bfloat16, precision=Setting("float32"), device=CPU
    )
    before = {name: tensor.clone() for name, tensor in layer.buffers.items()}
    places = [operators.cursor(full, full), operators.spread_cursors(rows, window, CPU)[0]]
    for place in (*places, {**places[0], "pending": torch.tensor([0, 1, 2])}):
        layer.buffers["state"].copy_(before["state"])
        check_replay(kind, step=kernel, reference=reference, layer=layer, cursor=place)
        for name, tensor in layer.buffers.items():
            assert torch.equal(tensor, before[name]) == (name != "state")

    def forgets_a_record(*operands: Any, **buffers: Any) -> Any:
        return kernel(*operands, **{**buffers, "base": buffers["base"] + 1, "committed": buffers["committed"] - 1})

    with pytest.raises(WrongResultError):
        check_replay(kind, forgets_a_record, reference, layer, places[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_a_wrong_update_is_refused(kind: str) -> None:
    update = import_module(f"replay_transformers.kernels.{kind}.update").update
    layer = operators.replay_layer(
        GEOMETRIES[kind], 3, 1, capacity=4, dtype=torch.bfloat16, precision=Setting("float32"), device=CPU
    )
    check_update(kind, update, layer)
    with pytest.raises(WrongResultError, match="update: output"):
        check_update(kind, lambda *operands, state: 1.03 * update(*operands, state=state), layer)
    with pytest.raises(WrongResultError, match="update: state"):
        check_update(kind, lambda *operands, state: update(*operands, state=state.clone()), layer)


def test_spread_cursors_flush_one_row_in_a_window() -> None:
    cursors = operators.spread_cursors(32, 16, CPU)
    assert len(cursors) == 16
    for place in cursors:
        folds, committed = place["folds"], place["committed"]
        assert folds is not None
        assert committed is not None
        assert int((folds > 0).sum()) == 2
        assert torch.equal(folds[folds > 0], committed[folds > 0])
        assert committed.unique().tolist() == list(range(1, 17))


def test_results_are_resumed_cell_by_cell(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.json"
    first, second = {"gpu": "one"}, {"gpu": "two"}
    results = Results(path)
    results.put("a", {"x": 1}, first)
    resumed = Results(path)
    assert not resumed.needs("a")
    assert resumed.needs("b")
    resumed.put("b", {"x": 2}, second)
    assert json.loads(path.read_text()) == {
        "environments": [first, second],
        "cells": {"a": {"x": 1, "environment": 0}, "b": {"x": 2, "environment": 1}},
    }
    again = Results(path, redo=True)
    assert again.needs("a")
    again.put("a", {"x": 3}, second)
    assert not again.needs("a")
    assert again.needs("b")
    resumed.put("c", {"x": 4}, first)  # which was read before the last cell was written
    assert Results(path).cells == {
        "a": {"x": 3, "environment": 1},
        "b": {"x": 2, "environment": 1},
        "c": {"x": 4, "environment": 0},
    }


def test_the_budget_keeps_room_for_the_longest_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 25.0, 30.0, 36.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    budget = Budget(1.0)
    assert [budget.has_room() for _ in range(4)] == [True, True, True, False]
    monkeypatch.undo()
    assert Budget(None).has_room()


def test_a_profile_is_what_decoding_takes_beyond_the_prompt() -> None:
    matrix = torch.randn(64, 64)

    def generate(count: int) -> None:
        matrix.exp()  # the prompt, once in every call
        for _ in range(count):
            torch.mm(matrix, matrix)

    profile = step_profile(generate, 2, 10, most=1)
    assert set(profile) == {"aten::mm", "all others"}
    assert profile["aten::mm"] > 0


def test_quantiles_and_the_clock() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.2) == 2.0
    calls: list[int] = []
    timing = measure([lambda: calls.append(1)] * 5, CPU)
    assert len(calls) == 5
    assert 0 < timing.p20 <= timing.p50 <= timing.p80


def test_stock_on_slow_functions_is_refused(tmp_path: Path) -> None:
    model, _ = build_model(PRESETS["tiny-nemotron-h"], "cpu", weight_bytes=2**30, dtype=torch.float32)
    if "mamba_ssm" not in sys.modules:
        with pytest.raises(SlowStockError, match="expected a function of mamba_ssm"):
            require_fast(model)
    with pytest.raises(SlowStockError, match="imported already"):
        provide_mamba_ssm(tmp_path)


def test_the_recorder_forces_tokens_and_keeps_logits() -> None:
    model, _ = build_model(PRESETS["tiny-qwen3.5"], "cpu", weight_bytes=2**30, dtype=torch.float32)
    ids, forced = torch.tensor([[3, 4], [5, 6]]), torch.tensor([[7, 8, 9], [9, 8, 7]])
    recorder = StepRecorder(CPU, [1], forced)
    _, output = run_generate(model, ids, 3, recorder)
    assert torch.equal(output[:, 2:], forced)
    assert [tuple(step.shape) for step in recorder.logits] == [(1, 128)] * 3
    assert len(recorder.milliseconds()) == 3


def test_generate_from_end_to_end_and_resumed(call: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "generate.json"
    arguments = ("--device=cpu", "--dtype=float32", "--allow-slow-stock", "--shape=2x5", "--short=2", "--long=5")
    where = (f"--output={path}", "--only=/dynamic/", "--only=/replay/", "--preset=tiny-nemotron-h")
    assert call("bench_generate", *arguments, *where).exit_code == 0
    data = json.loads(path.read_text())
    assert list(data["cells"]) == ["tiny-nemotron-h/dynamic/b2/p5", "tiny-nemotron-h/replay/b2/p5"]
    for cell in data["cells"].values():
        assert cell["status"] == "measured"
        assert cell["is_whole"]
        assert cell["logit_error"] < 1e-3
        assert cell["step_ms"] > 0
    again = call("bench_generate", *arguments, *where)
    assert "ms a step" not in again.output
    assert json.loads(path.read_text()) == data
    wrong = call("bench_generate", *arguments, *where, "--redo", "--tolerance=-1")
    assert wrong.exit_code == 1
    assert all("step_ms" not in cell for cell in json.loads(path.read_text())["cells"].values())
    assert "dynamic/b2/p5  wrong" in call("bench_generate", *arguments, *where, "--cells").output


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("name", TINY)
def test_kernels_from_end_to_end_and_plotted(call: Callable[..., Result], tmp_path: Path, name: str) -> None:
    path = tmp_path / "kernels.json"
    arguments = ("--device=cpu", "--implementation=reference", "--batch=1", f"--output={path}", "--ceiling-gb=0.001")
    assert call("bench_kernels", *arguments, f"--preset={name}", "--checkpoint=float32", "--profile").exit_code == 0
    cell = json.loads(path.read_text())["cells"][f"{name}/b1"]
    assert set(cell["replay"]) == {"t1/float32", "t4/float32"}
    step = cell["replay"]["t1/float32"]
    assert step["amortised"] == pytest.approx((15 * step["plain"]["p50"] + step["flush"]["p50"]) / 16, rel=1e-3)
    assert "spread" in step
    profiles = step["profile_us"]
    assert set(profiles) == {"plain", "flush"}
    assert all(times and all(time > 0 for time in times.values()) for times in profiles.values())
    assert next(iter(profiles["plain"].values())) == max(profiles["plain"].values())
    nothing = tmp_path / "generate.json"
    nothing.write_text(json.dumps({"environments": [], "cells": {}}))
    plotted = call("plot_results", f"--kernels={path}", f"--generate={nothing}", f"--output={tmp_path}")
    assert plotted.exit_code == 0
    assert f"| {name} | 1 |" in plotted.output
    assert (tmp_path / "kernels-speed-up.svg").stat().st_size > 1000
    assert (tmp_path / "kernels-bandwidth.svg").stat().st_size > 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("kind", GEOMETRIES)
def test_small_states_are_written_through(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = replace(GEOMETRIES[kind], heads=2, groups=1)
    names = ["float32", "bfloat16", "fp8", "float32/fp8", "float32/s0.5"]
    precisions = tuple(parse_precisions(names, "triton"))
    settings = kernel_cells.Settings("triton", 2, (1, 2), precisions, ceiling=1e12, device=CPU)
    state = geometry.heads * geometry.head_dim * geometry.state_dim
    checked: list[str] = []
    for name in ("check_eager", "check_replay", "check_update"):
        monkeypatch.setattr(kernel_cells, name, lambda *_, name=name: checked.append(name))
    monkeypatch.setattr(kernel_cells, "measure", lambda calls, *_: Timing(1, 1, 1))
    monkeypatch.setattr(kernel_cells, "WRITE_THROUGH_BYTES", 2 * state)
    steps = {name: kernel_cells.measure_step(geometry, 1, *step, settings) for name, step in settings.steps.items()}
    assert [name for name, step in steps.items() if "update" in step] == ["t1/bfloat16"]
    assert checked.count("check_update") == 1


def test_speed_ups_count_the_flushes() -> None:
    def us(time: float) -> dict[str, float]:
        return {"p20": time, "p50": time, "p80": time}

    step = {"plain": us(1), "plain_with_folds": us(2), "flush": us(9), "amortised": 4.0, "share_of_ceiling": 0.5}
    cell = {
        "preset": "made up", "batch": 64, "eager": {**us(20), "share_of_ceiling": 0.5},
        "replay": {"t1/float32": step | {"spread": us(5)}, "t4/float32": step},
    }  # fmt: skip
    assert [speed_up(cell, name) for name in cell["replay"]] == [4, 20]
    assert [speed_up({**cell, "batch": 8}, name) for name in cell["replay"]] == [5, 20]
    columns = [KERNEL_COLUMNS.index(f"speed-up {flushes}") for flushes in ("amortised", "spread")]
    assert [[row[i] for i in columns] for row in kernel_rows({"": cell})] == [["5.00", "4.00"], ["20.00", "-"]]
    cell["replay"]["t1/float32"]["update"] = us(2)
    assert [[row[i] for i in columns] for row in kernel_rows({"": cell})] == [["10.00", "10.00"], ["20.00", "-"]]
    assert all(len(row) == len(KERNEL_COLUMNS) for row in kernel_rows({"": cell, "1": {**cell, "replay": {}}}))
    assert next(iter(kernel_summary({"": cell})))[3:5] == ["2.0", "10.00"]


def test_plots_and_tables_from_synthetic_results(call: Callable[..., Result], tmp_path: Path) -> None:
    environments = [dict.fromkeys(("gpu", "torch", "triton", "transformers", "commit", "date"), "made up")]
    common = {"preset": "qwen3.5-4b", "prompt": 64, "environment": 0, "is_whole": False, "layers": 8}
    steps = {"dynamic": 40.0, "static": 30.0, "replay_static": 12.0}
    cells = {
        f"{name}/{batch}": {**common, "configuration": name, "batch": batch, "status": "measured", "step_ms": step}
        for name, step in steps.items()
        for batch in (1, 256)
    }
    cells["replay/256"] = {**common, "configuration": "replay", "batch": 256, "status": "does not fit"}
    for benchmark, content in (("generate", cells), ("kernels", {})):
        (tmp_path / f"{benchmark}.json").write_text(json.dumps({"environments": environments, "cells": content}))
    files = [f"--{name}={tmp_path / f'{name}.json'}" for name in ("kernels", "generate")]
    result = call("plot_results", *files, f"--output={tmp_path}", "--suffix=png")
    assert result.exit_code == 0
    assert "| qwen3.5-4b, 8 layers | 256 | 64 | 40.0 | 30.0 | does not fit | 12.0 | - | - | - | 2.50 |" in result.output
    assert (tmp_path / "generate-step.png").stat().st_size > 1000


@pytest.mark.parametrize("script", ["bench_kernels", "bench_generate", "plot_results", "memory_table"])
def test_help(call: Callable[..., Result], script: str) -> None:
    result = call(script, "--help")
    assert result.exit_code == 0
    assert "--output" in result.output
