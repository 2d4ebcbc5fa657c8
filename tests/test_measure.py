"""The script that measures everything: its commands are understood by the benchmarks, and find cells to measure."""

from __future__ import annotations

import importlib
import os
import stat
import subprocess
from pathlib import Path

import pytest
import typer

from tests.support.scripts import SCRIPTS, runner

PARTS = ["kernels", "precisions", "generate", "largest", "speculation", "text", "divergence", "gpus", "tables"]


def measure(tmp_path: Path, *parts: str, **environment: str) -> tuple[int, list[list[str]], str]:
    """Exit status, the commands in place of which nothing is run, and messages."""
    fake, log = tmp_path / "python", tmp_path / "log"
    fake.write_text(f'#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done >>{log}\necho >>{log}\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    log.write_text("")
    variables = {**os.environ, "PYTHON": str(fake), **environment}
    done = subprocess.run(
        ["bash", SCRIPTS / "measure.sh", *parts], env=variables, capture_output=True, text=True, check=False
    )
    return done.returncode, [command.split("\n") for command in log.read_text().split("\n\n") if command], done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_every_command_is_understood(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    code, commands, _ = measure(tmp_path, part, MINUTES="2", MAMBA_SSM=str(tmp_path))
    assert code == 0
    assert commands
    for script, *arguments in commands:
        app = typer.Typer()
        app.command()(importlib.import_module(Path(script).stem).main)
        context = typer.main.get_command(app).make_context(script, list(arguments))
        assert part == "tables" or context.params["minutes"] == 2


@pytest.mark.parametrize("script", ["bench_generate", "bench_speculative", "eval_precision"])
def test_every_command_finds_cells(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that no key has would measure nothing, without an error."""
    pytest.importorskip("triton")
    call, (_, commands, _) = runner(monkeypatch), measure(tmp_path, *PARTS)
    mine = [arguments for name, *arguments in commands if script in name]
    assert mine
    for arguments in mine:
        listed = call(script, *arguments, "--cells", "--output", str(tmp_path / "none.json"))
        assert "to do" in listed.stdout, arguments


def test_a_part_that_does_not_exist(tmp_path: Path) -> None:
    code, commands, message = measure(tmp_path, "kernels", "kernel")
    assert code == 1
    assert not commands
    assert "there is no part kernel;" in message
