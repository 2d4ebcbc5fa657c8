"""What the README says, taken from the JSON of the benchmarks."""

from collections.abc import Iterable
from typing import Any

from .generate_cells import STOCK
from .tables import Cells, eager_us, model_title, skipped, speed_up, step_us

KERNEL_SUMMARY = (
    "model", "batch", "eager, µs", "replay float32", "speed-up", "replay bfloat16", "speed-up",
    "plain step, share of the read ceiling",
)  # fmt: skip
PRECISION_SUMMARY = (
    "model", "batch", "precision", "eager, µs", "plain step", "flush", "average step", "speed-up", "over float32",
    "plain step, share of the read ceiling", "skipped",
)  # fmt: skip
LARGEST_SUMMARY = ("model", "configuration", "prompt", "largest batch", "tokens/s", "ms per step", "peak GiB")
GENERATE_SUMMARY = (
    "model", "batch", "prompt", "dynamic, ms", "static + compile", "replay", "replay_static",
    "its graphs without inductor", "eager update", "writing every step", "over the faster stock",
)  # fmt: skip
GENERATE_ORDER = (
    "dynamic", "static", "replay", "replay_static", "replay_static_graphs", "replay_static_eager",
    "replay_static_window_1",
)  # fmt: skip


def kernel_summary(cells: Cells) -> Iterable[list[str]]:
    """Single-token steps on average, flushes included: one row per model and batch size."""
    for cell in ordered(cells, "batch"):
        row = [cell["preset"], str(cell["batch"]), f"{cell['eager']['p50']:.1f}"]
        for name in ("t1/float32", "t1/bfloat16"):
            step = cell["replay"].get(name)
            row += [f"{step_us(cell, name):.1f}", f"{speed_up(cell, name):.2f}"] if step else ["-", "-"]
        step = cell["replay"].get("t1/float32")
        yield [*row, f"{step['share_of_ceiling']:.0%}" if step else "-"]


def precisions(cells: Cells) -> list[str]:
    """Precisions of single-token steps, in the order in which they were measured."""
    names = [name.partition("/") for cell in cells.values() for name in cell["replay"]]
    return list(dict.fromkeys(precision for tokens, _, precision in names if tokens == "t1"))


def precision_summary(cells: Cells) -> Iterable[list[str]]:
    """Single-token steps: one row per model, batch size and precision; "over float32" is against the replay step."""
    for cell in ordered(cells, "batch"):
        for precision in precisions({"": cell}):
            name, plain = f"t1/{precision}", cell["replay"].get("t1/float32")
            step, ratio = cell["replay"][name], "-"
            if plain:
                ratio = f"{speed_up(cell, name) / speed_up(cell, 't1/float32'):.2f}"
            yield [
                cell["preset"],
                str(cell["batch"]),
                precision,
                f"{eager_us(cell, name):.1f}",
                f"{step['plain']['p50']:.1f}",
                f"{step['flush']['p50']:.1f}",
                f"{step_us(cell, name):.1f}",
                f"{speed_up(cell, name):.2f}",
                ratio,
                f"{step['share_of_ceiling']:.0%}",
                skipped(step),
            ]


def largest(cells: Cells) -> Cells:
    """The cells that look for the largest batch."""
    return {key: cell for key, cell in cells.items() if "tried" in cell}


def fixed(cells: Cells) -> Cells:
    """The other cells of the generate benchmark."""
    return {key: cell for key, cell in cells.items() if "tried" not in cell}


def largest_summary(cells: Cells) -> Iterable[list[str]]:
    """One row per model and configuration."""
    for cell in ordered(cells, "batch"):
        row = [model_title(cell), cell["configuration"], str(cell["prompt"])]
        if cell["status"] != "measured":
            yield [*row, cell["status"], "-", "-", "-"]
            continue
        numbers = f"{cell['tokens_per_s']:,.0f}", f"{cell['step_ms']:.1f}", f"{cell['peak_gib']:.1f}"
        yield [*row, str(cell["batch"]), *numbers]


def other_configurations(cells: Cells) -> list[str]:
    """Those with a state of another precision."""
    names = dict.fromkeys(cell["configuration"] for cell in cells.values())
    return [name for name in names if name not in GENERATE_ORDER]


def generate_columns(cells: Cells) -> list[str]:
    """For `generate_summary`: a column more for every configuration with a state of another precision."""
    return [*GENERATE_SUMMARY, *other_configurations(cells)]


def generate_summary(cells: Cells) -> Iterable[list[str]]:
    """Milliseconds per step: one row per model, batch size and prompt.

    States of other precisions come last, with how many times as fast as the faster stock they are.
    """
    others = other_configurations(cells)
    groups: dict[tuple[str, int, int], dict[str, Any]] = {}
    for cell in ordered(cells, "prompt", "batch"):
        place = model_title(cell), cell["batch"], cell["prompt"]
        groups.setdefault(place, {})[cell["configuration"]] = cell
    for (model, batch, prompt), group in groups.items():
        steps = {name: cell["step_ms"] for name, cell in group.items() if cell["status"] == "measured"}
        row = [model, str(batch), str(prompt)]
        for name in GENERATE_ORDER:
            row.append(f"{steps[name]:.1f}" if name in steps else group.get(name, {}).get("status", "-"))
        stock = [steps[name] for name in STOCK if name in steps]
        ratios = {name: f"{min(stock) / step:.2f}" for name, step in steps.items()} if stock else {}
        row.append(ratios.get("replay_static", "-"))
        for name in others:
            time = f"{steps[name]:.1f}" if name in steps else group.get(name, {}).get("status", "-")
            row.append(f"{time} ({ratios[name]})" if name in ratios else time)
        yield row


def ordered(cells: Cells, *names: str) -> list[dict[str, Any]]:
    """The records by model, then by these numbers."""
    presets = list(dict.fromkeys(cell["preset"] for cell in cells.values()))
    return sorted(
        cells.values(), key=lambda cell: (presets.index(cell["preset"]), *(int(cell[name]) for name in names))
    )
