"""`replay-transformers demo --speculate`: on the models that ship, and its reports on made-up runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import replay_transformers as rt
from replay_transformers.cli import app as commands
from replay_transformers.cli import speculation
from replay_transformers.cli.loading import CommandError, Loaded, load
from replay_transformers.cli.speculation import PLAIN, DraftRun, Speculation, SpeculationSettings
from replay_transformers.cli.speculation_report import (
    speculation_as_json,
    speculation_as_table,
    speculation_note,
    speculation_verdict,
)
from tests.support.mtp import HAS_MTP

SHORT = ("demo", "--speculate", "--max-new-tokens", "12", "--drafts", "3")


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(commands.app, list(arguments))
    assert result.exit_code == code, result.output
    assert not rt.is_enabled()
    return result


def test_drafters_on_the_models_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "SPECULATION_ROUNDS", 1)
    found = json.loads(run(*SHORT, "--json").stdout)
    assert [(record["model"], len(record["prompts"])) for record in found] == [
        ("qwen3_5", 1), ("qwen3_5", 4), ("nemotron_h", 1), ("nemotron_h", 4),
    ]  # fmt: skip
    for record in found:
        ran = {name: one for name, one in record["drafters"].items() if "refusal" not in one}
        assert all(one["tokens_equal"] for one in ran.values())
        plain, assistant = ran[PLAIN], ran["assistant"]
        assert (plain["forwards"], plain["tokens_per_forward"], plain["drafted"]) == (11, 1, 0)
        assert assistant["forwards"] < 11
        assert assistant["tokens_per_forward"] > 1.5
        assert 0 < assistant["accepted"] < assistant["drafted"]
        assert len(assistant["seconds"]) == 1
        head = record["drafters"]["MTP"]
        assert head["accepted"] > 0 if HAS_MTP else "transformers" in head["refusal"]


def test_one_model_as_text() -> None:
    text = " ".join(run(*SHORT, "--model", "nemotron_h", "--draft-length", "adaptive", "--window", "4").output.split())
    names = "plain, prompt lookup, assistant" + HAS_MTP * ", MTP"
    assert text.count(f"tokens equal: yes ({names})") == 2
    assert "batch of 4, padded on the left" in text
    assert text.count("MTP was not run: use_mtp needs transformers 5.23") == (0 if HAS_MTP else 2)
    assert "Tokens per forward:" in text
    assert "full length" not in text


def test_an_empty_prompt_is_one_line() -> None:
    result = run(*SHORT, "--prompt", "", code=2)
    assert "the prompt is empty" in result.stderr
    with pytest.raises(CommandError, match="empty"):
        speculation.encode(load(rt.sample_model("nemotron_h_draft"), "float32", "cpu"), ["x", ""])


@pytest.mark.parametrize("option", [("--drafts", "3"), ("--drafts", "4"), ("--draft-length", "fixed")], ids=" ".join)
def test_options_of_drafts_without_drafters(option: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are the defaults; no model is loaded."""
    monkeypatch.setattr(commands, "load", None)
    result = run("demo", *option, code=2)
    assert result.stdout == ""
    message = " ".join(result.stderr.replace("│", " ").split())
    assert "--drafts and --draft-length are for --speculate: add it, or leave them out" in message


def test_prompts_are_padded_on_the_left() -> None:
    inputs = speculation.encode(load(rt.sample_model("nemotron_h_draft"), "float32", "cpu"), ["def", "def f(x):"])
    assert inputs["attention_mask"].tolist()[0] == [0] * (inputs["input_ids"].shape[1] - 1) + [1]
    assert inputs["attention_mask"][1].all()


def made_up(dtype: torch.dtype = torch.float32, **runs: DraftRun) -> Speculation:
    class Model:
        device = torch.device("cpu")

    model: Any = Model()
    model.dtype = dtype
    return Speculation(Loaded("made up", model, None), ["x"], SpeculationSettings(8, 16), runs)


def drafted(seconds: float, **facts: Any) -> DraftRun:
    return DraftRun([seconds], **{"forwards": 4, "turns": 4, "drafted": 16, "accepted": 8, **facts})


def test_gains_and_their_absence_are_told() -> None:
    found = made_up(plain=DraftRun([2.0]), quick=drafted(1.0), slow=drafted(3.0), other=DraftRun(refusal="no head"))
    text = speculation_verdict(found).plain
    assert "tokens equal: yes (plain, quick, slow)" in text
    assert "Fastest: quick, 2.00 times as fast as plain decoding" in text
    assert "No gain with slow: on a CPU" in text
    assert text.endswith("other was not run: no head")
    assert speculation_as_table(found).row_count == 4
    assert speculation_as_json(found)["drafters"]["quick"]["tokens_per_forward"] == 3
    assert "Fastest" not in speculation_verdict(made_up(plain=DraftRun([2.0]), even=drafted(1.99))).plain


def test_different_tokens_fail_in_float32_only() -> None:
    runs = {"plain": DraftRun([2.0]), "odd": drafted(1.0, is_equal=False)}
    assert not made_up(**runs).is_right
    assert "tokens equal: no (odd)" in speculation_verdict(made_up(**runs)).plain
    half = made_up(torch.bfloat16, **runs)
    assert half.is_right
    assert "no error by itself" in speculation_verdict(half).plain


def test_different_tokens_are_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def speculate(*args: Any) -> dict[str, DraftRun]:
        return {PLAIN: DraftRun([1.0]), "odd": drafted(1.0, is_equal=False)}

    monkeypatch.setattr("replay_transformers.cli.screen.speculate", speculate)
    assert "tokens equal: no (odd)" in run(*SHORT, "--model", "nemotron_h", code=1).output


def test_the_note_says_what_fixed_drafts_are() -> None:
    assert "full length" in speculation_note(SpeculationSettings(8, 16)).plain
    assert "median" in speculation_note(SpeculationSettings(8, 16, rounds=2)).plain
