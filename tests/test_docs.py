"""The examples of the README, of docs/ and of public docstrings run; commands that the README names exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mktestdocs import check_docstring, check_md_file
from mktestdocs.__main__ import grab_code_blocks

import replay_transformers as rt

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [path for path in (README, *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]


def public_objects() -> Iterator[tuple[str, Any]]:
    """What the package exports, and the public methods of exported classes."""
    for name in rt.__all__:
        exported = getattr(rt, name)
        yield name, exported
        if inspect.isclass(exported):
            for member, value in vars(exported).items():
                if not member.startswith("_"):
                    yield f"{name}.{member}", value


EXAMPLES = {name: value for name, value in public_objects() if grab_code_blocks(getattr(value, "__doc__", None) or "")}


@pytest.fixture(autouse=True)
def _stock_afterwards() -> Iterator[None]:
    """Examples call enable() and need not undo it."""
    yield
    rt.disable()


def test_readme_opens_with_an_example() -> None:
    opening = "\n".join(README.read_text().splitlines()[:40])
    assert grab_code_blocks(opening), "README.md shows no python block within its first 40 lines"


def test_readme_names_the_two_commands() -> None:
    text = README.read_text()
    for command in ("bash scripts/demo.sh", "bash scripts/test.sh"):
        assert command in text
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_links_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_md_file(page, memory=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring(name: str) -> None:
    check_docstring(EXAMPLES[name], lang="python")
