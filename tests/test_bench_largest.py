"""The generate benchmark: states of other precisions, eager updates, and the search for the largest batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from replay_transformers import ReplayConfig, cursor
from replay_transformers.cli.check_memory import Load, predict_peak
from replay_transformers.cursor import Cursor
from scripts.benchmarks import largest_batch
from scripts.benchmarks.generate_cells import (
    EAGER,
    Cell,
    Settings,
    all_cells,
    generate_arguments,
    matching,
    measure_cell,
)
from scripts.benchmarks.largest_batch import (
    MOST_ROWS,
    UNFINISHED,
    LargestBatch,
    Tried,
    next_batch,
    predicted,
    search,
)
from scripts.benchmarks.precision_grid import Setting
from scripts.benchmarks.presets import load_presets
from scripts.benchmarks.summary import (
    GENERATE_SUMMARY,
    LARGEST_SUMMARY,
    generate_columns,
    generate_summary,
    largest_summary,
)
from scripts.benchmarks.weights import build_model
from tests.support.scripts import runner

PRESETS = load_presets()
TINY = [name for name, preset in PRESETS.items() if preset.is_tiny]
MODEL = PRESETS["tiny-nemotron-h"]
ON_A_CPU = ("--device=cpu", "--dtype=float32", "--allow-slow-stock", "--short=2", "--long=5")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    return runner(monkeypatch)


def tried_batches(limit: int, start: int) -> list[int]:
    tried: Tried = {}
    while (batch := next_batch(tried, start)) is not None:
        assert str(batch) not in tried
        tried[str(batch)] = {"step_ms": 1.0} if batch <= limit else None
    return [int(batch) for batch in tried]


def test_steps_double_and_are_bisected() -> None:
    assert tried_batches(1010, 1000) == [1000, 1024]  # two are enough where the guess is good
    assert tried_batches(1030, 1000) == [1000, 1024, 1072, 1048]
    assert tried_batches(980, 1000) == [1000, 976]
    assert tried_batches(1000, 256) == [256, 264, 280, 312, 376, 504, 760, 1272, 1016, 888, 952, 984, 1000]
    assert tried_batches(20, 256) == [256, 248, 232, 200, 136, 8, 72, 40, 24, 16]
    assert tried_batches(7, 256)[-1] == 8
    assert max(tried_batches(10**9, 1)) == MOST_ROWS
    for limit in range(1, 400, 7):
        for start in (1, 8, 64, 250, 399):
            fits = [batch for batch in tried_batches(limit, start) if batch <= limit]
            assert limit // 8 * 8 - max(fits, default=0) <= max(fits, default=0) // 32


@pytest.fixture
def _half_a_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if models were on a GPU with that much memory free."""
    monkeypatch.setattr(largest_batch, "devices_of", lambda _: [torch.device("cuda")])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**28, 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2**28)


def test_there_is_no_first_guess_on_a_cpu() -> None:
    model, _ = build_model(MODEL, "cpu", weight_bytes=2**30, dtype=torch.float32)
    assert predicted(model, cell_of(), Settings()) is None


@pytest.mark.usefixtures("_half_a_gib")
def test_the_first_guess_is_what_should_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build_model(MODEL, "cpu", weight_bytes=2**30, dtype=torch.float32)
    monkeypatch.setattr(largest_batch, "largest_batch", lambda *_: 5000)
    assert predicted(model, cell_of(), Settings()) == 4896  # 98% of 5,000, in eights
    monkeypatch.setattr(largest_batch, "largest_batch", lambda *_: 10)
    assert predicted(model, cell_of(), Settings()) == 8


@pytest.mark.usefixtures("_half_a_gib")
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("configuration", ["replay", "static"])
def test_the_first_guess_on_a_gpu(name: str, configuration: str) -> None:
    """As `check` would have it."""
    model, _ = build_model(PRESETS[name], "cpu", weight_bytes=2**30, dtype=torch.float32)
    cell = LargestBatch(PRESETS[name], configuration, 16, 5, Setting("float32", "fp8"))
    guess = predicted(model, cell, Settings())
    if configuration == "static":
        assert guess is None
        return
    load = Load(ReplayConfig(readout="fp8", max_draft=0), 5 + Settings.long, 5, torch.float32)
    on_meta = PRESETS[name].build("meta", torch.float32).eval()
    assert guess is not None
    assert 0.95 * 2**29 < predict_peak(on_meta, load, guess).total < 2**29


