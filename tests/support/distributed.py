"""Runs of scripts/generate_distributed.py in processes that can be killed at any point.

The processes are forked from a server that has imported everything, and find each other through a file, not a port.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import transformers.models.nemotron_h.modeling_nemotron_h
import transformers.models.qwen3_5.modeling_qwen3_5  # noqa: F401  # what the server imports for all

from replay_transformers.cli.loading import Loaded
from tests.support.scripts import SCRIPTS

GRACE = 10  # seconds
DEADLINE = 120
MODEL, NEW = "qwen3_5_draft", 6  # a sample model, and tokens of a completion
TEXTS = (
    "import os\nimport ", "def add(a, b):\n    return a", "class Stack:\n    def __init__(self):\n        self.a = ",
    "x = [", "for name in sorted(names):\n    print(", "", "try:\n    import json\nexcept ",
    "with open(path) as file:\n    text = file.read()\n    ",
)  # fmt: skip
GOOD = [index for index, text in enumerate(TEXTS) if text]


def write_prompts(path: Path) -> None:
    """`TEXTS`, every other one with an id."""
    lines = [{"prompt": text} | ({"id": f"n{index}"} if index % 2 else {}) for index, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def assert_as_alone(output: str, loaded: Loaded) -> None:
    """In order, left padding left out; a prompt that cannot be continued has an error and stops nothing."""
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["index"] for line in lines] == list(range(len(TEXTS)))
    for index, line in enumerate(lines):
        assert line["prompt"] == TEXTS[index]
        assert line.get("id") == (f"n{index}" if index % 2 else None)
        if index not in GOOD:
            assert set(line) == {"index", "id", "prompt", "error"}
            continue
        inputs = loaded.encode(TEXTS[index])
        alone = loaded.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert line["completions"] == [loaded.tokenizer.decode(alone, skip_special_tokens=True)]
        assert line["prompt_tokens"] == inputs["input_ids"].shape[1]
        assert line["completion_tokens"] == [len(alone)]


def launched(launcher: Sequence[str], folder: Path, *options: str) -> tuple[str, str]:
    """The script behind a launcher, as from a command line; what it prints and what it writes."""
    prompts, output = folder / "in.jsonl", folder / "out.jsonl"
    write_prompts(prompts)
    command = [*launcher, str(SCRIPTS / "generate_distributed.py"), f"--model={MODEL}", f"--prompts={prompts}"]
    command += [f"--output={output}", "--batch=2", f"--max-new-tokens={NEW}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, output.read_text()


@dataclass(frozen=True)
class Kill:
    """Where a process kills itself.

    Args:
        lines: before it writes the line behind so many.
        half: half of that line is written before.
        replacements: before it puts a file in another's place for the time behind so many; the first one makes the
            header, the second the output, the third says that it is finished.
        after: right after that replacement instead of before.
        rank: of the process.
    """

    lines: int | None = None
    half: bool = False
    replacements: int | None = None
    after: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Outcome:
    """Exit codes of the processes, and all that they printed."""

    codes: list[int]
    text: str


def context() -> Any:
    """Processes forked from a server that holds this module."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([__name__])
    return found


def run(folder: Path, *arguments: str, processes: int = 1, kill: Kill | None = None) -> Outcome:
    """Run the script with these arguments; the processes that are left when one ends badly are killed."""
    name = uuid4().hex
    log, store = folder / f"{name}.log", folder / f"{name}.store"
    started = [
        context().Process(target=_work, args=(rank, processes, str(store), str(log), arguments, kill))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    for process in started if kill is None else [started[kill.rank], *started]:
        process.join(DEADLINE)
        if process.exitcode != 0:  # as a launcher does
            for other in started:
                other.join(GRACE if kill is None else 0)  # it may be about to end by itself, for the same reason
                other.kill()
    for process in started:
        process.join()
    return Outcome([process.exitcode for process in started], log.read_text())


def _work(rank: int, processes: int, store: str, log: str, arguments: Sequence[str], kill: Kill | None) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    sys.path.insert(0, str(SCRIPTS))
    import typer
    from generate_distributed import main  # type: ignore[import-not-found]

    if kill is not None and kill.rank == rank:
        _arm(kill)
    app = typer.Typer()
    app.command()(main)
    app(list(arguments))


def _arm(kill: Kill) -> None:
    from distributed_generation import parts  # type: ignore[import-not-found]

    count, write, replace = 0, parts.Writer.write, parts._replace

    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_or_die(self: Any, line: bytes) -> None:
        nonlocal count
        if count == kill.lines:
            if kill.half:
                self.file.write(line[: len(line) // 2])
                self.file.flush()
            dies()
        count += 1
        write(self, line)

    def replace_or_die(fresh: Path, path: Path) -> None:
        nonlocal count
        if count == kill.replacements and not kill.after:
            dies()
        replace(fresh, path)
        if count == kill.replacements:
            dies()
        count += 1

    if kill.lines is not None:
        parts.Writer.write = write_or_die
    else:
        parts._replace = replace_or_die
