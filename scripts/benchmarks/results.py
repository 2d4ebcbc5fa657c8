"""Results as JSON, written cell by cell, so that a run that breaks off is continued where it stopped.

Several runs may write to one file, for example one per GPU: none loses what another has measured.
"""

import datetime
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


def environment() -> dict[str, Any]:
    """GPU, versions, and the commit of this checkout; BENCH_COMMIT names it where git does not."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "gpu": gpu_name(),
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "commit": os.environ.get("BENCH_COMMIT") or git.stdout.strip() or None,
        "date": datetime.date.today().isoformat(),
    }


def gpu_name() -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def default_path(benchmark: str) -> Path:
    """``results/<benchmark>-<gpu>.json``."""
    return RESULTS / f"{benchmark}-{re.sub(r'[^a-z0-9]+', '-', gpu_name().lower()).strip('-')}.json"


class Results:
    """Cells by key in a JSON file.

    Args:
        path: the file; read if it is there.
        redo: measure cells anew that are already in it.
    """

    def __init__(self, path: Path, *, redo: bool = False):
        self.path = path
        self.redo = redo
        self.data: dict[str, Any] = {"environments": [], "cells": {}}
        self._read()
        self._done: set[str] = set()

    @property
    def cells(self) -> dict[str, Any]:
        """The records by key."""
        cells: dict[str, Any] = self.data["cells"]
        return cells

    def needs(self, key: str) -> bool:
        """Whether a cell is still to be measured."""
        return key not in (self._done if self.redo else self.cells)

    def index(self, where: dict[str, Any]) -> int:
        """The place of an environment in the file, where it is written down."""
        with self._changed():
            return self._index(where)

    def put(self, key: str, record: dict[str, Any], where: dict[str, Any]) -> None:
        """Add a cell, measured in the environment ``where``, and write the file."""
        with self._changed():
            self.cells[key] = {**record, "environment": self._index(where)}
        self._done.add(key)

    def _index(self, where: dict[str, Any]) -> int:
        environments: list[dict[str, Any]] = self.data["environments"]
        if where not in environments:
            environments.append(where)
        return environments.index(where)

    def _read(self) -> None:
        if self.path.exists():
            self.data = json.loads(self.path.read_text())

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Take up what others have written, and write what the block makes of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        name = "-".join(self.path.resolve().parts[1:])
        with FileLock(Path(tempfile.gettempdir(), f"{name}.lock")):
            self._read()
            yield
            unfinished = self.path.with_suffix(".tmp")
            unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
            unfinished.replace(self.path)


class Budget:
    """A time limit that is kept by not starting what may not end in time.

    Args:
        minutes: None for no limit.
    """

    def __init__(self, minutes: float | None):
        self.start = self.started = time.monotonic()
        self.limit = None if minutes is None else 60 * minutes
        self.longest = 0.0

    def has_room(self) -> bool:
        """Whether a cell as long as the longest so far would still end in time; call it before each cell."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self.started)
        self.started = now
        return self.limit is None or now - self.start + self.longest <= self.limit
