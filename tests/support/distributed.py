"""Runs of scripts/generate_distributed.py in processes that can be killed at any point.

The processes are forked from a server that has imported everything, and find each other through a file, not a port.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import transformers.models.nemotron_h.modeling_nemotron_h
import transformers.models.qwen3_5.modeling_qwen3_5  # noqa: F401  # what the server imports for all

from tests.support.scripts import SCRIPTS

DEADLINE = 120


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
