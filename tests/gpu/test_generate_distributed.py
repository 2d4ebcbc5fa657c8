"""scripts/generate_distributed.py with a copy of the model on each GPU: the lines of prompts generated alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import replay_transformers as rt
from replay_transformers.cli.loading import load
from tests.support.distributed import MODEL, assert_as_alone, launched

pytestmark = pytest.mark.no_poison

BIN = Path(sys.executable).parent
LAUNCHERS = [
    [str(BIN / "accelerate"), "launch", "--num_processes", "2"],
    [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
]


@pytest.mark.parametrize("options", [(), ("--cache=replay_static", "--pad-multiple=8")], ids=["replay", "static"])
def test_one_process(options: tuple[str, ...], tmp_path: Path) -> None:
    """On a GPU without being told."""
    said, written = launched([sys.executable], tmp_path, *options)
    assert "1 process on cuda" in said
    assert_as_alone(written, load(rt.sample_model(MODEL), "float32", "cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["accelerate", "torchrun"])
def test_two_processes_write_the_same(launcher: list[str], tmp_path: Path) -> None:
    said, written = launched(launcher, tmp_path)
    assert "2 processes on cuda" in said
    (tmp_path / "alone").mkdir()
    assert written == launched([sys.executable], tmp_path / "alone")[1]
