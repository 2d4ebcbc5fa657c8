"""The files of a run: a part for every process, a header that says what the run is, and the merged output.

OUTPUT                       the output, there once all of it is: it replaces an earlier one in one step
OUTPUT.parts/header.json     settings, versions, and whether the output is finished
OUTPUT.parts/part-00000.jsonl, ...   what each process has done so far; removed when the output is finished
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_transformers.cli.loading import CommandError

from .settings import differences

try:
    import fcntl
except ImportError:  # Windows: nothing then stops two runs with one output
    fcntl = None  # type: ignore[assignment]

Place = tuple[Path, int, int]  # a line: its file, where it begins, its bytes


def encoded(record: dict[str, Any]) -> bytes:
    """A line of the output."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON allows it
        return json.dumps(record).encode() + b"\n"


class Parts:
    """The files beside an output; the processes of a run each have one of these.

    Raises:
        CommandError: an output that cannot be a file.
    """

    def __init__(self, output: Path) -> None:
        if not output.name or output.is_dir():
            raise CommandError(f"--output must name a file, got the folder {str(output)!r}")
        self.output, self.folder = output, output.with_name(output.name + ".parts")
        self.header = self.folder / "header.json"
        self._lock: Any = None
        self._counted: dict[Path, tuple[int, int]] = {}  # bytes and lines of each part

    def part(self, rank: int) -> Path:
        """The file of a process."""
        return self.folder / f"part-{rank:05}.jsonl"

    def lock(self, *, alone: bool = False) -> None:
        """Keep others from beginning a run with this output for as long as this process lives.

        Raises:
            CommandError: with ``alone``, if a process of an earlier run still holds it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return
        self._lock = self._lock or (self.folder / "lock").open("ab")
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(
                f"processes of another run still write to {self.folder}: wait for them, or end them"
            ) from error
        except OSError:
            pass  # a file system without locks

    def begin(self, fingerprint: dict[str, Any], environment: dict[str, Any], redo: bool) -> tuple[bool, list[str]]:
        """Check what is there against the settings of this run, and make a header if there is none.

        Returns:
            Whether the output is finished, and in which of its surroundings this run differs from the one it resumes.

        Raises:
            CommandError: what is there belongs to another run, or its header cannot be read.
        """
        fresh = {"settings": fingerprint, "environment": environment, "finished": None}
        if redo:
            self._remove_parts()
            self._write_header(fresh)
        elif not self.header.exists():
            if self.output.exists():
                raise CommandError(
                    f"{self.output} exists, and no {self.header} says what it is: choose another --output, or --redo, "
                    "which replaces it"
                )
            self._write_header(fresh)
        header = self._read_header()
        differing = differences(header["settings"], fingerprint)
        if differing and not header["finished"] and not self.done():  # nothing would be lost
            header = fresh
            self._write_header(header)
        elif differing:
            raise CommandError(
                "\n  ".join([f"{self.output} was begun with other settings:", *differing])
                + "\nGo on with the settings of then, choose another --output, or start anew with --redo"
            )
        finished = header["finished"]
        if finished and not (self.output.exists() and self.output.stat().st_size == finished["bytes"]):
            raise CommandError(
                f"{self.output} was finished, and has been changed or removed since: --redo generates it anew"
            )
        return bool(finished), differences(header["environment"], environment)

    def _read_header(self) -> dict[str, Any]:
        try:
            header = json.loads(self.header.read_text())
            finished = header["finished"]
            parts = [header["settings"], header["environment"], {"bytes": 0} if finished is None else finished]
            if all(isinstance(part, dict) for part in parts) and isinstance(parts[2]["bytes"], int):
                return header
        except (ValueError, TypeError, KeyError, RecursionError):
            pass  # told below
        raise CommandError(
            f"{self.header} is damaged and does not say what the run was: --redo starts anew and replaces what is there"
        )

    def _write_header(self, header: dict[str, Any]) -> None:
        fresh = self.header.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump(header, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        _replace(fresh, self.header)

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.jsonl"))

    def _remove_parts(self) -> None:
        for path in (*self._parts(), self.folder / "merged.jsonl"):
            path.unlink(missing_ok=True)

    def repair(self) -> None:
        """Cut half-written last lines off: what a process was writing when it ended."""
        for path in self._parts():
            places = list(_lines(path))
            end = places[-1][1] + places[-1][2] if places else 0
            if end < path.stat().st_size:
                with path.open("r+b") as file:
                    file.truncate(end)
                    os.fsync(file.fileno())

    def done(self) -> dict[int, Place]:
        """Where the line of each finished prompt is, by the prompt's index.

        Raises:
            CommandError: a line in the middle of a part that cannot be read.
        """
        return {
            index: (path, begin, size) for path in self._parts() for index, begin, size in reversed([*_lines(path)])
        }

    def count(self) -> int:
        """How many lines the parts have by now."""
        for path in self._parts():
            begin, lines = self._counted.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(begin)
                fresh = file.read()
            self._counted[path] = begin + len(fresh), lines + fresh.count(b"\n")
        return sum(lines for _, lines in self._counted.values())

    def merge(self, prompts: int, errors: dict[int, bytes]) -> None:
        """Write the output in the prompts' order, then mark it as finished, then remove the parts.

        Broken off at any point, it can be done again from its beginning.

        Args:
            prompts: how many lines there must be.
            errors: by index, the lines of prompts that nothing was generated for.
        """
        done, merged = self.done(), self.folder / "merged.jsonl"
        missing = [index for index in range(prompts) if index not in done and index not in errors]
        if missing:
            raise CommandError(f"{len(missing)} prompts are missing in {self.folder}, the first is {missing[0]}")
        files = {path: path.open("rb") for path in self._parts()}
        try:
            with merged.open("wb") as output:
                for index in range(prompts):
                    if index in errors:
                        output.write(errors[index])
                        continue
                    path, begin, size = done[index]
                    files[path].seek(begin)
                    output.write(files[path].read(size))
                output.flush()
                os.fsync(output.fileno())
        finally:
            for file in files.values():
                file.close()
        _replace(merged, self.output)
        self.finish()

    def finish(self) -> None:
        """Mark the output as finished and remove the parts."""
        header = self._read_header()
        if not header["finished"]:
            self._write_header(header | {"finished": {"bytes": self.output.stat().st_size}})
        self._remove_parts()


class Writer:
    """Appends to the part of a process; each line is on the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("ab")

    def write(self, line: bytes) -> None:
        """Append a line."""
        self.file.write(line)
        self.file.flush()
        os.fsync(self.file.fileno())


def _lines(path: Path) -> Iterator[tuple[int, int, int]]:
    """The whole lines of a part: the prompt's index, where it begins, its bytes; a broken last one is left out."""
    size, begin = path.stat().st_size, 0
    with path.open("rb") as file:
        for line in file:
            try:
                index = json.loads(line)["index"] if line.endswith(b"\n") else None
            except (ValueError, TypeError, KeyError):
                index = None
            if index is None:
                if begin + len(line) < size:
                    raise CommandError(
                        f"{path} cannot be read from byte {begin} on: remove it, and what was in it is done again"
                    )
                return
            yield index, begin, len(line)
            begin += len(line)


def _replace(fresh: Path, path: Path) -> None:
    """Put a file in another's place in one step, also if the machine fails."""
    fresh.replace(path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
