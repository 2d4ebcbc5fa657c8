"""Time speculative decoding with a replay cache, on a GPU or several.

Models of random weights with a drafter of no cost, of which the target accepts a set number of tokens per round:
against the same loop without drafts, against plain `generate`, and against rolling back by copies of the state. With
--gpus: a model spread by accelerate, layer by layer. With --real: the sample models on text, with real drafters.
Results go to a JSON file after every cell; cells that are already in it are skipped.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.generate_cells import clean_up
from benchmarks.presets import Preset, chosen_presets
from benchmarks.real_drafts import RealCell, load_family, measure_real, real_cells
from benchmarks.results import Budget, Results, default_path, environment
from benchmarks.several_gpus import devices_for
from benchmarks.speculative_cells import (
    BACKENDS,
    BATCHES,
    COMPILING,
    FORWARDS,
    Cell,
    Settings,
    all_cells,
    expected_logits,
    measure_cell,
)
from benchmarks.speculative_tables import real, real_table, speculative_table, synthetic
from benchmarks.weights import assert_usable, build_model
from rich.console import Console
from rich.markup import escape
from sample_training.corpus import held_out_files, read_source, standard_library

from replay_transformers.cli.speculation import SpeculationSettings

console = Console(width=190)

DEFAULT_PRESETS = ["nemotron-3-nano-4b", "qwen3.5-4b"]


def main(
    preset: Annotated[list[str] | None, typer.Option(help=f"Models; by default {DEFAULT_PRESETS}.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help=f"Batch sizes; by default {BATCHES}.", min=1)] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help=f"T, drafts and one more; by default {FORWARDS}.", min=2)
    ] = None,
    accepted: Annotated[
        int | None, typer.Option(help="Drafts accepted per round; by default all but one, and at least one.", min=0)
    ] = None,
    chance: Annotated[
        float | None,
        typer.Option(help="Instead of that: each draft is right with this probability, row by row.", min=0, max=1),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help=f"What compiles: {', '.join(BACKENDS)}; by default inductor.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure cells whose key has this in it, for example 'b256/t5'.")
    ] = None,
    cells: Annotated[bool, typer.Option("--cells", help="List the cells and stop.")] = False,
    real_text: Annotated[bool, typer.Option("--real", help="The sample models on real text instead.")] = False,
    texts: Annotated[int, typer.Option(help="With --real: how many files are continued.", min=1)] = 4,
    drafts: Annotated[int, typer.Option(help="With --real: tokens of the longest draft.", min=1)] = 4,
    output: Annotated[Path | None, typer.Option(help="JSON file; by default results/speculative-<gpu>.json.")] = None,
    redo: Annotated[bool, typer.Option(help="Measure cells anew that are already in the file.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop before this much time has passed.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of this host that a model is spread over.", min=1)] = 1,
    weights_gib: Annotated[
        float, typer.Option(help="Memory for weights per GPU; larger models lose their last layers.")
    ] = 60,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompts.", min=2)] = Settings.prompt,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a row in the timed rounds.", min=2)] = Settings.new_tokens,
    warm: Annotated[int, typer.Option(help="Rounds before them.", min=1)] = Settings.warm,
    window: Annotated[int, typer.Option(help="Of the replay caches.", min=1)] = Settings.window,
    checkpoint: Annotated[str, typer.Option(help="Precision of the caches' state.")] = Settings.checkpoint,
    tolerance: Annotated[float, typer.Option(help="Largest error of logits.")] = Settings.tolerance,
    profile: Annotated[bool, typer.Option(help="Record the time of a round by kernel as well.")] = False,
    device: Annotated[str, typer.Option(help="cuda; cpu only to try the script with a tiny preset.")] = "cuda",
    dtype: Annotated[str | None, typer.Option(help="By default bfloat16, with --real float32.")] = None,
) -> None:
    """Check and time every cell that is missing."""
    results = Results(output or default_path("speculative"), redo=redo)
    run = Run(results, Budget(minutes), device, gpus, cells)
    if device == "cpu":
        torch.set_num_threads(1)  # tiny models lose by more
    compiled = backends(backend) if device == "cuda" else ["none"]
    if real_text and gpus > 1:
        raise ValueError(f"--real runs the sample models, on one GPU, got --gpus {gpus}")
    if real_text:
        drafting = real_settings(device, compiled[0], new_tokens, window, drafts)
        run.measure_real(real_cells(drafting, dtype or "float32", texts, prompt, compiled[0], only))
        shown = real_table(real(results.cells))
    else:
        settings = Settings(
            prompt=prompt,
            new_tokens=new_tokens,
            warm=warm,
            tolerance=tolerance,
            window=window,
            checkpoint=checkpoint,
            profiled=profile,
        )
        places = chosen_presets(preset or DEFAULT_PRESETS), batch or list(BATCHES), tokens or list(FORWARDS)
        planned = all_cells(*places, accepted, compiled, only, gpus, chance)
        run.measure(planned, settings, int(gpus * weights_gib * 2**30), getattr(torch, dtype or "bfloat16"))
        shown = speculative_table(synthetic(results.cells))
    if cells:
        return
    console.print(shown)
    console.print(f"written to {results.path}")
    if run.failed:
        raise typer.Exit(1)


def backends(names: list[str] | None) -> list[str]:
    """What is asked for, or inductor."""
    chosen = names or [BACKENDS[0]]
    if not set(chosen) <= set(BACKENDS):
        raise ValueError(f"--backend must be out of {', '.join(BACKENDS)}, got {', '.join(chosen)}")
    return chosen


def real_settings(device: str, backend: str, new_tokens: int, window: int, drafts: int) -> SpeculationSettings:
    """Fixed shapes and more runs on a GPU."""
    cache, rounds = ("replay_static", 3) if device == "cuda" else ("replay", 1)
    return SpeculationSettings(
        new_tokens, window, drafts, cache=cache, rounds=rounds, warm_up_tokens=32, more=COMPILING[backend]
    )


class Run:
    """What the cells of a run share.

    Args:
        results: where they go. budget: the time they may take. device: where models run. gpus: how many of them.
        listing: only say which cells there are.
    """

    def __init__(self, results: Results, budget: Budget, device: str, gpus: int, listing: bool) -> None:
        self.results, self.budget, self.listing = results, budget, listing
        self.device, self.gpus = device, gpus
        self.where = environment()
        self.failed: list[str] = []

    def measure(self, cells: list[Cell], settings: Settings, weight_bytes: int, dtype: torch.dtype) -> None:
        """Measure the missing cells, model by model."""
        missing = self.missing(cells)
        for preset in dict.fromkeys(cell.preset for cell in missing):
            model, layers = self.build(preset, weight_bytes, dtype)
            facts = {"layers": layers, "is_whole": layers == len(preset.geometries())}
            expected: dict[int, torch.Tensor] = {}
            for cell in missing:
                if cell.preset is not preset:
                    continue
                if not self.has_room(cell.key):
                    return
                if cell.batch not in expected:
                    expected[cell.batch] = expected_logits(model, cell.batch, settings)
                call = functools.partial(measure_cell, model, cell, settings, expected[cell.batch])
                self.put(cell.key, call, facts, model)
            del model, call

    def measure_real(self, cells: list[RealCell]) -> None:
        """Measure the missing cells, one sample model after the other."""
        texts = [read_source(file) for file in held_out_files(standard_library())]
        for cell in self.missing(cells):
            if not self.has_room(cell.key):
                return
            loaded, assistant = load_family(cell.family, cell.dtype, self.device)
            self.put(cell.key, functools.partial(measure_real, loaded, assistant, texts, cell), {}, loaded.model)

    def missing(self, cells: list[Any]) -> list[Any]:
        """Cells that are not in the results; none if they are only to be listed."""
        if self.listing:
            for cell in cells:
                console.print(f"{cell.key}  {'to do' if self.results.needs(cell.key) else 'done'}", highlight=False)
            return []
        return [cell for cell in cells if self.results.needs(cell.key)]

    def has_room(self, key: str) -> bool:
        """Whether the time allows another cell."""
        if not self.budget.has_room():
            console.print(f"stopped before {key}: the time is up; run again to continue")
            return False
        return True

    def build(self, preset: Preset, weight_bytes: int, dtype: torch.dtype) -> tuple[Any, int]:
        """The model and its number of layers, announced."""
        devices = devices_for(self.device, self.gpus)
        model, layers = build_model(preset, devices, weight_bytes=weight_bytes, dtype=dtype)
        assert_usable(model)
        where = f" on {self.gpus} GPUs" if self.gpus > 1 else ""
        console.print(f"{preset.name}{where}, {layers} of {len(preset.geometries())} layers")
        return model, layers

    def put(self, key: str, measure: Callable[[], dict[str, Any]], facts: dict[str, Any], model: Any) -> None:
        """Measure a cell and store it; one that raises is reported and left out, so that a later run tries again."""
        try:
            record = measure() | facts
        except Exception as error:
            console.print(f"[red]{escape(key)}: {type(error).__name__}[/red] {escape(str(error)[:1000])}")
            self.failed.append(key)
            return
        finally:
            clean_up(model)
        status = record.get("status", "measured")
        if status.startswith("wrong"):
            self.failed.append(key)
        self.results.put(key, record, self.where)
        rate = f", {record['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in record else ""
        console.print(f"{key}: {status}{rate}")


if __name__ == "__main__":
    typer.run(main)
