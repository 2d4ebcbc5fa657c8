"""The speculation benchmark as far as it runs without a GPU: its loop, its rollback by copies, cells, tables, plots."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

pytest.importorskip("triton")

from replay_transformers.cli.speculation import PLAIN, DraftRun
from scripts.benchmarks import real_drafts, speculative_cells
from scripts.benchmarks.presets import load_presets
from scripts.benchmarks.profiles import KernelTimes
from scripts.benchmarks.real_drafts import measure_real, real_cells
from scripts.benchmarks.speculative_cells import Cell, Settings, all_cells, default_accepted
from scripts.benchmarks.speculative_loop import KnownText, SnapshotRows, copy_all
from scripts.benchmarks.speculative_tables import (
    REAL_COLUMNS,
    SPECULATIVE_COLUMNS,
    SUMMARY_COLUMNS,
    real_rows,
    speculative_rows,
    speculative_summary,
)
from scripts.benchmarks.weights import build_model
from tests.support.scripts import runner

PRESETS = load_presets()
TINY = [name for name, preset in PRESETS.items() if preset.is_tiny]
SETTINGS = Settings(prompt=5, new_tokens=6, warm=2, checked=6, window=3, tolerance=1e-3)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    return runner(monkeypatch)


def tiny(name: str) -> Any:
    return build_model(PRESETS[name], "cpu", weight_bytes=2**30, dtype=torch.float32)[0]


def measured(model: Any, cell: Cell, settings: Settings = SETTINGS) -> dict[str, Any]:
    expected = speculative_cells.expected_logits(model, cell.batch, settings)
    return speculative_cells.measure_cell(model, cell, settings, expected)


@pytest.mark.parametrize("name", TINY)
def test_every_method_decodes_the_known_text(name: str) -> None:
    model, preset = tiny(name), PRESETS[name]
    cells = all_cells([preset], [2], [4], None, ["none"], None)
    assert [cell.method for cell in cells] == ["plain", "generate", "replay", "snapshots"]
    found = {cell.method: measured(model, cell) for cell in cells}
    for method, record in found.items():
        assert record["status"] == "measured"
        assert record["logit_error"] < 1e-4
        speculates = method in ("replay", "snapshots")
        assert record["tokens_per_round"] == (3 if speculates else 1)
        assert record["rounds"] == (2 if speculates else 6)
        assert record["forwards_per_round"] == (2 if method == "snapshots" else 1)
        times = record["round_ms"]
        assert 0 < times["p20"] <= times["p50"] <= times["p80"]
        assert record["tokens_per_s"] == pytest.approx(2e3 * record["tokens_per_round"] / times["mean"], rel=1e-3)


@pytest.mark.parametrize(("tokens", "accepted"), [(2, 0), (2, 1), (4, 1), (4, 3)])
def test_any_number_of_drafts_is_accepted(tokens: int, accepted: int) -> None:
    model = tiny("tiny-qwen3.5")
    for method in ("replay", "snapshots"):
        record = measured(model, Cell(PRESETS["tiny-qwen3.5"], method, 1, tokens, accepted, "none"))
        assert record["status"] == "measured"
        is_whole = accepted == tokens - 1
        assert record["forwards_per_round"] == (2 if method == "snapshots" and not is_whole else 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="names operators of the CPU")
@pytest.mark.parametrize("name", TINY)
def test_profiles_are_of_the_rounds_that_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, steps = [], []
    start, stop, heaviest = KernelTimes.start, KernelTimes.stop, speculative_cells.heaviest
    target = speculative_cells._target

    def counted(*arguments: Any) -> Any:
        forwards.append(arguments[-1])
        return target(*arguments)

    monkeypatch.setattr(speculative_cells, "_target", counted)
    monkeypatch.setattr(KernelTimes, "start", lambda self: (steps.append(-forwards[-1][0]), start(self)))
    monkeypatch.setattr(KernelTimes, "stop", lambda self: (steps.append(forwards[-1][0]), stop(self))[1])
    monkeypatch.setattr(
        speculative_cells, "heaviest", lambda times, count: (steps.append(count), heaviest(times, count))[1]
    )
    profiled = replace(SETTINGS, profiled=True)
    record = measured(tiny(name), Cell(PRESETS[name], "replay", 2, 4, 2, "none"), profiled)
    assert record["profile_ms"]["aten::mm"] > 0
    before, after, count = steps
    assert count == after + before > 0
    assert before < 0


@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", TINY)
def test_drafts_that_are_right_with_a_probability(name: str, chance: float) -> None:
    """Rows accept different numbers of them; the mean is what the probability says."""
    model, preset = tiny(name), PRESETS[name]
    cells = all_cells([preset], [8], [4], None, ["none"], ["/replay/"], chance=chance)
    assert [cell.key for cell in cells] == [f"{name}/replay/b8/t4/p{chance:g}/none"]
    record = measured(model, cells[0], replace(SETTINGS, new_tokens=48))
    assert record["status"] == "measured"
    assert record["logit_error"] < 1e-4
    assert record["forwards_per_round"] == 1
    expected = 1 + chance + chance**2 + chance**3
    # of 8 rows and at least 9 rounds; one round's number of tokens deviates by about 1
    assert record["tokens_per_round"] == pytest.approx(expected, abs=4 / (8 * record["rounds"]) ** 0.5)
    assert chance not in (0.0, 1.0) or record["tokens_per_round"] == expected
    rows = list(speculative_rows({"cell": record}))
    assert f"p = {chance:g}" in rows[0]


def test_a_rollback_that_forgets_the_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_cursor(self: Any) -> list[torch.Tensor]:
        return [*self.cache.cursor.tensors(), self.cache.cursor.early]

    monkeypatch.setattr(SnapshotRows, "_buffers", only_the_cursor)
    settings = replace(SETTINGS, window=1)  # the state is written in every forward
    record = measured(tiny("tiny-nemotron-h"), Cell(PRESETS["tiny-nemotron-h"], "snapshots", 2, 4, 1, "none"), settings)
    assert record["status"].startswith("wrong: logits differ")
    assert "tokens_per_s" not in record


def test_a_loop_that_runs_more_forwards_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = speculative_cells._target

    def eager(model: Any, cell: Cell, settings: Settings, length: int, forwards: list[int]) -> Any:
        forwards[0] += 1
        return original(model, cell, settings, length, forwards)

    monkeypatch.setattr(speculative_cells, "_target", eager)
    record = measured(tiny("tiny-nemotron-h"), Cell(PRESETS["tiny-nemotron-h"], "replay", 1, 4, 2, "none"))
    assert record["status"].startswith("wrong: 4 rounds with 5 forwards")


def test_what_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(speculative_cells, "_target", full)
    record = measured(tiny("tiny-nemotron-h"), Cell(PRESETS["tiny-nemotron-h"], "replay", 1, 4, 2, "none"))
    assert record["status"] == "does not fit"
    assert next(iter(speculative_rows({"": record})))[6] == "does not fit"


def test_known_drafts_are_wrong_where_they_must_be() -> None:
    text = KnownText(torch.arange(14)[None], prompt=3, accepted=2, vocabulary=14)
    assert (text.drafts != text.ids).nonzero()[:, 1].tolist() == [6, 9, 12]
    assert text.drafts.max() < 14


def test_copies_of_several_dtypes_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.benchmarks.speculative_loop.SMALL", 64)
    sources = [torch.randn(40), torch.arange(3), torch.randn(2, 3), torch.randn(4).bfloat16()]
    targets = [torch.zeros_like(source) for source in sources]
    copy_all(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_all_but_one_draft_is_accepted_and_patterns_choose_cells() -> None:
    assert [default_accepted(tokens) for tokens in (2, 4, 5, 8)] == [1, 2, 3, 6]
    presets = [PRESETS[name] for name in TINY]
    cells = all_cells(presets, [1, 8], [5, 2], 3, ["inductor"], ["replay/b8", "generate/b1/"])
    assert [(cell.method, cell.batch, cell.tokens, cell.accepted) for cell in cells[:3]] == [
        ("generate", 1, 1, 0), ("replay", 8, 5, 3), ("replay", 8, 2, 1),
    ]  # fmt: skip
    assert len({cell.key for cell in cells}) == len(cells) == 6


def test_from_end_to_end_resumed_and_plotted(call: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "speculative.json"
    arguments = ("--device=cpu", "--dtype=float32", "--preset=tiny-nemotron-h", "--batch=1", "--batch=2", "--tokens=4")
    arguments += ("--prompt=4", "--new-tokens=3", "--warm=1", "--window=2", f"--output={path}")
    first = call("bench_speculative", *arguments)
    assert first.exit_code == 0, first.output
    data = json.loads(path.read_text())
    assert len(data["cells"]) == 8
    assert all(cell["status"] == "measured" and cell["is_whole"] for cell in data["cells"].values())
    again = call("bench_speculative", *arguments)
    assert "measured" not in again.output
    assert json.loads(path.read_text()) == data
    assert "replay/b2/t4/a2/none  done" in call("bench_speculative", *arguments, "--cells").output
    wrong = call("bench_speculative", *arguments, "--redo", "--only=plain/b1", "--tolerance=-1")
    assert wrong.exit_code == 1
    nothing = tmp_path / "nothing.json"
    nothing.write_text(json.dumps({"environments": [], "cells": {}}))
    others = (f"--kernels={nothing}", f"--generate={nothing}", f"--output={tmp_path}")
    plotted = call("plot_results", *others, f"--speculative={path}")
    assert plotted.exit_code == 0
    assert "| tiny-nemotron-h | 2 | 4 | 2 |" in plotted.output
    assert (tmp_path / "speculative-speed-up.svg").stat().st_size > 1000


def test_real_text_is_summed_over_files(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded:
        def encode(self, text: str) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.ones(1, len(text), dtype=torch.int64)}

    lengths: list[int] = []

    def speculate(loaded: Any, assistant: Any, inputs: dict[str, torch.Tensor], settings: Any) -> dict[str, DraftRun]:
        lengths.append(inputs["input_ids"].shape[1])
        drafted = DraftRun([1.0], forwards=2, turns=2, drafted=8, accepted=5, is_equal=len(lengths) == 1)
        return {PLAIN: DraftRun([2.0], forwards=7), "assistant": drafted, "MTP": DraftRun(refusal="no head")}

    monkeypatch.setattr(real_drafts, "speculate", speculate)
    settings = real_drafts.SpeculationSettings(8, 16)
    cell, other = real_cells(settings, "float32", texts=2, prompt=4, backend="none", only=["nemotron_h"])
    assert (cell.settings.length, other.settings.length) == real_drafts.LENGTHS
    record = measure_real(Loaded(), None, ["abc", "abcdef", "not reached"], cell)  # type: ignore[arg-type]
    assert lengths == [3, 4]
    assistant = record["drafters"]["assistant"]
    assert (assistant["speed_up"], assistant["tokens_per_forward"], assistant["texts_equal"]) == (2.0, 3.5, 1)
    rows = list(real_rows({"": record}))
    assert all(len(row) == len(REAL_COLUMNS) for row in rows)
    assert rows[1][6:] == ["3.50", "62%", "2.00", "2.00", "1 of 2"]
    assert rows[2][-1] == "refused"


def test_rows_of_the_table_are_as_long_as_its_head() -> None:
    common = {"preset": "x", "batch": 1, "backend": "none", "prompt": 4, "window": 2, "checkpoint": "float32"}
    times = {"p20": 1.0, "p50": 1.0, "p80": 1.0, "mean": 1.0}
    facts = {"row_tokens_per_s": 1.0, "round_ms": times, "peak_gib": 0.0, "logit_error": 0.0, "status": "measured"}
    rates = {"plain": (1, 0, 10.0), "replay": (5, 3, 25.0), "snapshots": (5, 3, 20.0)}
    cells = {
        method: {**common, **facts, "method": method, "tokens": tokens, "accepted": accepted, "tokens_per_s": rate}
        for method, (tokens, accepted, rate) in rates.items()
    }
    rows = {row[1]: row for row in speculative_rows(cells)}
    assert all(len(row) == len(SPECULATIVE_COLUMNS) for row in rows.values())
    assert rows["replay"][11:14] == ["2.50", "-", "1.25"]
    assert rows["plain"][11:14] == ["-", "-", "-"]
    cells["generate"] = cells["plain"] | {"method": "generate", "backend": "inductor", "tokens_per_s": 12.5}
    (summary,) = speculative_summary(cells)
    assert len(summary) == len(SUMMARY_COLUMNS)
    assert summary[5:7] == ["2.00", "1.25"], "the faster of those without drafts, whatever compiles it"


def test_help(call: Callable[..., Result]) -> None:
    result = call("bench_speculative", "--help")
    assert result.exit_code == 0
    assert "--real" in result.output