def test_precisions_are_in_the_key() -> None:
    one = Setting("float32", "fp8", decay_skip=0.001)
    keys = [cell.key for cell in all_cells([MODEL], [(2, 64)], None, [one])]
    assert keys[1] == "tiny-nemotron-h/static/b2/p64"
    assert keys[3] == "tiny-nemotron-h/replay_static@float32/fp8/s0.001/b2/p64"
    assert [cell.key for cell in all_cells([MODEL], [(2, 64)], ["replay_static/"])] == [
        "tiny-nemotron-h/replay_static/b2/p64"
    ]
    both = [cell.key for cell in all_cells([MODEL], [(2, 64)], ["/static/", "/replay_static"], [one, Setting("fp8")])]
    assert both.count("tiny-nemotron-h/static/b2/p64") == 1, "the same whatever the replay cache's precision"
    assert {key for key in both if "graphs" in key} == {
        f"tiny-nemotron-h/replay_static_graphs@{label}/b2/p64" for label in ("float32/fp8/s0.001", "fp8")
    }
    searches = [LargestBatch(MODEL, "replay", batch, 64) for batch in (16, 512)]
    assert matching(searches, None) == searches[:1], "where it begins makes no other search"
    assert LargestBatch(MODEL, "static", 256, 64, one).key == "tiny-nemotron-h/static/largest/p64"
    arguments = generate_arguments(Cell(MODEL, "replay_static_window_1", 2, 64, one), Settings())
    chosen = {"checkpoint": "float32", "readout": "fp8", "decay_skip": 0.001, "window": 1}
    assert arguments["cache_config"] == chosen | {"max_draft": 0}


@pytest.mark.parametrize("name", TINY)
def test_generate_with_a_copy(call: Callable[..., Result], tmp_path: Path, name: str) -> None:
    path = tmp_path / "generate.json"
    where = (f"--output={path}", "--only=/dynamic/", "--only=/replay@", f"--preset={name}", "--shape=2x5")
    assert call("bench_generate", *ON_A_CPU, *where, "--checkpoint=float32/bfloat16/s0.0001").exit_code == 0
    cells = json.loads(path.read_text())["cells"]
    assert list(cells) == [f"{name}/dynamic/b2/p5", f"{name}/replay@float32/bfloat16/s0.0001/b2/p5"]
    cell = list(cells.values())[1]
    assert (cell["status"], cell["readout"], cell["decay_skip"]) == ("measured", "bfloat16", 0.0001)
    assert 0 < cell["logit_error"] < 0.1
    with pytest.raises(ValueError, match="readout must be"):
        call("bench_generate", *where, "--checkpoint=float32/fp8_sr")


def cell_of(model: Any = MODEL, batch: int = 16) -> LargestBatch:
    return LargestBatch(model, "replay", batch, 5, Setting("float32", "fp8"))


def test_a_search_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []
    monkeypatch.setattr(largest_batch, "expected_output", lambda *_: None)

    def attempt(model: Any, cell: LargestBatch, batch: int, *_: Any) -> dict[str, Any] | None:
        attempts.append(batch)
        return {"step_ms": batch / 10, "logit_error": 0.1} if batch <= 40 else None

    monkeypatch.setattr(largest_batch, "attempt", attempt)
    saved: list[dict[str, Any]] = []
    room = iter([True, True, True, False])

    def save(record: dict[str, Any]) -> None:
        saved.append(json.loads(json.dumps(record)))

    monkeypatch.setattr(largest_batch, "predicted", lambda *_: None)
    search(None, cell_of(), Settings(), None, save, lambda: next(room))
    assert attempts == [16, 24, 40]
    assert [(record["status"], record["batch"]) for record in saved] == [
        (UNFINISHED, 16),
        (UNFINISHED, 24),
        (UNFINISHED, 40),
    ]
    search(None, cell_of(), Settings(), saved[-1], save, lambda: True)
    assert attempts == [16, 24, 40, 72, 56, 48]
    last = saved[-1]
    assert (last["status"], last["batch"], last["step_ms"]) == ("measured", 40, 4.0)
    assert last["configuration"] == "replay@float32/fp8"
    assert {int(batch) for batch, times in last["tried"].items() if times} == {16, 24, 40}
    search(None, cell_of(), Settings(tolerance=0.01), None, save, lambda: True)
    assert saved[-1]["status"] == "wrong: logits differ by 10%"


