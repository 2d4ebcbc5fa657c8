"""Scripts run as from a command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a script of that name; what it raises is raised here."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(script: str, *arguments: str) -> Result:
        app = Typer()
        app.command()(__import__(script).main)
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
