"""Time whole decode steps through `model.generate`, with random weights, on a GPU or several.

Stock transformers with a dynamic and with a static cache, against replay caches. Logits are compared with the dynamic
cache's, on the same tokens, before a cell is timed. With --largest-batch: the largest batch that fits the GPU. With
--gpus: a model spread by accelerate, layer by layer. Results go to a JSON file after every cell and every batch that
was tried; what is already in it is skipped.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.generate_cells import (
    CONFIGURATIONS,
    FLOAT32,
    SHAPES,
    STOCK,
    Cell,
    Expected,
    Settings,
    all_cells,
    clean_up,
    expected_output,
    is_out_of_memory,
    matching,
    measure_cell,
)
from benchmarks.largest_batch import UNFINISHED, LargestBatch, search
from benchmarks.precision_grid import Setting, parse_precisions
from benchmarks.presets import Preset, chosen_presets
from benchmarks.results import Budget, Results, default_path, environment
from benchmarks.several_gpus import devices_for
from benchmarks.stock import functions_called, provide_mamba_ssm, require_fast, rows_at_once
from benchmarks.tables import generate_table
from benchmarks.weights import assert_usable, build_model
from rich.console import Console
from rich.markup import escape

SEARCHED = (256, 64)  # where the search for the largest batch begins, and its prompts

console = Console(width=160)


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Model to measure; by default the four large ones.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure cells whose key has this in it, for example 'static/b256/p64'.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help=f"BATCHxPROMPT, for example 256x64; by default {SHAPES}.")
    ] = None,
    cells: Annotated[bool, typer.Option("--cells", help="List the cells and stop.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file; by default results/generate-<gpu>.json.")] = None,
    redo: Annotated[bool, typer.Option(help="Measure cells anew that are already in the file.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop before this much time has passed.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of this host that a model is spread over.", min=1)] = 1,
    weights_gib: Annotated[
        float, typer.Option(help="Memory for weights per GPU; larger models lose their last layers.")
    ] = 60,
    mamba_ssm_source: Annotated[
        Path | None, typer.Option(help="Folder mamba_ssm of mamba-ssm's sources, for stock Nemotron-H.")
    ] = None,
    allow_slow_stock: Annotated[bool, typer.Option(help="Do not insist on stock's fast kernels.")] = False,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision of the replay caches' state, of a copy that steps read, and decay_skip: bfloat16, "
            "float32/fp8, float32/s0.001; several times; by default float32."
        ),
    ] = None,
    largest_batch: Annotated[
        list[str] | None,
        typer.Option(
            help="Configuration whose largest batch is looked for, instead of the cells above; begins at what is "
            "predicted, or where nothing is at the batch of --shape (256x64)."
        ),
    ] = None,
    short: Annotated[int, typer.Option(help="New tokens of the shorter timed call.", min=2)] = Settings.short,
    long: Annotated[int, typer.Option(help="New tokens of the longer one.", min=4)] = Settings.long,
    tolerance: Annotated[float, typer.Option(help="Largest error of logits.")] = Settings.tolerance,
    profile: Annotated[bool, typer.Option(help="Record the time of a decode step by kernel as well.")] = False,
    device: Annotated[str, typer.Option(help="cuda; cpu only to try the script with a tiny preset.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
) -> None:
    """Check and time every cell that is missing."""
    presets, precisions = chosen_presets(preset), parse_precisions(checkpoint or [FLOAT32.label], "auto")
    shapes = [parse_shape(text) for text in shape or ()]
    planned: list[Cell] = list(
        largest_cells(presets, largest_batch, shapes or [SEARCHED], only, precisions, gpus)
        if largest_batch
        else all_cells(presets, shapes or list(SHAPES), only, precisions, gpus)
    )
    results, budget = Results(output or default_path("generate"), redo=redo), Budget(minutes)
    if cells:
        for cell in planned:
            console.print(f"{cell.key}  {results.cells.get(cell.key, {}).get('status', 'to do')}", highlight=False)
        return
    devices = devices_for(device, gpus)
    if mamba_ssm_source is not None:
        provide_mamba_ssm(mamba_ssm_source)
    settings = Settings(
        short=short,
        long=long,
        tolerance=tolerance,
        check_kernels=device == "cuda" and not allow_slow_stock,
        profiled=profile,
    )
    run = Run(settings, results, budget, environment(), allow_slow_stock)
    for chosen in dict.fromkeys(cell.preset for cell in planned if is_missing(results, cell)):
        missing = [cell for cell in planned if cell.preset == chosen and is_missing(results, cell)]
        model, layers = build(chosen, devices, int(gpus * weights_gib * 2**30), getattr(torch, dtype))
        if not run.measure_preset(model, chosen, layers, missing):
            break
        del model
    names = {cell.key for cell in planned}
    console.print(generate_table({key: cell for key, cell in results.cells.items() if key in names}))
    console.print(f"written to {results.path}")
    if run.failed:
        raise typer.Exit(1)


def largest_cells(
    presets: list[Preset],
    configurations: list[str],
    shapes: list[tuple[int, int]],
    only: list[str] | None,
    precisions: list[Setting],
    gpus: int,
) -> list[LargestBatch]:
    """The searches; raises ValueError for a configuration that does not exist."""
    unknown = set(configurations) - set(CONFIGURATIONS)
    if unknown:
        raise ValueError(
            f"--largest-batch got {', '.join(sorted(unknown))}, expected any of {', '.join(CONFIGURATIONS)}"
        )
    cells = [
        LargestBatch(preset, configuration, batch, prompt, precision, gpus)
        for preset in presets
        for batch, prompt in shapes
        for precision in precisions
        for configuration in configurations
    ]
    return matching(cells, only)


def is_missing(results: Results, cell: Cell) -> bool:
    """Whether a cell is still to be measured, or a search to be gone on with."""
    return results.needs(cell.key) or results.cells[cell.key]["status"] == UNFINISHED


def parse_shape(text: str) -> tuple[int, int]:
    """``BATCHxPROMPT``."""
    batch, _, prompt = text.partition("x")
    if not (batch.isdigit() and prompt.isdigit()):
        raise ValueError(f"--shape must be BATCHxPROMPT, for example 256x64, got {text!r}")
    return int(batch), int(prompt)


def build(preset: Preset, devices: list[str], weight_bytes: int, dtype: torch.dtype) -> tuple[Any, int]:
    """The model and its number of layers, announced."""
    model, layers = build_model(preset, devices, weight_bytes=weight_bytes, dtype=dtype)
    assert_usable(model)
    whole = len(preset.geometries())
    where = f" on {len(devices)} GPUs" if len(devices) > 1 else ""
    note = "" if layers == whole else f": the first {layers} of {whole} layers, the weights of all do not fit"
    console.print(f"{preset.name}{where}{note}")
    return model, layers


class Run:
    """What the cells of a run share.

    Args:
        where: the environment.
        allow_slow_stock: time stock on whatever it runs on.
    """

    def __init__(
        self, settings: Settings, results: Results, budget: Budget, where: dict[str, Any], allow_slow_stock: bool
    ):
        self.settings, self.results, self.budget, self.where = settings, results, budget, where
        self.allow_slow_stock = allow_slow_stock
        self.failed: list[str] = []

    def measure_preset(self, model: Any, preset: Preset, layers: int, missing: list[Cell]) -> bool:
        """Measure one model's cells; False if the time is up."""
        stock = functions_called(model) if self.allow_slow_stock else require_fast(model)
        at_once = functools.partial(rows_at_once, stock, preset.geometries())
        console.print(f"stock calls {stock}")
        facts = {"layers": layers, "is_whole": layers == len(preset.geometries()), "stock_functions": stock}
        expected: dict[tuple[int, int], Expected | None] = {}
        for cell in missing:
            if not self.budget.has_room():
                console.print(f"stopped before {cell.key}: the time is up; run again to continue")
                return False
            if isinstance(cell, LargestBatch):
                self.search(model, cell, facts, at_once)
                continue
            place = cell.batch, cell.prompt
            rows = at_once(*place)
            if rows < cell.batch and cell.configuration in STOCK:
                self.refuse(cell, rows, facts)
                continue
            if place not in expected:
                expected = {place: self.expect(model, cell, rows)}
            self.measure(model, cell, expected[place], facts)
        return True

    def search(self, model: Any, cell: LargestBatch, facts: dict[str, Any], at_once: Callable[[int, int], int]) -> None:
        """Look for the largest batch; every try is stored, so that a later run goes on from there."""
        earlier = None if self.results.needs(cell.key) else self.results.cells[cell.key]

        def save(record: dict[str, Any]) -> None:
            if record["status"].startswith("wrong"):
                self.failed.append(cell.key)
            self.results.put(cell.key, {**record, **facts}, self.where)
            latest = next(reversed(record["tried"]))
            fits = "fits" if record["tried"][latest] else "does not fit"
            console.print(f"{cell.key}: {record['status']}, batch {latest} {fits}, largest so far {record['batch']}")

        try:
            search(model, cell, self.settings, earlier, save, self.budget.has_room, at_once)
        except Exception as error:
            self.report(model, cell, error)

    def report(self, model: Any, cell: Cell, error: Exception) -> None:
        """Say what raised; a later run tries again."""
        console.print(f"[red]{escape(cell.key)}: {type(error).__name__}[/red] {escape(str(error)[:1000])}")
        self.failed.append(cell.key)
        clean_up(model)

    def refuse(self, cell: Cell, rows: int, facts: dict[str, Any]) -> None:
        """Store that stock cannot run a cell."""
        status = f"too much for stock's scan, which takes {rows} rows of it"
        self.results.put(cell.key, {**cell.facts, "status": status, **facts}, self.where)
        console.print(f"{cell.key}: {status}")

    def expect(self, model: Any, cell: Cell, rows: int) -> Expected | None:
        """The dynamic cache's output, ``rows`` at a time; None where it does not run: the other cells are not checked.

        Args:
            rows: that stock can take at once, or 0.
        """
        try:
            if rows:
                return expected_output(model, cell.batch, cell.prompt, self.settings.checked, rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        clean_up(model)
        console.print(f"{cell.key}: the dynamic cache cannot run it, logits are not checked")
        return None

    def measure(self, model: Any, cell: Cell, expected: Expected | None, facts: dict[str, Any]) -> None:
        """Measure a cell and store it; one that raises is reported and left out, so that a later run tries again."""
        try:
            record = measure_cell(model, cell, self.settings, expected)
        except Exception as error:
            self.report(model, cell, error)
            return
        if record["status"].startswith("wrong"):
            self.failed.append(cell.key)
        self.results.put(cell.key, {**record, **facts}, self.where)
        step = f", {record['step_ms']:.2f} ms a step" if "step_ms" in record else ""
        console.print(f"{cell.key}: {record['status']}{step}")


if __name__ == "__main__":
    typer.run(main)
