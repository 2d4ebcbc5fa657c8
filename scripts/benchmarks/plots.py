"""Plots of the benchmarks' JSON."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .precision_grid import Setting
from .precision_tables import setting_name, title
from .speculative_tables import speed_up as over
from .summary import GENERATE_ORDER, ordered, other_configurations, precisions
from .tables import Cells, model_title, speed_up

plt.rcParams.update({"font.size": 10, "svg.hashsalt": "replay", "axes.spines.top": False, "axes.spines.right": False})

# told apart by the colour-blind
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = "osD^vPX"
STYLES = {"t1/float32": "-", "t1/bfloat16": "--"}


def _by_model(cells: Cells) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in ordered(cells, "batch"):
        groups.setdefault(model_title(cell), []).append(cell)
    return groups


def _batch_axis(axes: Axes, batches: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("batch size")
    axes.grid(axis="y", color="#dddddd")


def _save(figure: Any, path: Path, where: str) -> Path:
    figure.text(0.99, 0.005, where, ha="right", va="bottom", fontsize=7, color="#666666")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return path


def _panels(count: int) -> tuple[Any, Any]:
    """A figure with so many panels, two in a row."""
    columns = min(2, count)
    rows = -(-count // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False)
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    return figure, panels


def plot_speed_up(cells: Cells, path: Path, where: str) -> Path:
    """Single-token step on average, flushes included, against the tuned eager update."""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for index, (model, group) in enumerate(_by_model(cells).items()):
        for name, style in STYLES.items():
            points = [(cell["batch"], speed_up(cell, name)) for cell in group if name in cell["replay"]]
            if points:
                label = f"{model}, {name.partition('/')[2]}"
                axes.plot(*zip(*points, strict=True), style, color=COLOURS[index], marker=MARKERS[index], label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times as fast as the eager update")
    axes.set_title("One layer's decode step, flushes included")
    _batch_axis(axes, sorted({cell["batch"] for cell in cells.values()}))
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path, where)


def plot_precision_steps(cells: Cells, path: Path, where: str) -> Path:
    """Single-token step on average against the tuned eager update of a float32 state, a line per precision.

    Solid for separate copies, dashed for shared ones, dotted with a decay skip.
    """
    groups, names = _by_model(cells), precisions(cells)
    figure, panels = _panels(len(groups))
    for axes, (model, group) in zip(panels.flat, groups.items(), strict=False):
        for index, precision in enumerate(names):
            name, setting = f"t1/{precision}", Setting.parse(precision)
            points = [(cell["batch"], speed_up(cell, name)) for cell in group if name in cell["replay"]]
            style = ":" if setting.decay_skip else "-" if setting.readout else "--"
            look: dict[str, Any] = {
                "color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index // len(COLOURS) % len(MARKERS)],
            }  # fmt: skip
            if points:
                axes.plot(*zip(*points, strict=True), style, label=precision, **look)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_title(model, fontsize=10)
        axes.set_ylabel("times as fast as eager, float32")
        _batch_axis(axes, sorted({cell["batch"] for cell in group}))
    last = panels.flat[len(groups) - 1]
    if last.get_legend_handles_labels()[0]:
        last.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle("One layer's decode step by the precision of its state, flushes included", fontsize=11)
    return _save(figure, path, where)


def plot_bandwidth(cells: Cells, path: Path, where: str) -> Path:
    """How much of the read ceiling the baseline and a plain step reach."""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for index, (model, group) in enumerate(_by_model(cells).items()):
        look: dict[str, Any] = {"color": COLOURS[index], "marker": MARKERS[index]}
        batches = [cell["batch"] for cell in group]
        eager = [100 * cell["eager"]["share_of_ceiling"] for cell in group]
        axes.plot(batches, eager, ":", label=f"{model}, eager", **look)
        points = [
            (cell["batch"], 100 * cell["replay"]["t1/float32"]["share_of_ceiling"])
            for cell in group
            if "t1/float32" in cell["replay"]
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "-", label=f"{model}, replay", **look)
    axes.axhline(100, color="black", linewidth=0.8)
    axes.set_ylim(0, 105)
    axes.set_ylabel("% of the read ceiling")
    axes.set_title("Bytes of state and ring moved per second, float32 state")
    _batch_axis(axes, sorted({cell["batch"] for cell in cells.values()}))
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, path, where)


def plot_generate(cells: Cells, path: Path, where: str) -> Path:
    """Milliseconds per step of `generate` by batch size, one panel per model, shortest prompt."""
    shortest = min(cell["prompt"] for cell in cells.values())
    groups = _by_model({key: cell for key, cell in cells.items() if cell["prompt"] == shortest})
    figure, panels = _panels(len(groups))
    for axes, (model, group) in zip(panels.flat, groups.items(), strict=False):
        for index, name in enumerate([*GENERATE_ORDER, *other_configurations(cells)]):
            points = [(c["batch"], c["step_ms"]) for c in group if c["configuration"] == name and "step_ms" in c]
            if points:
                place, style = index % len(COLOURS), "-" if index < len(GENERATE_ORDER) else "--"
                look: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place]}
                axes.plot(*zip(*points, strict=True), style, label=name, **look)
        axes.set_title(model, fontsize=10)
        axes.set_ylabel("ms per step")
        axes.set_ylim(bottom=0)
        _batch_axis(axes, sorted({cell["batch"] for cell in group}))
    panels.flat[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"One decode step of generate, prompt of {shortest}", fontsize=11)
    return _save(figure, path, where)


def plot_speculative(cells: Cells, path: Path, where: str) -> Path:
    """Tokens per second over plain decoding by batch size, a line per length of forwards, one panel per model."""
    cells = {key: cell for key, cell in cells.items() if cell.get("chance") is None}
    groups = _by_model(cells)
    figure, panels = _panels(len(groups))
    lengths = sorted({(cell["tokens"], cell["accepted"]) for cell in cells.values() if cell["tokens"] > 1})
    for axes, (model, group) in zip(panels.flat, groups.items(), strict=False):
        for index, (tokens, accepted) in enumerate(lengths):
            look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            for method, style in (("replay", "-"), ("snapshots", ":")):
                alike = [c for c in group if (c["method"], c["tokens"], c["accepted"]) == (method, tokens, accepted)]
                ratios = [(cell["batch"], over(cells, cell, "plain")) for cell in alike]
                points = [(batch, ratio) for batch, ratio in ratios if ratio is not None]
                if points:
                    label = f"T = {tokens}, {accepted} of {tokens - 1} accepted" if method == "replay" else None
                    axes.plot(*zip(*points, strict=True), style, label=label, **look)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_title(model, fontsize=10)
        axes.set_ylabel("times as fast as plain")
        _batch_axis(axes, sorted({cell["batch"] for cell in group}))
    last = panels.flat[len(groups) - 1]
    if last.get_legend_handles_labels()[0]:
        last.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle("Speculative decoding, drafter of no cost (dotted: rollback by copies of the state)", fontsize=11)
    return _save(figure, path, where)


def plot_precision(cells: Cells, path: Path, where: str) -> Path:
    """Divergence from a float32 state by length, a line per setting, one panel per model.

    A point is the mean of a bin, at its end. A divergence of zero has no place on the axis and is left out.
    Each format has a colour; lines are solid for separate copies, dashed for shared ones, dotted with a decay skip.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in cells.values():
        groups.setdefault(title(cell), []).append(cell)
    names = list(dict.fromkeys(setting_name(cell) for cell in cells.values()))
    formats = list(dict.fromkeys(cell["readout"] or cell["checkpoint"] for cell in cells.values()))
    figure, panels = _panels(len(groups))
    for axes, (model, group) in zip(panels.flat, groups.items(), strict=False):
        for cell in group:
            name, colour = setting_name(cell), formats.index(cell["readout"] or cell["checkpoint"])
            marker = MARKERS[names.index(name) % len(MARKERS)]
            points = [(part["to"], part["kl"]) for part in cell["bins"] if part["kl"] > 0]
            if points:
                style = ":" if cell["decay_skip"] else "-" if cell["readout"] else "--"
                look: dict[str, Any] = {"color": COLOURS[colour % len(COLOURS)], "marker": marker, "markersize": 4}
                axes.plot(*zip(*points, strict=True), style, label=name, **look)
        ends = sorted({part["to"] for cell in group for part in cell["bins"]})
        axes.set_xscale("log", base=4)
        axes.set_yscale("log")
        axes.set_xticks(ends, [str(end) for end in ends])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("tokens decoded")
        axes.set_ylabel("KL(float32 || setting), nats")
        axes.set_title(model, fontsize=10)
        axes.grid(axis="y", color="#dddddd")
    last = panels.flat[len(groups) - 1]
    if last.get_legend_handles_labels()[0]:
        last.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle("Next-token distributions against a float32 state, same tokens", fontsize=11)
    return _save(figure, path, where)
