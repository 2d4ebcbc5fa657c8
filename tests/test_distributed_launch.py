"""Data-parallel generation behind a launcher, and which processes it takes for one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replay_transformers.cli.loading import CommandError
from scripts.distributed_generation import processes
from tests.support.scripts import SCRIPTS

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize(
    ("asked", "has_accelerator", "is_cpu"),
    [("cpu", True, True), ("cpu", False, True), (None, False, True), (None, True, False), ("cuda", False, False)],
)
def test_processes_are_of_a_cpu_where_there_is_nothing_else(
    asked: str | None, has_accelerator: bool, is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    monkeypatch.setattr(processes, "PartialState", lambda **options: options)
    given: Any = processes.joined(asked)
    assert given["cpu"] is is_cpu


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    for alone in (None, "1"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if alone:
            monkeypatch.setenv("WORLD_SIZE", alone)
        assert processes.chosen_device(state, None) == "cpu"
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(CommandError, match=r"WORLD_SIZE says 3 processes, .* on cpu, knows of 1: .* --device cpu"):
        processes.chosen_device(state, None)


@pytest.mark.slow
def test_torchrun_without_a_device_or_an_accelerator(tmp_path: Path) -> None:
    """The command of the README."""
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "x = ["}\n{"prompt": "import os"}\n')
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "3"]
    command += [str(SCRIPTS / "generate_distributed.py"), "--model=qwen3_5_draft", f"--prompts={prompts}"]
    command += [f"--output={output}", "--batch=1", "--max-new-tokens=3"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 processes on cpu" in done.stdout
    assert output.read_text().count("\n") == 2
