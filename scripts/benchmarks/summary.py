"""What the README says, taken from the JSON of the benchmarks."""

from collections.abc import Iterable
from typing import Any

from .generate_cells import STOCK
from .tables import Cells, speed_up, step_us

KERNEL_SUMMARY = (
    "model", "batch", "eager, µs", "replay float32", "speed-up", "replay bfloat16", "speed-up",
    "plain step, share of the read ceiling",
)  # fmt: skip
GENERATE_SUMMARY = (
    "model", "batch", "prompt", "dynamic, ms", "static + compile", "replay", "replay_static",
    "its graphs without inductor", "writing every step", "over the faster stock",
)  # fmt: skip
GENERATE_ORDER = ("dynamic", "static", "replay", "replay_static", "replay_static_graphs", "replay_static_window_1")


def kernel_summary(cells: Cells) -> Iterable[list[str]]:
    """Single-token steps on average, flushes included: one row per model and batch size."""
    for cell in ordered(cells, "batch"):
        row = [cell["preset"], str(cell["batch"]), f"{cell['eager']['p50']:.1f}"]
        for name in ("t1/float32", "t1/bfloat16"):
            step = cell["replay"].get(name)
            row += [f"{step_us(cell, name):.1f}", f"{speed_up(cell, name):.2f}"] if step else ["-", "-"]
        step = cell["replay"].get("t1/float32")
        yield [*row, f"{step['share_of_ceiling']:.0%}" if step else "-"]


def generate_summary(cells: Cells) -> Iterable[list[str]]:
    """Milliseconds per step: one row per model, batch size and prompt."""
    groups: dict[tuple[str, int, int], dict[str, Any]] = {}
    for cell in ordered(cells, "prompt", "batch"):
        place = _title(cell), cell["batch"], cell["prompt"]
        groups.setdefault(place, {})[cell["configuration"]] = cell
    for (model, batch, prompt), group in groups.items():
        steps = {name: cell["step_ms"] for name, cell in group.items() if cell["status"] == "measured"}
        row = [model, str(batch), str(prompt)]
        for name in GENERATE_ORDER:
            row.append(f"{steps[name]:.1f}" if name in steps else group.get(name, {}).get("status", "-"))
        stock = [steps[name] for name in STOCK if name in steps]
        ratio = min(stock) / steps["replay_static"] if stock and "replay_static" in steps else None
        yield [*row, "-" if ratio is None else f"{ratio:.2f}"]


def ordered(cells: Cells, *names: str) -> list[dict[str, Any]]:
    """The records by model, then by these numbers."""
    presets = list(dict.fromkeys(cell["preset"] for cell in cells.values()))
    return sorted(
        cells.values(), key=lambda cell: (presets.index(cell["preset"]), *(int(cell[name]) for name in names))
    )


def _title(cell: dict[str, Any]) -> str:
    return str(cell["preset"]) if cell.get("is_whole", True) else f"{cell['preset']}, {cell['layers']} layers"
