"""The table of launch configurations: one JSON object per line, see `Entry`. Reading, checking, merging, looking up."""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["DEFAULT", "OPERATORS", "Entry", "Launch", "find", "merge", "read", "write"]

OPERATORS = ("mamba2", "gated_delta", "causal_conv")
DEFAULT = "default"  # the name of any GPU that the table does not list
MOST_WARPS = 32  # 1,024 threads per program

_PLACE = ("gpu", "operator", "head_dim", "state_dim", "tokens", "from")
_LAUNCH = ("block", "warps", "share", "share_warps")
# a convolution has channels rather than heads, and a single kernel
_NOT_OF_CONVOLUTIONS = ("head_dim", "state_dim", "share", "share_warps")


@dataclass(frozen=True)
class Launch:
    """How one step is launched; all are powers of two.

    Args:
        block: channels (of a head, or of the convolution) per program of the step kernel.
        warps: warps per program of the step kernel.
        share: heads per program of the prepare kernel, at most.
        share_warps: warps per program of the prepare kernel.

    Raises:
        ValueError: no power of two, or more than 32 warps.
    """

    block: int
    warps: int
    share: int = 1
    share_warps: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value!r}")
            if name.endswith("warps") and value > MOST_WARPS:
                raise ValueError(f"{name} must be at most {MOST_WARPS}, got {value}")


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Args:
        gpu: as `torch.cuda.get_device_name` says it, or "default".
        operator: one of `OPERATORS`.
        head_dim, state_dim: of a head; 0 for the convolution, whose lines leave them out.
        tokens: of a step, as "4" or "2-8".
        least: the smallest size for which it holds, up to the next entry's; "from" in the file. Rows times heads, or
            rows times channels for the convolution.
        launch: what to do there; its fields stand in the line itself.
    """

    gpu: str
    operator: str
    head_dim: int
    state_dim: int
    tokens: str
    least: int
    launch: Launch

    @property
    def span(self) -> tuple[int, int]:
        """The fewest and the most tokens."""
        first, _, last = self.tokens.partition("-")
        return int(first), int(last or first)

    @property
    def place(self) -> tuple[Any, ...]:
        """What no two entries of a table share."""
        return self.gpu, self.operator, self.head_dim, self.state_dim, self.span, self.least

    def to_fields(self) -> dict[str, Any]:
        """As the file has it."""
        values = (self.gpu, self.operator, self.head_dim, self.state_dim, self.tokens, self.least)
        fields = dict(zip(_PLACE, values, strict=True)) | asdict(self.launch)
        return {name: fields[name] for name in _names(self.operator)}


def _names(operator: str) -> list[str]:
    left_out = _NOT_OF_CONVOLUTIONS if operator == "causal_conv" else ()
    return [name for name in (*_PLACE, *_LAUNCH) if name not in left_out]


def _parse(fields: Any) -> Entry:
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {fields!r}")
    if fields.get("operator") not in OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(OPERATORS)}, got {fields.get('operator')!r}")
    expected = _names(fields["operator"])
    if set(fields) != set(expected):
        raise ValueError(f"expected the fields {', '.join(expected)}, got {', '.join(map(str, fields))}")
    if not isinstance(fields["gpu"], str) or not fields["gpu"]:
        raise ValueError(f"gpu must be a name or {DEFAULT!r}, got {fields['gpu']!r}")
    for name, smallest in (("head_dim", 1), ("state_dim", 1), ("from", 0)):
        value = fields.get(name, smallest)
        if type(value) is not int or value < smallest:
            raise ValueError(f"{name} must be an integer of at least {smallest}, got {value!r}")
    if not isinstance(fields["tokens"], str) or not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", fields["tokens"]):
        raise ValueError(f"tokens must be like '1' or '2-8', got {fields['tokens']!r}")
    launch = Launch(**{name: fields[name] for name in _LAUNCH if name in fields})
    gpu, operator, head_dim, state_dim, tokens, least = (fields.get(name, 0) for name in _PLACE)
    entry = Entry(gpu, operator, head_dim, state_dim, tokens, least, launch)
    if entry.span[0] > entry.span[1]:
        raise ValueError(f"tokens must be like '1' or '2-8', got {entry.tokens!r}")
    return entry


def read(path: Path) -> list[Entry]:
    """The entries of a file.

    Raises:
        ValueError: the file cannot be read or is no such table; says what was got and what was expected.
    """
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"launch configurations: expected a JSON file at {path}, got {error}") from error
    if not isinstance(lines, list):
        raise ValueError(f"launch configurations: expected a list of entries in {path}, got {type(lines).__name__}")
    entries: dict[tuple[Any, ...], Entry] = {}
    for number, fields in enumerate(lines, 1):
        try:
            entry = _parse(fields)
        except ValueError as error:
            raise ValueError(f"launch configurations: entry {number} of {path}: {error}") from error
        if entry.place in entries:
            raise ValueError(f"launch configurations: entry {number} of {path} is for the same case as an earlier one")
        entries[entry.place] = entry
    return list(entries.values())


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Write a table, one entry per line, in order; a reader never sees half of it."""

    def order(entry: Entry) -> tuple[Any, ...]:
        return entry.gpu != DEFAULT, entry.gpu, OPERATORS.index(entry.operator), *entry.place[2:]

    lines = (json.dumps(entry.to_fields()) for entry in sorted(entries, key=order))
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n", encoding="utf-8")
    unfinished.replace(path)


def merge(entries: list[Entry], others: list[Entry]) -> list[Entry]:
    """Both tables; where both have a GPU, operator and shape of heads, ``others`` alone says what to do."""

    def subject(entry: Entry) -> tuple[Any, ...]:
        return entry.place[:4]

    replaced = {subject(entry) for entry in others}
    return [entry for entry in entries if subject(entry) not in replaced] + others


def find(
    entries: list[Entry], gpu: str, operator: str, size: int, tokens: int, head_dim: int, state_dim: int
) -> Launch:
    """The configuration for a case.

    The GPU's own entries for the operator, or else the default ones; of these the nearest shape of heads, then the
    nearest number of tokens, then the largest ``from`` that is not above ``size`` (the smallest one if all are).

    Raises:
        ValueError: an operator without entries.
    """
    same = [entry for entry in entries if entry.operator == operator]
    same = [entry for entry in same if entry.gpu == gpu] or [entry for entry in same if entry.gpu == DEFAULT]
    if not same:
        raise ValueError(f"no launch configuration for {operator!r} on {gpu!r}; there are some for {list(OPERATORS)}")

    def shape_distance(entry: Entry) -> tuple[float, int, int]:
        ratios = ((entry.head_dim, head_dim), (entry.state_dim, state_dim))
        away = sum(abs(math.log2(max(one, 1) / max(two, 1))) for one, two in ratios)
        return away, entry.head_dim, entry.state_dim

    def token_distance(entry: Entry) -> tuple[int, int, int]:
        first, last = entry.span
        return max(first - tokens, tokens - last, 0), last - first, first

    same = _nearest(_nearest(same, shape_distance), token_distance)
    best = max(same, key=lambda entry: (entry.least <= size, entry.least if entry.least <= size else -entry.least))
    return best.launch


def _nearest(entries: list[Entry], distance: Callable[[Entry], tuple[float, ...]]) -> list[Entry]:
    least = min(map(distance, entries))
    return [entry for entry in entries if distance(entry) == least]
