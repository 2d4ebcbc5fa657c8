"""Data-parallel generation: any number of processes, killed anywhere and resumed, gives the same lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import replay_transformers as rt
from replay_transformers.cli.loading import Loaded, load
from scripts.distributed_generation.parts import Parts
from tests.support.distributed import (
    GOOD,
    MODEL,
    NEW,
    Kill,
    Outcome,
    assert_as_alone,
    launched,
    run,
    write_prompts,
)

pytestmark = pytest.mark.xdist_group("distributed")  # one server of processes

SAMPLED = ("--do-sample", "--seed=3", "--top-p=0.95", "--num-return-sequences=2")


class Place:
    """A folder with prompts and an output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "out.jsonl"
        self.parts = Parts(self.output)
        self.prompts = folder / "in.jsonl"
        write_prompts(self.prompts)

    def run(self, *options: str, processes: int = 1, kill: Kill | None = None) -> Outcome:
        arguments = (f"--model={MODEL}", f"--prompts={self.prompts}", f"--output={self.output}", "--batch=2")
        given = (*arguments, f"--max-new-tokens={NEW}", "--device=cpu", *options)
        return run(self.folder, *given, processes=processes, kill=kill)

    def finished(self, *options: str, processes: int = 1) -> str:
        outcome = self.run(*options, processes=processes)
        assert outcome.codes == [0] * processes, outcome.text
        return self.output.read_text()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process writes that is left alone."""
    return Place(tmp_path_factory.mktemp("expected")).finished()


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(rt.sample_model(MODEL), "float32", "cpu")


def test_lines_are_those_of_prompts_generated_alone(expected: str, loaded: Loaded) -> None:
    assert_as_alone(expected, loaded)


def test_two_processes_write_the_same(place: Place, expected: str) -> None:
    outcome = place.run(processes=2)
    assert outcome.codes == [0, 0], outcome.text
    assert "2 processes" in outcome.text
    assert place.output.read_text() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        SAMPLED,
        ("--prompt-lookup=3",),
        (*SAMPLED, "--prompt-lookup=3"),
        ("--cache=replay_static", "--pad-multiple=8"),
        ("--cache=dynamic",),
        ("--cache=static",),
        ("--checkpoint=fp8_sr", "--window=2"),
        ("--model=nemotron_h_draft",),
    ],
    ids=" ".join,
)
def test_any_setting_on_any_number_of_processes(place: Place, tmp_path_factory: Any, options: Sequence[str]) -> None:
    want = place.finished(*options)
    other = Place(tmp_path_factory.mktemp("other"))
    assert other.run(*options, processes=2, kill=Kill(lines=1, half=True)).codes[0] == -9
    assert other.finished(*options, processes=3) == want


def killed_and_resumed(place: Place, kill: Kill, processes: int, then: int) -> str:
    outcome = place.run(processes=processes, kill=kill)
    assert outcome.codes[kill.rank] == -9, outcome.text
    return place.finished(processes=then)


@pytest.mark.parametrize(("lines", "half", "then"), [(0, False, 1), (1, True, 1), (3, True, 2)])
def test_killed_while_it_writes(place: Place, expected: str, lines: int, half: bool, then: int) -> None:
    assert killed_and_resumed(place, Kill(lines=lines, half=half), 1, then) == expected


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("lines", range(len(GOOD)))
def test_killed_at_any_line(place: Place, expected: str, lines: int, half: bool) -> None:
    assert killed_and_resumed(place, Kill(lines=lines, half=half), 1, 1) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "then"), [(2, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lines", [0, 1])
def test_resumed_by_another_number_of_processes(
    place: Place, expected: str, lines: int, rank: int, processes: int, then: int
) -> None:
    assert killed_and_resumed(place, Kill(lines=lines, half=True, rank=rank), processes, then) == expected


@pytest.mark.parametrize(
    "kill",
    [Kill(replacements=1), Kill(replacements=1, after=True), Kill(replacements=2), Kill(replacements=2, after=True)],
    ids=["unmerged", "merged", "unmarked", "marked"],
)
def test_killed_while_it_merges(place: Place, expected: str, kill: Kill) -> None:
    assert killed_and_resumed(place, kill, 1, 1) == expected
    assert sorted(path.name for path in place.parts.folder.iterdir()) == ["header.json", "lock"]


def test_only_batches_that_are_not_complete_are_generated_again(place: Place, expected: str) -> None:
    """And lines that are there stay as they are: here with a mark that shows it."""
    place.run(kill=Kill(lines=3, half=True))
    part = place.parts.part(0)
    whole = part.read_text().splitlines()[:3]
    part.write_text(
        "".join(line.replace('"finish"', '"mark": 1, "finish"') + "\n" for line in whole) + '{"index": 5, "pr'
    )
    outcome = place.run(kill=Kill(replacements=0))
    assert "batches to do: 3 of 4" in outcome.text
    indices = [json.loads(line)["index"] for line in part.read_text().splitlines()]
    assert sorted(indices) == GOOD, "no line twice"
    assert "batches to do: 0 of 4" in place.run().text
    lines = place.output.read_text().splitlines()
    marked = [json.loads(line)["index"] for line in lines if '"mark"' in line]
    assert marked == sorted(json.loads(line)["index"] for line in whole)
    assert [line.replace('"mark": 1, ', "") for line in lines] == expected.splitlines()


def test_finished_outputs_are_kept(place: Place, expected: str) -> None:
    assert place.finished() == expected
    before = place.output.stat()
    outcome = place.run()
    assert "finished already" in outcome.text
    assert place.output.stat().st_mtime_ns == before.st_mtime_ns
    refused = place.run("--max-new-tokens=5")
    assert refused.codes == [1]
    assert "--max-new-tokens: 6 then, 5 now" in refused.text
    assert place.output.read_text() == expected
    place.output.write_text("something else")
    assert "has been changed or removed" in place.run().text
    assert place.finished("--redo") == expected


def test_other_settings_are_refused(place: Place, expected: str) -> None:
    """With what differs and what to do; by all processes, and without a change to what is there."""
    assert place.run(kill=Kill(lines=3)).codes == [-9]
    before = place.parts.part(0).read_bytes()
    for options, message in (
        (("--batch=3", "--window=4"), "--batch: 2 then, 3 now"),
        (("--model=nemotron_h_draft",), "--model: qwen3_5_draft, sha256"),
        (("--limit=3",), "--prompts: 8, sha256"),
    ):
        outcome = place.run(*options, processes=2)
        assert outcome.codes == [1, 1], outcome.text
        assert message in outcome.text
        assert outcome.text.count("error:") == 1
        assert "--redo" in outcome.text
    assert "--window: 16 then, 4 now" in place.run("--window=4").text
    assert place.parts.part(0).read_bytes() == before
    assert place.finished() == expected


def test_settings_may_change_while_nothing_is_done(place: Place) -> None:
    assert place.run("--model=there/is/none").codes == [1]
    assert place.run("--batch=3", kill=Kill(lines=0)).codes == [-9]
    assert place.run().codes == [0]


def test_outputs_of_others_are_not_overwritten(place: Place, expected: str) -> None:
    place.output.write_text("mine\n")
    outcome = place.run()
    assert outcome.codes == [1]
    assert "choose another --output" in outcome.text
    assert place.output.read_text() == "mine\n"
    assert place.finished("--redo") == expected


def test_two_runs_do_not_share_an_output(place: Place) -> None:
    pytest.importorskip("fcntl")
    place.parts.lock()
    outcome = place.run()
    assert outcome.codes == [1]
    assert "still write" in outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun --standalone --nproc-per-node 2", "accelerate launch --cpu"])
def test_under_a_launcher(expected: str, launcher: str, tmp_path: Path) -> None:
    program, *options = launcher.split()
    said, written = launched([str(Path(sys.executable).with_name(program)), *options], tmp_path, "--device=cpu")
    assert ("2 processes" if program == "torchrun" else "1 process") in said
    assert written == expected
