"""The tuner as far as it runs without a GPU: what it tries, how it searches, and from end to end on tiny layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner, Result

pytest.importorskip("triton")

from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels import launch as launches
from replay_transformers.kernels.launch import Launch, choose
from replay_transformers.kernels.launch_table import OPERATORS, Entry, find, read, write
from scripts.benchmarks import tuning
from scripts.benchmarks.checks import WrongResultError
from scripts.benchmarks.presets import load_presets
from scripts.benchmarks.timing import Timing
from scripts.benchmarks.tuning import Case, cases, condense, of_prepare, of_step, tune
from scripts.benchmarks.workloads import Settings, Workload, make_workload, steady_cursors

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
CPU = torch.device("cpu")
MAMBA2 = LayerGeometry("mamba2", heads=96, groups=8, head_dim=80, state_dim=128, conv_kernel=4)
GATED_DELTA = LayerGeometry("gated_delta", heads=32, groups=16, head_dim=128, state_dim=128, conv_kernel=4)
TINY = {
    "mamba2": LayerGeometry("mamba2", heads=2, groups=1, head_dim=8, state_dim=8, conv_kernel=4),
    "gated_delta": LayerGeometry("gated_delta", heads=2, groups=1, head_dim=8, state_dim=8, conv_kernel=4),
}
on_the_cpu = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The script, with a search of a few configurations."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = __import__("tune_kernels")
    tried: Any = module.tune.__globals__
    monkeypatch.setitem(tried, "WARPS", (1,))
    monkeypatch.setitem(tried, "SHARES", (1, 2))
    monkeypatch.setitem(tried, "BLOCKS", dict.fromkeys(OPERATORS, (32, 256)))
    monkeypatch.setitem(tried, "TOKENS", {"1": 1})

    def run(*arguments: str) -> Result:
        app = Typer()
        app.command()(module.main)
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def scripted(monkeypatch: pytest.MonkeyPatch, cost: Callable[[Launch], float]) -> tuple[tuning.Timer, list[Launch]]:
    """A timer by which a configuration takes ``cost`` microseconds, and the list of those timed. Nothing runs."""
    timed: list[Launch] = []
    current = Case("mamba2", MAMBA2, 8, "1")

    def check() -> None:
        if cost(current.usual(CPU)) < 0:
            raise WrongResultError("made up")

    def time(calls: Sequence[Any], device: torch.device, budget_ms: float) -> Timing:
        timed.append(current.usual(CPU))
        return Timing(0.0, cost(timed[-1]), 0.0)

    monkeypatch.setattr(tuning, "make_workload", lambda *_: Workload([], check))
    return time, timed


def test_the_prepare_kernel_is_tuned_before_the_step_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(launch: Launch) -> float:
        return abs(launch.share - 4) + launch.share_warps + abs(launch.block - 16) + launch.warps

    timer, timed = scripted(monkeypatch, cost)
    case = Case("mamba2", MAMBA2, 8, "1")
    usual = choose("mamba2", CPU, 8 * 96, 1, 80, 128)
    outcome = tune(case, Settings(CPU), timer)
    assert outcome.best == Launch(16, 1, 4, 1)
    assert outcome.usual == timed[0] == usual
    assert len(timed) == len(set(timed)) == len(outcome.times)
    first = [launch for launch in timed if (launch.block, launch.warps) == (usual.block, usual.warps)]
    assert timed[: len(first) - 1] == first[:-1]
    assert all((launch.share, launch.share_warps) == (4, 1) for launch in timed[len(first) :])
    assert choose("mamba2", CPU, 8 * 96, 1, 80, 128) == usual


def test_wrong_and_refused_configurations_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(launch: Launch) -> float:
        if launch.block == 32:
            raise RuntimeError("out of resource: shared memory")
        return -1.0 if launch.share == 2 else 1.0 / launch.share

    timer, _ = scripted(monkeypatch, cost)
    outcome = tune(Case("mamba2", MAMBA2, 8, "1"), Settings(CPU), timer)
    assert outcome.best.share == 16
    assert {launch.share for launch in outcome.wrong} == {2}
    assert {launch.block for launch in outcome.refused} == {32}
    assert not {*outcome.wrong, *outcome.refused} & set(outcome.times)
    timer, _ = scripted(monkeypatch, lambda launch: -1.0)
    with pytest.raises(RuntimeError, match="batch 8, tokens 1: no configuration runs; the first one: made up"):
        tune(Case("mamba2", MAMBA2, 8, "1"), Settings(CPU), timer)


def test_what_is_tried() -> None:
    mamba2, gated_delta = Case("mamba2", MAMBA2, 1, "1"), Case("gated_delta", GATED_DELTA, 1, "1")
    convolution = Case("causal_conv", GATED_DELTA, 1, "1")
    start = Launch(8, 1)
    assert {launch.share for launch in of_prepare(mamba2, start)} == {1, 2, 4, 8, 16}
    assert {launch.share for launch in of_prepare(gated_delta, start)} == {1, 2}
    assert {launch.block for launch in of_step(mamba2, start)} == {4, 8, 16, 32}
    assert Launch(32, 1) not in of_step(mamba2, start) or MAMBA2.state_dim < 256
    assert Launch(128, 1) in of_step(gated_delta, start), "its state is streamed"
    assert of_prepare(convolution, start) == []
    assert Launch(1024, 4) in of_step(convolution, start)
    assert len(tuning.candidates(mamba2, CPU)) < 30


def test_every_case_once() -> None:
    presets = load_presets()
    large = [preset.geometry() for preset in presets.values() if not preset.is_tiny]
    every = cases(large, (1, 64))
    entries = [case.entry("GPU", Launch(8, 1)) for case in every]
    assert len({entry.place for entry in entries}) == len(entries)
    assert {entry.operator for entry in entries} == set(OPERATORS)
    assert {entry.tokens for entry in entries} == {"1", "2-8"}
    assert len(cases([MAMBA2, MAMBA2], (1,))) == len(cases([MAMBA2], (1,))) == 4


def test_the_steady_state_folds_one_row_in_a_window() -> None:
    for place in steady_cursors(64, 16, CPU):
        folds, committed = place["folds"], place["committed"]
        assert folds is not None
        assert committed is not None
        assert int((folds > 0).sum()) == 4
        assert float(committed.float().mean()) == 8.5
    (place,) = steady_cursors(8, 16, CPU)
    assert place["folds"] is not None
    assert not place["folds"].any()


@on_the_cpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_entry_of_the_table_gives_right_results(operator: str) -> None:
    geometry = TINY.get(operator, TINY["mamba2"])
    workload = make_workload(operator, geometry, 2, 2, Settings(CPU, window=4), copies=1)
    for launch in {entry.launch for entry in read(launches.TABLE) if entry.operator == operator}:
        with launches.override(operator, launch):
            workload.check()


def test_what_a_smaller_size_says_already_is_left_out() -> None:
    def entry(least: int, block: int, tokens: str = "1", operator: str = "mamba2") -> Entry:
        return Entry("GPU", operator, 64, 128, tokens, least, Launch(block, 1))

    entries = [entry(n, block) for n, block in ((8, 4), (16, 4), (32, 8), (64, 8), (128, 4), (256, 4))]
    entries += [entry(8, 4, "2-8"), entry(8, 4, operator="gated_delta"), entry(16, 8, operator="gated_delta")]
    kept = condense(reversed(entries))
    assert {(line.operator, line.tokens, line.least) for line in kept} == {
        ("mamba2", "1", 8), ("mamba2", "1", 32), ("mamba2", "1", 128), ("mamba2", "2-8", 8),
        ("gated_delta", "1", 8), ("gated_delta", "1", 16),
    }  # fmt: skip
    for size in range(1, 300):
        for operator, tokens in (("mamba2", 1), ("mamba2", 4), ("gated_delta", 1)):
            case = "GPU", operator, size, tokens, 64, 128
            assert find(kept, *case) == find(entries, *case)


@on_the_cpu
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("kind", TINY)
def test_folding_rows_are_checked(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = import_module(f"replay_transformers.kernels.{kind}.triton")
    step, settings = kernel.replay_step, Settings(CPU, window=4)
    monkeypatch.setattr("scripts.benchmarks.workloads.SPREAD_ROWS", 4)

    def due(buffers: dict[str, Any]) -> torch.Tensor:
        assert (buffers["folds"] > 0).any()
        return (buffers["folds"] > 0).float()

    def wrong_if_due(*operands: Any, **buffers: Any) -> Any:
        return step(*operands, **buffers) * (1 + 0.03 * due(buffers)).view(-1, 1, 1, 1)

    def never_folds(*operands: Any, **buffers: Any) -> Any:
        return step(*operands, **{**buffers, "state": buffers["state"].clone()})

    make_workload(kind, TINY[kind], 4, tokens, settings, copies=1).check()
    for fault, message in ((wrong_if_due, "output"), (never_folds, "state")):
        monkeypatch.setattr(kernel, "replay_step", fault)
        with pytest.raises(WrongResultError, match=message):  # the row that is due is not one of first, middle and last
            make_workload(kind, TINY[kind], 5, tokens, settings, copies=1).check()


@on_the_cpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_wrong_results_are_seen(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = import_module(f"replay_transformers.kernels.{operator}.triton")
    name = "conv_step" if operator == "causal_conv" else "replay_step"
    step = getattr(kernel, name)
    monkeypatch.setattr(kernel, name, lambda *operands, **buffers: 1.03 * step(*operands, **buffers))
    geometry = TINY.get(operator, TINY["gated_delta"])
    with pytest.raises(WrongResultError, match=r"output|convolution"):
        make_workload(operator, geometry, 1, 1, Settings(CPU, window=4), copies=1).check()


@on_the_cpu
@pytest.mark.parametrize("preset", ["tiny-nemotron-h", "tiny-qwen3.5"])
def test_from_end_to_end_and_resumed(tuner: Callable[..., Result], tmp_path: Path, preset: str) -> None:
    path, measured = tmp_path / "folder" / "launch.json", tmp_path / "folder" / "launch.measured.json"
    arguments = ("--device=cpu", f"--preset={preset}", "--batch=2", f"--output={path}")
    first = tuner(*arguments)
    assert first.exit_code == 0, first.output
    geometry = load_presets()[preset].geometry()
    entries = read(path)
    assert {(entry.operator, entry.least) for entry in entries} == {
        (geometry.kind, 2 * geometry.heads),
        ("causal_conv", 2 * geometry.conv_dim),
    }
    assert "0 cases to tune" in tuner(*arguments).output
    assert read(path) == read(measured) == entries
    other = Entry("GPU", geometry.kind, 64, 128, "1", 8, Launch(4, 1))
    fewer = [entry for entry in entries if entry.operator != "causal_conv"]
    write(path, [other, *fewer])
    assert "0 cases to tune" in tuner(*arguments).output
    assert {entry.place for entry in read(path)} == {entry.place for entry in (other, *entries)}
    write(path, [other, *fewer])
    measured.unlink()
    assert "1 cases to tune" in tuner(*arguments).output
    assert {entry.place for entry in read(path)} == {entry.place for entry in (other, *entries)}
    # twice the batch, launched the same: measured, and not in the table
    twice = [replace(entry, least=2 * entry.least) for entry in entries]
    write(measured, [*entries, *twice])
    assert "0 cases to tune" in tuner(*arguments, "--batch=4").output
    assert {entry.place for entry in read(path)} == {entry.place for entry in (other, *entries)}
    assert read(measured) == sorted(
        [*entries, *twice], key=lambda entry: (entries[0].operator != entry.operator, entry.least)
    )
    assert "the time is up" in tuner(*arguments, "--redo", "--minutes=0").output


def test_help_and_refusals(tuner: Callable[..., Result]) -> None:
    assert "--minutes" in tuner("--help").output
    assert tuner("--device=cpu").exit_code == 2
