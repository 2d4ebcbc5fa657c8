"""The text that the sample models are trained and measured on: the standard library of a CPython."""

import sysconfig
import tokenize
from pathlib import Path

# Never trained on, and neither are their test files: the figure that the script prints is measured on these.
HELD_OUT = (
    "calendar.py",
    "configparser.py",
    "csv.py",
    "difflib.py",
    "fnmatch.py",
    "heapq.py",
    "json/decoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "tempfile.py",
    "textwrap.py",
)
# Installed packages are not part of CPython; the character maps and the broken test inputs are not code to learn from.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings", "__pycache__", "bad", "lib2to3"}


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def training_files(root: Path) -> list[Path]:
    """Every Python file under ``root`` in a fixed order, without the held-out files and their tests."""
    kept_out = {root / name for name in HELD_OUT}
    kept_out_tests = {f"test_{Path(name).stem}.py" for name in HELD_OUT}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if path not in kept_out
        and path.name not in kept_out_tests
        and SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]


def held_out_files(root: Path) -> list[Path]:
    """The held-out files that exist under ``root``; raises ValueError if there are none."""
    files = [root / name for name in HELD_OUT if (root / name).is_file()]
    if not files:
        raise ValueError(f"expected at least one of {', '.join(HELD_OUT)} under {root}, found none")
    return files


def read_source(path: Path) -> str:
    """The text of a Python file with ``\\n`` line ends, or an empty string if it does not decode as it declares."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
