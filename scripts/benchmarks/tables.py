"""Tables from the JSON of the benchmarks, for the terminal and as markdown."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from replay_transformers.cursor import SPREAD_ROWS

Cells = dict[str, dict[str, Any]]

KERNEL_COLUMNS = (
    "model", "batch", "eager us", "checkpoint", "T", "plain us", "p20-p80", "with folds", "flush us", "spread us",
    "amortised", "update us", "speed-up amortised", "speed-up spread", "of read ceiling", "skipped",
)  # fmt: skip
GENERATE_COLUMNS = (
    "model", "batch", "prompt", "configuration", "step ms", "p50", "p99", "tokens/s", "prefill ms", "first call s",
    "peak GiB", "logit error",
)  # fmt: skip


def kernel_rows(cells: Cells) -> Iterable[list[str]]:
    """One row per replay step; a cell without any has one for its baseline."""
    for cell in cells.values():
        head = [cell["preset"], str(cell["batch"])]
        if not cell["replay"]:
            eager = cell["eager"]
            share = f"{eager['share_of_ceiling']:.1%}"
            yield [*head, f"{eager['p50']:.1f}", *["-"] * 9, "1.00", "1.00", share, "-"]
        for name, step in cell["replay"].items():
            tokens, _, precision = name.partition("/")
            plain, spread, update = step["plain"], step.get("spread"), step.get("update")
            yield [
                *head,
                f"{eager_us(cell, name):.1f}",
                precision,
                tokens[1:],
                f"{plain['p50']:.1f}",
                f"{plain['p20']:.1f}-{plain['p80']:.1f}",
                f"{step['plain_with_folds']['p50']:.1f}",
                f"{step['flush']['p50']:.1f}",
                f"{spread['p50']:.1f}" if spread else "-",
                f"{step['amortised']:.1f}",
                f"{update['p50']:.1f}" if update else "-",
                f"{speed_up(cell, name, 'amortised'):.2f}",
                f"{speed_up(cell, name, 'spread'):.2f}" if spread else "-",
                f"{step['share_of_ceiling']:.1%}",
                skipped(step),
            ]


def eager_us(cell: dict[str, Any], name: str) -> float:
    """Microseconds of the eager update in the run that measured the step."""
    return float(cell["replay"][name].get("eager_us", cell["eager"]["p50"]))


def skipped(step: dict[str, Any]) -> str:
    """Share of (row, head) whose state a plain step does not read."""
    return f"{step['skipped']:.1%}" if "skipped" in step else "-"


def step_us(cell: dict[str, Any], name: str, flushes: str | None = None) -> float:
    """Microseconds of a step on average: the update where states are small enough that the cache writes them through.

    Args:
        flushes: "amortised", all rows in the same step; "spread", a few rows in each step, measured for single tokens
            only. By default as the cache does it: spread if there are many rows.
    """
    step = cell["replay"][name]
    if "update" in step:
        return float(step["update"]["p50"])
    if flushes is None:
        flushes = "spread" if cell["batch"] >= SPREAD_ROWS and "spread" in step else "amortised"
    return float(step["spread"]["p50"] if flushes == "spread" else step["amortised"])


def speed_up(cell: dict[str, Any], name: str, flushes: str | None = None) -> float:
    """How many times faster than eager decoding of the same number of tokens the step is (see `step_us`)."""
    tokens = int(name.split("/")[0][1:])
    return float(tokens * eager_us(cell, name) / step_us(cell, name, flushes))


def generate_rows(cells: Cells) -> Iterable[list[str]]:
    """One row per cell; a cell without a time says why."""
    for cell in cells.values():
        head = [model_title(cell), str(cell["batch"]), str(cell["prompt"]), cell["configuration"]]
        if cell["status"] != "measured":
            yield [*head, cell["status"], *["-"] * 7]
            continue
        error = cell.get("logit_error")
        yield [
            *head,
            f"{cell['step_ms']:.2f}",
            f"{cell['step_p50_ms']:.2f}",
            f"{cell['step_p99_ms']:.2f}",
            f"{1e3 * cell['batch'] / cell['step_ms']:,.0f}",
            f"{cell['prefill_ms']:.0f}",
            f"{cell['first_call_s']:.1f}",
            f"{cell['peak_gib']:.1f}",
            "-" if error is None else f"{error:.3f}",
        ]


def model_title(cell: dict[str, Any]) -> str:
    """The model, with what there is of it if that is not all, and on how many GPUs if that is not one."""
    layers = "" if cell.get("is_whole", True) else f", {cell['layers']} layers"
    return f"{cell['preset']}{layers}" + (f", {cell['gpus']} GPUs" if cell.get("gpus", 1) > 1 else "")


def as_table(columns: Iterable[str], rows: Iterable[list[str]]) -> Table:
    """For the terminal."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    return table


def as_markdown(columns: Iterable[str], rows: Iterable[list[str]]) -> str:
    """For a README."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kernel_table(cells: Cells) -> Table:
    """The kernel benchmark."""
    return as_table(KERNEL_COLUMNS, kernel_rows(cells))


def generate_table(cells: Cells) -> Table:
    """The generate benchmark."""
    return as_table(GENERATE_COLUMNS, generate_rows(cells))
