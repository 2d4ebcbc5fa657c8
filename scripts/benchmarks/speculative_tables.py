"""Tables of the speculation benchmark: every cell beside what it is compared with."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from .speculative_cells import PLAIN
from .tables import Cells, as_table, model_title

SPECULATIVE_COLUMNS = (
    "model", "method", "batch", "T", "accepted", "backend", "round ms", "p20-p80", "mean", "tokens/s", "per row",
    "over plain", "over generate", "over snapshots", "peak GiB", "logit error",
)  # fmt: skip
REAL_COLUMNS = (
    "model", "cache", "dtype", "backend", "drafts", "drafter", "tokens per forward", "accepted", "s",
    "over plain", "texts equal",
)  # fmt: skip
SUMMARY_COLUMNS = (
    "model", "batch", "T", "accepted", "tokens/s", "over the fastest measured without drafts", "over snapshots",
    "peak GiB", "with snapshots",
)  # fmt: skip
REFERENCES = (*PLAIN, "snapshots")


def synthetic(cells: Cells) -> Cells:
    """The cells with a set acceptance."""
    return {key: cell for key, cell in cells.items() if "method" in cell}


def real(cells: Cells) -> Cells:
    """The cells of the sample models."""
    return {key: cell for key, cell in cells.items() if "drafters" in cell}


def accepted_of(cell: dict[str, Any]) -> str:
    """Drafts that are accepted in each round, or with which probability each is right."""
    return str(cell["accepted"]) if cell.get("chance") is None else f"p = {cell['chance']:g}"


def reference(cells: Cells, cell: dict[str, Any], method: str) -> dict[str, Any] | None:
    """The measured cell of another method that a cell is compared with, or None."""
    names = ["preset", "batch", "backend", "prompt", "window", "checkpoint"]
    names += ["tokens", "accepted"] if method == "snapshots" else []
    alike = (other for other in cells.values() if other["method"] == method and other["status"] == "measured")
    gpus = cell.get("gpus", 1)
    there = (other for other in alike if other.get("gpus", 1) == gpus)
    return next((other for other in there if all(other[name] == cell[name] for name in names)), None)


def speed_up(cells: Cells, cell: dict[str, Any], method: str) -> float | None:
    """How many times as many tokens per second a cell has as the method it is compared with."""
    other = reference(cells, cell, method)
    if other is None or cell["status"] != "measured" or cell["method"] == method:
        return None
    return float(cell["tokens_per_s"] / other["tokens_per_s"])


def over_fastest(cells: Cells, cell: dict[str, Any]) -> float | None:
    """How many times as many tokens per second a cell has as decoding without drafts, whatever compiles that."""
    backends = {other["backend"] for other in cells.values()}
    alike = [reference(cells, {**cell, "backend": name}, method) for name in backends for method in PLAIN]
    fastest = max((other["tokens_per_s"] for other in alike if other is not None), default=None)
    return None if fastest is None else float(cell["tokens_per_s"] / fastest)


def speculative_rows(cells: Cells) -> Iterable[list[str]]:
    """One row per cell; a cell without a time says why."""
    for cell in cells.values():
        facts = [str(cell[name]) for name in ("method", "batch", "tokens")]
        head = [model_title(cell), *facts, accepted_of(cell), str(cell["backend"])]
        if cell["status"] != "measured":
            yield [*head, cell["status"], *["-"] * 9]
            continue
        times = cell["round_ms"]
        yield [
            *head,
            f"{times['p50']:.2f}",
            f"{times['p20']:.2f}-{times['p80']:.2f}",
            f"{times['mean']:.2f}",
            f"{cell['tokens_per_s']:,.0f}",
            f"{cell['row_tokens_per_s']:,.1f}",
            *(_ratio(speed_up(cells, cell, method)) for method in REFERENCES),
            f"{cell['peak_gib']:.1f}",
            f"{cell['logit_error']:.3f}",
        ]


def real_rows(cells: Cells) -> Iterable[list[str]]:
    """One row per sample model and drafter."""
    for cell in cells.values():
        head = [
            cell["model"],
            cell["cache"],
            cell["dtype"],
            cell["backend"],
            f"{cell['drafts']}, {cell['draft_length']}",
        ]
        for name, run in cell["drafters"].items():
            if "refusal" in run:
                yield [*head, name, *["-"] * 4, "refused"]
                continue
            yield [
                *head,
                name,
                f"{run['tokens_per_forward']:.2f}",
                f"{run['accepted'] / run['drafted']:.0%}" if run["drafted"] else "-",
                f"{run['seconds']:.2f}",
                f"{run['speed_up']:.2f}",
                f"{run['texts_equal']} of {cell['texts']}",
            ]


def speculative_summary(cells: Cells) -> Iterable[list[str]]:
    """One row per cell of the replay cache, for a README."""
    for cell in cells.values():
        if cell["method"] != "replay" or cell["status"] != "measured":
            continue
        other = reference(cells, cell, "snapshots")
        yield [
            model_title(cell),
            *(str(cell[name]) for name in ("batch", "tokens")),
            accepted_of(cell),
            f"{cell['tokens_per_s']:,.0f}",
            _ratio(over_fastest(cells, cell)),
            _ratio(speed_up(cells, cell, "snapshots")),
            f"{cell['peak_gib']:.1f}",
            "-" if other is None else f"{other['peak_gib']:.1f}",
        ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def speculative_table(cells: Cells) -> Table:
    """For the terminal."""
    return as_table(SPECULATIVE_COLUMNS, speculative_rows(cells))


def real_table(cells: Cells) -> Table:
    """For the terminal."""
    return as_table(REAL_COLUMNS, real_rows(cells))
