"""`optimum-cli replay ...`: the same commands through optimum's command line."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

import replay_transformers as rt

try:
    version("optimum")
except PackageNotFoundError:
    pytest.skip("optimum is not installed; the extra optimum brings it", allow_module_level=True)

NAME = "optimum.commands.register.register_replay"
OPTIMUM = "import sys; from optimum.commands.optimum_cli import main; sys.argv[0] = 'optimum-cli'; main()"


def optimum(*arguments: str, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", OPTIMUM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """optimum's main function in this process, which saves the import of torch."""
    main = import_module("optimum.commands.optimum_cli").main

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        assert not rt.is_enabled()
        return int(left.value.code or 0)

    return call


def test_help_of_a_new_process(tmp_path: Path) -> None:
    text = optimum("--help", cwd=tmp_path).stdout
    assert "Decode hybrid state-space models with a replay cache." in text
    assert "check, demo or generate" in optimum("replay", "--help", cwd=tmp_path).stdout


def test_check(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("replay", "check", "nemotron_h", "--memory", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["class"] == "NemotronHForCausalLM"
    assert found["largest_batch"] > 0


def test_demo(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("replay", "demo", "--model", "qwen3_5", "--max-new-tokens", "4", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["tokens_equal"]


def test_exit_status_and_help_are_passed_on(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("replay", "check", "/nowhere/model") == 2
    assert "there is no folder '/nowhere/model'" in capsys.readouterr().err
    assert command("replay", "generate", "--help") == 0
    assert "optimum-cli replay generate" in capsys.readouterr().out


def test_its_own_commands_stay() -> None:
    assert import_module(NAME).REGISTER_COMMANDS[0].COMMAND.name == "replay"
    text = optimum("--help").stdout
    assert "export" in text
    assert "env" in text


def test_registering_imports_nothing_of_this_package() -> None:
    code = f"import sys, {NAME}; assert not {{'torch', 'replay_transformers', 'transformers'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
