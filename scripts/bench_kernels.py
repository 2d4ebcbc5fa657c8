"""Time one layer's decode step: tuned eager update against the replay step, on a GPU.

Every result is checked against float64 before it is timed. Results go to a JSON file, one cell per model and batch
size; cells that are already in it are skipped.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.kernel_cells import Settings, measure_cell, release
from benchmarks.presets import Preset, chosen_presets
from benchmarks.results import Budget, Results, default_path, environment
from benchmarks.tables import kernel_table
from benchmarks.timing import read_ceiling
from rich.console import Console

BATCHES = (1, 8, 32, 64, 128, 256, 512)

console = Console(width=160)


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Model to measure; by default the four large ones.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help=f"Batch size; by default {BATCHES}.", min=1)] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens per step; by default 1 and 4.", min=1)] = None,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Precision of the state; by default float32 and bfloat16.")
    ] = None,
    window: Annotated[int, typer.Option(help="Flush window.", min=2)] = 16,
    implementation: Annotated[str, typer.Option(help="Of the replay step: triton or reference.")] = "triton",
    eager_only: Annotated[bool, typer.Option(help="Measure the baseline only.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file; by default results/kernels-<gpu>.json.")] = None,
    redo: Annotated[bool, typer.Option(help="Measure cells anew that are already in the file.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop before this much time has passed.")] = None,
    ceiling_gb: Annotated[float, typer.Option(help="Size of the tensor whose sum gives the read ceiling.")] = 4.0,
    device: Annotated[str, typer.Option(help="cuda; cpu only to try the script, with TRITON_INTERPRET=1.")] = "cuda",
) -> None:
    """Check and time every cell, print a table, write JSON."""
    presets = chosen_presets(preset)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    where = environment()
    results, budget = Results(output or default_path("kernels"), redo=redo), Budget(minutes)
    ceiling = read_ceiling(torch.device(device), ceiling_gb)
    release()
    console.print(f"{where}\nread ceiling {ceiling / 1e12:.2f} TB/s")
    settings = Settings(
        implementation=implementation,
        window=window,
        tokens=tuple(tokens or (1, 4)),
        checkpoints=tuple(checkpoint or ("float32", "bfloat16")),
        ceiling=ceiling,
        device=torch.device(device),
        skip_replay=eager_only,
    )
    failed = measure_all(presets, batch or list(BATCHES), settings, results, budget, where)
    names = {name.name for name in presets}
    console.print(kernel_table({key: cell for key, cell in results.cells.items() if key.split("/")[0] in names}))
    console.print(f"written to {results.path}")
    if failed:
        raise typer.Exit(1)


def measure_all(
    presets: list[Preset],
    batches: list[int],
    settings: Settings,
    results: Results,
    budget: Budget,
    where: dict[str, Any],
) -> list[str]:
    """Measure the cells that are missing; returns those whose check failed or that raised."""
    failed: list[str] = []
    for preset in presets:
        for rows in batches:
            key = f"{preset.name}/b{rows}"
            if not results.needs(key):
                continue
            if not budget.has_room():
                console.print(f"stopped before {key}: the time is up; run again to continue")
                return failed
            try:
                record = measure_cell(preset.geometry(), rows, settings)
            except Exception as error:
                release()
                failed.append(key)
                console.print(f"[red]{key}: {type(error).__name__}[/red]", str(error)[:500], markup=True)
                continue
            results.put(key, {"preset": preset.name, **record}, where)
            replayed = {name: cell["amortised"] for name, cell in record["replay"].items()}
            console.print(f"{key}: eager {record['eager']['p50']} us, amortised {replayed}")
    return failed


if __name__ == "__main__":
    typer.run(main)
