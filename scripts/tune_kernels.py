"""Find the fastest launch configurations of the Triton kernels on the GPU at hand.

Every configuration is checked against the reference before it is timed. The best ones go into a table that the package
reads, by default its own (kernels/launch.json), as entries of this GPU, without those that say the same as the one
below them. So that no case is tuned twice, all of them stand in results/launch-<gpu>.json, or in mine.measured.json
beside a table --output=mine.json.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer
from benchmarks.kernel_cells import release
from benchmarks.presets import chosen_presets
from benchmarks.results import Budget, default_path, environment, gpu_name
from benchmarks.tuning import Case, Outcome, candidates, cases, compile_one, condense, tune
from benchmarks.workloads import Settings
from rich.console import Console
from rich.progress import track

from replay_transformers.kernels.launch import TABLE
from replay_transformers.kernels.launch_table import Entry, Launch, read, write

BATCHES = (1, 8, 64, 256)
MOST_WORKERS = 12

console = Console(width=160)


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Model to tune for; by default the four large ones.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help=f"Batch size; by default {BATCHES}.", min=1)] = None,
    operator: Annotated[
        list[str] | None, typer.Option(help="mamba2, gated_delta or causal_conv; by default all.")
    ] = None,
    window: Annotated[int, typer.Option(help="Flush window.", min=2)] = 16,
    output: Annotated[Path, typer.Option(help="Table to write; by default the package's own.")] = TABLE,
    redo: Annotated[bool, typer.Option(help="Tune cases anew that were tuned on this GPU.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop before this much time has passed.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that compile ahead; 0 for none.", min=0)] = None,
    device: Annotated[str, typer.Option(help="cuda; cpu only to try the script, with TRITON_INTERPRET=1.")] = "cuda",
) -> None:
    """Check, time, choose, write."""
    settings = Settings(torch.device(device), window)
    if settings.device.type != "cuda" and output == TABLE:
        raise typer.BadParameter("times on a CPU say nothing about a GPU: pass --output")
    geometries = [chosen.geometry() for chosen in chosen_presets(preset)]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu, budget = gpu_name(), Budget(minutes)
    measured = default_path("launch") if output == TABLE else output.with_suffix(".measured.json")
    tuned = Tuned(output, measured, gpu)
    have = set() if redo else set(tuned.entries)
    missing = [
        case
        for case in cases(geometries, batch or BATCHES)
        if case.operator in (operator or [case.operator]) and _empty(case, gpu).place not in have
    ]
    console.print(environment(), f"\n{len(missing)} cases to tune")
    if settings.device.type == "cuda" and workers != 0:
        compile_all(missing, settings, workers or min(MOST_WORKERS, os.cpu_count() or 1))
    budget.started = time.monotonic()  # compiling was no case
    failed = tune_all(missing, settings, tuned, budget)
    if tuned.entries:
        tuned.save()
    console.print(f"written to {output}")
    if failed:
        raise typer.Exit(1)


class Tuned:
    """All cases tuned so far on one GPU, in full in the file ``measured`` and condensed in ``table``.

    What the table says counts as tuned as well, and more than what ``measured`` says of the same case.
    """

    def __init__(self, table: Path, measured: Path, gpu: str) -> None:
        self.table, self.measured, self.gpu = table, measured, gpu
        known = [entry for path in (measured, table) if path.exists() for entry in read(path)]
        self.entries = {entry.place: entry for entry in known if entry.gpu == gpu}

    def put(self, entry: Entry) -> None:
        """Add an entry, in place of an older one for the same case, and write."""
        self.entries[entry.place] = entry
        self.save()

    def save(self) -> None:
        """Write both files."""
        others = [other for other in read(self.table) if other.gpu != self.gpu] if self.table.exists() else []
        mine = list(self.entries.values())
        for path, entries in ((self.measured, mine), (self.table, [*others, *condense(mine)])):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, entries)


def _empty(case: Case, gpu: str) -> Entry:
    return case.entry(gpu, Launch(1, 1))


def compile_all(missing: list[Case], settings: Settings, workers: int) -> None:
    """Fill Triton's cache on disk: its compiler uses one core, and each process has its own."""
    jobs: dict[object, tuple[Case, Launch]] = {}
    for case in missing:
        for launch in candidates(case, settings.device):
            jobs.setdefault((case.operator, case.geometry, case.bucket, launch), (case, launch))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(compile_one, case, launch, settings) for case, launch in jobs.values()]
        for future in track(running, "compiling", console=console):
            future.result()


def tune_all(missing: list[Case], settings: Settings, tuned: Tuned, budget: Budget) -> list[Case]:
    """Tune case by case, each written at once; returns those that failed or had a wrong result."""
    failed = []
    for case in missing:
        if not budget.has_room():
            console.print(f"stopped before {case}: the time is up; run again to continue")
            break
        try:
            outcome = tune(case, settings)
        except RuntimeError as error:  # out of memory, or nothing runs
            failed.append(case)
            console.print(f"[red]{case}: {type(error).__name__}[/red]", str(error)[:500])
            continue
        finally:
            release()
        tuned.put(case.entry(tuned.gpu, outcome.best))
        report(case, outcome)
        if outcome.wrong:
            failed.append(case)
    return failed


def report(case: Case, outcome: Outcome) -> None:
    """One line about the best; one for each wrong result."""
    usual = outcome.times.get(outcome.usual)
    before = "which did not run" if usual is None else f"{usual:.2f} us"
    tried = f"{len(outcome.times)} timed, {len(outcome.refused)} refused"
    console.print(f"{case}: {outcome.times[outcome.best]:.2f} us, {outcome.best} (was {before}; {tried})")
    for launch, message in outcome.wrong.items():
        console.print(f"[red]wrong[/red] {launch}: {message}")


if __name__ == "__main__":
    typer.run(main)
