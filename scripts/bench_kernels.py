"""Time one layer's decode step: tuned eager update against the replay step, on a GPU.

Every result is checked against float64 before it is timed. Results go to a JSON file, one cell per model and batch
size, with a step for each precision and number of tokens; those that are already in it are skipped. A step that is
added to a cell later keeps the time of the eager update of its own run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.kernel_cells import Record, Settings, measure_baseline, measure_step, release
from benchmarks.operators import TIME_STEPS
from benchmarks.precision_grid import parse_precisions
from benchmarks.presets import Preset, chosen_presets
from benchmarks.results import Budget, Results, default_path, environment
from benchmarks.tables import kernel_table
from benchmarks.timing import read_ceiling
from rich.console import Console
from rich.markup import escape

BATCHES = (1, 8, 32, 64, 128, 256, 512)

console = Console(width=200)


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Model to measure; by default the four large ones.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help=f"Batch size; by default {BATCHES}.", min=1)] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens per step; by default 1 and 4.", min=1)] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision of the state, of a copy that is read, decay skip: nvfp4, float32/fp8, float32/s0.001; by "
            "default float32 and bfloat16."
        ),
    ] = None,
    time_steps: Annotated[
        tuple[float, float], typer.Option(help="Shortest and longest: the longer, the faster heads forget.")
    ] = TIME_STEPS,
    window: Annotated[int, typer.Option(help="Flush window.", min=2)] = 16,
    implementation: Annotated[str, typer.Option(help="Of the replay step: triton or reference.")] = "triton",
    eager_only: Annotated[bool, typer.Option(help="Measure the baseline only.")] = False,
    profile: Annotated[bool, typer.Option(help="Record plain steps and flushes by kernel as well.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file; by default results/kernels-<gpu>.json.")] = None,
    redo: Annotated[bool, typer.Option(help="Measure cells anew that are already in the file.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop before this much time has passed.")] = None,
    ceiling_gb: Annotated[float, typer.Option(help="Size of the tensor whose sum gives the read ceiling.")] = 4.0,
    device: Annotated[str, typer.Option(help="cuda; cpu only to try the script, with TRITON_INTERPRET=1.")] = "cuda",
) -> None:
    """Check and time every cell, print a table, write JSON."""
    presets = chosen_presets(preset)
    precisions = parse_precisions(checkpoint or ["float32", "bfloat16"], implementation)
    if not 0 < time_steps[0] <= time_steps[1]:
        raise ValueError(f"--time-steps must be two numbers above 0, the shorter one first, got {time_steps}")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    where = environment()
    results = Results(output or default_path("kernels"), redo=redo)
    ceiling = read_ceiling(torch.device(device), ceiling_gb)
    release()
    console.print(f"{where}\nread ceiling {ceiling / 1e12:.2f} TB/s")
    settings = Settings(
        implementation=implementation,
        window=window,
        tokens=tuple(tokens or (1, 4)),
        precisions=() if eager_only else tuple(precisions),
        ceiling=ceiling,
        device=torch.device(device),
        time_steps=time_steps,
        profiled=profile,
    )
    run = Run(settings, results, Budget(minutes), where)
    for chosen in presets:
        for rows in batch or BATCHES:
            if not run.stopped:
                run.measure_cell(chosen, rows)
    names = {name.name for name in presets}
    console.print(kernel_table({key: cell for key, cell in results.cells.items() if key.split("/")[0] in names}))
    console.print(f"written to {results.path}")
    if run.failed:
        raise typer.Exit(1)


class Run:
    """What the cells of a run share.

    Args:
        where: the environment.

    Attributes:
        failed: keys of what raised or was wrong. stopped: the time is up.
    """

    def __init__(self, settings: Settings, results: Results, budget: Budget, where: dict[str, Any]):
        self.settings, self.results, self.budget, self.where = settings, results, budget, where
        self.failed: list[str] = []
        self.stopped = False

    def measure_cell(self, preset: Preset, rows: int) -> None:
        """Measure the eager update and the steps that are missing; each is stored at once."""
        key, steps = f"{preset.name}/b{rows}", self.settings.steps
        earlier = self.results.cells.get(key)
        is_needed = self.results.needs(key)
        missing = [name for name in steps if is_needed or earlier is None or name not in earlier["replay"]]
        if not (missing or is_needed) or not self._has_room(key):
            return
        geometry = preset.geometry()
        baseline = self._try(key, lambda: measure_baseline(geometry, rows, self.settings))
        if baseline is None:
            return
        cell = {"preset": preset.name, **baseline}
        added_to = earlier if earlier is not None and set(earlier["replay"]) - set(missing) else None
        if not steps:
            self.results.put(key, cell, self.where)
        for name in missing:
            if name != missing[0] and not self._has_room(f"{key}/{name}"):
                return
            tokens, precision = steps[name]
            step = self._try(
                f"{key}/{name}",
                lambda tokens=tokens, precision=precision: measure_step(
                    geometry, rows, tokens, precision, self.settings
                ),
            )
            if step is not None:
                self._put(key, cell, name, step, added_to)
                console.print(f"{key}/{name}: eager {cell['eager']['p50']} us, amortised {step['amortised']}")

    def _put(self, key: str, cell: Record, name: str, step: Record, earlier: Record | None) -> None:
        """Add a step to the cell of this run, or to that of an earlier one from which other steps are kept."""
        if earlier is None:
            cell["replay"][name] = step
            self.results.put(key, cell, self.where)
            return
        own = {"eager_us": cell["eager"]["p50"], "environment": self.results.index(self.where)}
        earlier["replay"][name] = {**step, **own}
        self.results.put(key, earlier, self.results.data["environments"][earlier["environment"]])

    def _has_room(self, what: str) -> bool:
        self.stopped = not self.budget.has_room()
        if self.stopped:
            console.print(f"stopped before {what}: the time is up; run again to continue")
        return not self.stopped

    def _try(self, what: str, measure: Callable[[], Record]) -> Record | None:
        """Measure; what raises is reported and left out, so that a later run tries again."""
        try:
            return measure()
        except Exception as error:
            release()
            self.failed.append(what)
            console.print(f"[red]{escape(what)}: {type(error).__name__}[/red]", escape(str(error)[:500]))
            return None


if __name__ == "__main__":
    typer.run(main)