@pytest.mark.parametrize("name", [TINY[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TINY[1:])])
def test_the_largest_batch_from_end_to_end(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What runs out of memory is a batch of more than 24."""
    run, path = largest_batch.run_generate, tmp_path / "generate.json"
    module = import_module("benchmarks.largest_batch")

    def limited(model: Any, ids: torch.Tensor, *rest: Any, **arguments: Any) -> Any:
        if len(ids) > 24:
            raise torch.OutOfMemoryError("made up")
        return run(model, ids, *rest, **arguments)

    monkeypatch.setattr(module, "run_generate", limited)
    precisions = ("--checkpoint=float32/fp8", "--checkpoint=bfloat16")
    search = ("--largest-batch=replay", "--largest-batch=dynamic", "--shape=16x5", f"--output={path}", *precisions)
    where = (*ON_A_CPU, *search, f"--preset={name}")
    assert "largest/p5  to do" in call("bench_generate", *where, "--cells").output
    result = call("bench_generate", *where)
    assert result.exit_code == 0
    cells = json.loads(path.read_text())["cells"]
    assert list(cells) == [
        f"{name}/{label}/largest/p5" for label in ("replay@float32/fp8", "dynamic", "replay@bfloat16")
    ]
    for cell in cells.values():
        assert (cell["status"], cell["batch"]) == ("measured", 24)
        assert list(cell["tried"]) == ["16", "24", "40", "32"]
        assert cell["tokens_per_s"] == pytest.approx(24e3 / cell["step_ms"], rel=1e-3)
        assert cell["logit_error"] < 0.1
    assert "largest so far" not in call("bench_generate", *where).output
    data = json.loads(path.read_text())
    cell = data["cells"][f"{name}/dynamic/largest/p5"]
    cell["status"], cell["tried"] = UNFINISHED, {"16": cell["tried"]["16"]}
    path.write_text(json.dumps(data))
    assert "largest so far 24" in call("bench_generate", *where).output
    nothing = tmp_path / "kernels.json"
    nothing.write_text(json.dumps({"environments": [], "cells": {}}))
    plotted = call("plot_results", f"--kernels={nothing}", f"--generate={path}", f"--output={tmp_path}")
    assert f"| {name} | replay@float32/fp8 | 5 | 24 |" in plotted.output
    with pytest.raises(ValueError, match="--largest-batch got"):
        call("bench_generate", "--largest-batch=nothing")


def test_weights_that_forget_nothing_make_a_wrong_cache_show() -> None:
    """Logits of all rows are compared with those of the prompts that they repeat."""
    model, _ = build_model(MODEL, "cpu", weight_bytes=2**30, dtype=torch.float32)
    settings = Settings(checked=3, short=2, long=4)
    expected = largest_batch.expected_output(model, 8, 5, 3)
    found = largest_batch.attempt(model, cell_of(), 16, settings, expected)
    assert found is not None
    assert found["logit_error"] < 0.1
    other = type(expected)(expected.tokens.roll(1, 0), expected.logits)
    found = largest_batch.attempt(model, cell_of(), 16, settings, other)
    assert found is not None
    assert found["logit_error"] > 0.5


def test_tables_of_other_precisions() -> None:
    common = {"preset": "made up", "prompt": 64, "batch": 256, "status": "measured"}
    cells = {
        name: {**common, "configuration": name, "step_ms": step}
        for name, step in {"static": 30.0, "replay_static": 12.0, "replay_static@float32/fp8": 10.0}.items()
    }
    assert generate_columns(cells) == [*GENERATE_SUMMARY, "replay_static@float32/fp8"]
    (row,) = generate_summary(cells)
    assert row[-2:] == ["2.50", "10.0 (3.00)"]
    assert len(row) == len(generate_columns(cells))
    found = {
        **common,
        "configuration": "static",
        "tried": {},
        "tokens_per_s": 1234.0,
        "step_ms": 3.0,
        "peak_gib": 100.0,
    }
    rows = list(largest_summary({"": found, "1": {**found, "status": UNFINISHED}}))
    assert rows == [
        ["made up", "static", "64", "256", "1,234", "3.0", "100.0"],
        ["made up", "static", "64", UNFINISHED, "-", "-", "-"],
    ]
    assert all(len(row) == len(LARGEST_SUMMARY) for row in rows)


def test_the_eager_configuration_keeps_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the batch, and only within its cells."""
    monkeypatch.setattr(cursor, "THROUGH_DEVICE", "cpu")
    monkeypatch.setattr(cursor, "WRITE_THROUGH_BYTES", 0)
    taken = set[int]()
    end = Cursor.end

    def watched(self: Cursor) -> None:
        assert self.plan is not None
        if self.plan.tokens == 1:
            taken.add(self.plan.kept)
        end(self)

    monkeypatch.setattr(Cursor, "end", watched)
    model, _ = build_model(MODEL, "cpu", weight_bytes=2**30, dtype=torch.float32)
    for configuration, kept in ((EAGER, 0), ("replay_static", 1)):
        cell = Cell(MODEL, configuration, 2, 5)
        taken.clear()
        settings = Settings(short=2, long=4, checked=4, check_kernels=False)
        record = measure_cell(model, cell, settings, None)
        assert record["status"] == "measured"
        assert taken == {kept}
