"""What stock's scans cannot take is not given to them: their kernels would read beyond their tensors."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

pytest.importorskip("triton")

from scripts.benchmarks.generate_cells import expected_output
from scripts.benchmarks.presets import load_presets
from scripts.benchmarks.stock import rows_at_once
from scripts.benchmarks.weights import build_model
from tests.support.scripts import runner

PRESETS = load_presets()
FAST = {"qwen3.5-4b": {"prompt": "fla.ops.chunk"}, "nemotron-3-nano-4b": {"prompt": "mamba_ssm.ops.scan"}}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    return runner(monkeypatch)


@pytest.mark.parametrize(
    ("name", "batch", "prompt", "rows"),
    [
        ("nemotron-3-nano-4b", 256, 64, 256),
        ("nemotron-3-nano-4b", 8, 4096, 8),
        ("nemotron-3-nano-4b", 8, 32768, 3),  # time steps are the end of 17,504 channels: 3 rows are 1.7e9 elements
        ("nemotron-3-nano-4b", 64, 2048, 59),
        ("nemotron-3-nano-4b", 1, 2**20, 0),
        ("nemotron-3-nano-4b", 4000, 64, 1916),
        ("qwen3.5-4b", 8, 32768, 8),
        ("qwen3.5-4b", 4000, 64, 2047),
    ],
)
def test_rows_that_stock_takes(name: str, batch: int, prompt: int, rows: int) -> None:
    geometries = PRESETS[name].geometries()
    assert rows_at_once(FAST[name], geometries, batch, prompt) == rows
    assert rows_at_once({"prompt": "transformers.models"}, geometries, batch, prompt) == batch


@pytest.mark.parametrize("name", ["tiny-nemotron-h", "tiny-qwen3.5"])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_is_expected_of_some_rows_at_a_time(name: str, rows: int) -> None:
    model, _ = build_model(PRESETS[name], "cpu", weight_bytes=2**30, dtype=torch.float32)
    want, got = expected_output(model, 5, 7, 4), expected_output(model, 5, 7, 4, rows)
    assert torch.equal(got.tokens, want.tokens)
    assert want.logits.shape[:2] == (4, 2)  # the first and the last row
    torch.testing.assert_close(got.logits, want.logits)


@pytest.mark.parametrize(("rows", "checked"), [(1, True), (0, False)])
def test_cells_that_stock_cannot_run_say_so(
    call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: int, checked: bool
) -> None:
    path = tmp_path / "generate.json"
    arguments = ("--device=cpu", "--dtype=float32", "--allow-slow-stock", "--shape=2x5", "--short=2", "--long=5")
    where = (f"--output={path}", "--only=/dynamic/", "--only=/replay/", "--preset=tiny-nemotron-h")
    monkeypatch.setattr("bench_generate.rows_at_once", lambda *_: rows)
    assert call("bench_generate", *arguments, *where).exit_code == 0
    stock, replay = json.loads(path.read_text())["cells"].values()
    assert stock["status"] == f"too much for stock's scan, which takes {rows} rows of it"
    assert "step_ms" not in stock
    assert replay["status"] == "measured"
    assert (replay["logit_error"] is not None) == checked


def test_searches_give_stock_no_more_than_it_takes(
    call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The replay cache's search goes on where stock's has to end; both are compared with what stock does take."""
    path, ran = tmp_path / "generate.json", []
    whole = import_module("benchmarks.generate_cells").run_generate

    def counted(model: Any, ids: torch.Tensor, *rest: Any, **arguments: Any) -> Any:
        if "cache_implementation" not in arguments:
            ran.append(len(ids))
        elif len(ids) > 24:
            raise torch.OutOfMemoryError("made up")
        return whole(model, ids, *rest, **arguments)

    for name in ("generate_cells", "largest_batch"):
        monkeypatch.setattr(f"benchmarks.{name}.run_generate", counted)
    monkeypatch.setattr("bench_generate.rows_at_once", lambda functions, geometries, batch, prompt: min(batch, most))
    arguments = ("--device=cpu", "--dtype=float32", "--allow-slow-stock", "--shape=8x5", "--short=2", "--long=5")
    search = (f"--output={path}", "--preset=tiny-nemotron-h", "--largest-batch=dynamic", "--largest-batch=replay")
    most = 5
    assert call("bench_generate", *arguments, *search).exit_code == 0
    stock, replay = json.loads(path.read_text())["cells"].values()
    assert (stock["status"], stock["batch"], stock["limit"]) == ("does not fit", 0, "stock's scan")
    assert (replay["status"], replay["batch"], "limit" in replay) == ("measured", 24, False)
    assert ran == [5, 3]  # the 8 rows that logits are compared with
    most = 0
    failed = call("bench_generate", *arguments, *search, "--redo")
    assert failed.exit_code == 1
    assert "too long for stock's scan" in failed.output
