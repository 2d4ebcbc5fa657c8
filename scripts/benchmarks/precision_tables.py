"""Tables of what the state's precision costs."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from .precision_grid import Setting
from .tables import Cells, as_table

PRECISION_COLUMNS = (
    "model", "setting", "tokens", "KL", "s.e.", "rows", "largest", "agreement", "log-lik.", "difference", "s.e.",
    "skipped",
)  # fmt: skip
HEADS_COLUMNS = ("model", "heads", "quantile", "decay per token", "memory, tokens", "in windows")
SYNTHETIC_COLUMNS = ("layer", "shared", "separate", "tokens", "error shared", "error separate", "ratio", "rows")
RATIO_COLUMNS = ("model", "format", "tokens", "KL shared", "KL separate", "ratio")
SAME = ("model", "dtype", "text", "texts", "length", "prompt", "window", "checkpoint", "readout", "decay_skip")
SHORT_QUANTILES = ("0.1", "0.5", "0.9")


def texts(cells: Cells) -> Cells:
    """The cells of models on text."""
    return {key: cell for key, cell in cells.items() if "decay_skip" in cell}


def heads(cells: Cells) -> Cells:
    """How long the heads of each model remember."""
    return {key: cell for key, cell in cells.items() if "memory_tokens" in cell}


def synthetic(cells: Cells) -> Cells:
    """The cells of single layers."""
    return {key: cell for key, cell in cells.items() if "kind" in cell}


def title(cell: dict[str, Any]) -> str:
    """A model, its dtype if that is not float32."""
    return str(cell["model"]) if cell["dtype"] == "float32" else f"{cell['model']}, {cell['dtype']}"


def setting_name(cell: dict[str, Any]) -> str:
    """The setting of a cell, as text."""
    return Setting(cell["checkpoint"], cell["readout"], cell["window"], cell["decay_skip"]).name


def precision_rows(cells: Cells) -> Iterable[list[str]]:
    """One row per setting and bin of lengths; a cell without bins says why."""
    for cell in cells.values():
        head = [title(cell), setting_name(cell)]
        if "bins" not in cell:
            yield [*head, cell["status"], *["-"] * (len(PRECISION_COLUMNS) - 3)]
            continue
        for part in cell["bins"]:
            yield [
                *head,
                f"{part['from']}-{part['to']}",
                f"{part['kl']:.2e}",
                f"{part['kl_error']:.0e}",
                "-".join(f"{value:.1e}" for value in part["kl_rows"]),
                f"{part['kl_max']:.1e}",
                f"{part['agreement']:.4f}",
                f"{part['log_likelihood']:.4f}",
                f"{part['log_likelihood_difference']:+.1e}",
                f"{part['log_likelihood_difference_error']:.0e}",
                _skipped(cell),
            ]


def heads_rows(cells: Cells) -> Iterable[list[str]]:
    """One row per model and quantile."""
    for cell in cells.values():
        for quantile in cell["decay"]:
            yield [
                title(cell),
                str(cell["heads"]),
                quantile,
                f"{cell['decay'][quantile]:.6f}",
                f"{cell['memory_tokens'][quantile]:,.1f}",
                f"{cell['memory_windows'][quantile]:,.2f}",
            ]


def synthetic_rows(cells: Cells) -> Iterable[list[str]]:
    """One row per layer, format and bin."""
    for cell in cells.values():
        shared = Setting(cell["checkpoint"], window=cell["window"]).name
        for part in cell["bins"]:
            ends, ratio = part["ratio_rows"], part["ratio"]
            yield [
                cell["kind"],
                shared,
                cell["separate"],
                f"{part['from']}-{part['to']}",
                f"{part['shared']:.2e}",
                f"{part['separate']:.2e}",
                "-" if ratio is None else f"{ratio:.2f}",
                "-" if ends is None else "-".join(f"{value:.2f}" for value in ends),
            ]


def ratio_rows(cells: Cells) -> Iterable[list[str]]:
    """A format as the only state against the same as a copy beside a float32 one: a row per bin."""
    for cell in cells.values():
        if cell["readout"] is not None or cell["checkpoint"] == "float32" or cell["decay_skip"]:
            continue
        separate = cell | {"checkpoint": "float32", "readout": cell["checkpoint"].removesuffix("_sr")}
        other = next((c for c in cells.values() if all(c[name] == separate[name] for name in SAME)), None)
        if other is None or not ("bins" in cell and "bins" in other):
            continue
        name = Setting(cell["checkpoint"], window=cell["window"]).name
        for mine, its in zip(cell["bins"], other["bins"], strict=True):
            yield [
                title(cell),
                name,
                f"{mine['from']}-{mine['to']}",
                f"{mine['kl']:.1e}",
                f"{its['kl']:.1e}",
                f"{mine['kl'] / its['kl']:.1f}" if its["kl"] > 0 else "-",
            ]


def summary_columns(cells: Cells) -> list[str]:
    """For `precision_summary`: a column per bin that any cell has."""
    return ["model", "setting", *(f"KL, {name}" for name in _bins(cells)), "agreement", "log-lik.", "skipped"]


def precision_summary(cells: Cells) -> Iterable[list[str]]:
    """One row per setting, bins side by side; agreement and log-likelihood (difference) are of the last bin."""
    names = _bins(cells)
    for cell in cells.values():
        if "bins" not in cell:
            yield [title(cell), setting_name(cell), cell["status"], *["-"] * (len(names) + 2)]
            continue
        values = {f"{part['from']}-{part['to']}": f"{part['kl']:.1e}" for part in cell["bins"]}
        last = cell["bins"][-1]
        yield [
            title(cell),
            setting_name(cell),
            *(values.get(name, "-") for name in names),
            f"{last['agreement']:.2%}",
            f"{last['log_likelihood']:.4f} ({last['log_likelihood_difference']:+.1e})",
            _skipped(cell),
        ]


def heads_summary(cells: Cells) -> Iterable[list[str]]:
    """One row per model: memory in tokens, and in windows, of few quantiles."""
    for cell in cells.values():
        tokens, windows = cell["memory_tokens"], cell["memory_windows"]
        yield [
            title(cell),
            str(cell["heads"]),
            *(f"{tokens[name]:,.0f} ({windows[name]:,.1f})" for name in SHORT_QUANTILES),
        ]


HEADS_SUMMARY = ("model", "heads", *(f"memory in tokens (windows), quantile {name}" for name in SHORT_QUANTILES))


def _bins(cells: Cells) -> list[str]:
    ends = {(part["from"], part["to"]) for cell in cells.values() for part in cell.get("bins", ())}
    return [f"{begin}-{end}" for begin, end in sorted(ends)]


def _skipped(cell: dict[str, Any]) -> str:
    return f"{cell['skipped']:.1%}" if "skipped" in cell else "-"


def precision_table(cells: Cells) -> Table:
    """For the terminal."""
    return as_table(PRECISION_COLUMNS, precision_rows(cells))


def ratio_table(cells: Cells) -> Table:
    """For the terminal."""
    return as_table(RATIO_COLUMNS, ratio_rows(cells))


def heads_table(cells: Cells) -> Table:
    """For the terminal."""
    return as_table(HEADS_COLUMNS, heads_rows(cells))


def synthetic_table(cells: Cells) -> Table:
    """For the terminal."""
    return as_table(SYNTHETIC_COLUMNS, synthetic_rows(cells))
