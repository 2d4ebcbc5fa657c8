"""Measure what the precision of the recurrent state costs, on text.

Texts are fed token by token to a model with a float32 state and, beside it, to the same model with a state of each
setting: the Kullback-Leibler divergence KL(float32 || setting) of the next token's distribution, how often the
likeliest token is the same, and the log-likelihood of the true next token, by how many tokens were decoded. Also how
long the heads of the model remember, which says how much there is to lose. All run step by step side by side, so that
no logits are kept. With --synthetic: single layers whose states remember for many windows. Results go to a JSON file
after every group of settings; those that are already in it are skipped.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.generate_cells import clean_up
from benchmarks.precision_cells import BACKENDS, Run, measure_group, text_ids
from benchmarks.precision_grid import DEFAULT_GRID, SYNTAX, Setting, parse_grid
from benchmarks.precision_synthetic import KINDS, measure_synthetic
from benchmarks.precision_tables import (
    heads,
    heads_table,
    precision_table,
    ratio_table,
    synthetic,
    synthetic_table,
    texts,
)
from benchmarks.results import Budget, Results, default_path, environment
from rich.console import Console
from rich.markup import escape
from sample_training.corpus import held_out_files, read_source, standard_library

import replay_transformers as rt
from replay_transformers.cli.loading import DTYPES, load

console = Console(width=170)

SAMPLES = ["qwen3_5", "nemotron_h"]
LENGTH, SYNTHETIC_LENGTH = 16384, 4096


def main(
    model: Annotated[
        list[str] | None, typer.Option(help=f"A folder or a name on the hub; by default the samples {SAMPLES}.")
    ] = None,
    grid: Annotated[list[str] | None, typer.Option(help=f"{SYNTAX}; by default {', '.join(DEFAULT_GRID)}.")] = None,
    cells: Annotated[bool, typer.Option("--cells", help="List the cells and stop.")] = False,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file; by default the standard library's held-out files, one after another."),
    ] = None,
    rows: Annotated[int, typer.Option("--texts", help="Pieces of the text, which run as one batch.", min=1)] = 4,
    length: Annotated[
        int | None,
        typer.Option(help=f"Tokens decoded of each; by default {LENGTH}, for layers {SYNTHETIC_LENGTH}.", min=1),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens before them, taken in at once.", min=2)] = 64,
    together: Annotated[int, typer.Option(help="Settings that run beside one baseline.", min=1)] = 6,
    output: Annotated[Path | None, typer.Option(help="JSON file; by default results/precision-<gpu>.json.")] = None,
    redo: Annotated[bool, typer.Option(help="Measure cells anew that are already in the file.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop before this much time has passed.")] = None,
    device: Annotated[str | None, typer.Option(help="By default a GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of the model, out of {', '.join(DTYPES)}.")] = "float32",
    impl: Annotated[
        str | None,
        typer.Option(help="Of the caches; by default triton on a GPU, where auto writes small states eagerly."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help=f"What runs the steps: {', '.join(BACKENDS)}; by default cudagraphs on a GPU.")
    ] = None,
    layers: Annotated[
        bool, typer.Option("--synthetic", help="Single layers that remember, shared against separate copies.")
    ] = False,
) -> None:
    """Measure every cell that is missing."""
    if dtype not in DTYPES or backend not in (None, *BACKENDS):
        raise ValueError(f"--dtype must be out of {', '.join(DTYPES)}, --backend out of {', '.join(BACKENDS)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.startswith("cuda")
    if not is_gpu:
        torch.set_num_threads(1)  # tiny models lose by more
    work = Work(Results(output or default_path("precision"), redo=redo), Budget(minutes), cells)
    settings = parse_grid(grid)
    if layers:
        work.measure_layers(settings, grid is not None, rows, length or SYNTHETIC_LENGTH)
    else:
        impl, backend = impl or ("triton" if is_gpu else "auto"), backend or BACKENDS[0 if is_gpu else 1]
        for source in model or SAMPLES:
            common = {"dtype": dtype, "texts": rows, "length": length or LENGTH, "prompt": prompt}
            common |= {"text": "held-out" if text is None else text.name, "impl": impl, "backend": backend}
            work.measure_model(source, settings, common, device, together, source_text(text))
    if cells:
        return
    found = work.results.cells
    shown = ((precision_table, texts), (ratio_table, texts), (heads_table, heads), (synthetic_table, synthetic))
    for tables, chosen in shown:
        if chosen(found):
            console.print(tables(chosen(found)))
    console.print(f"written to {work.results.path}")
    if work.failed:
        raise typer.Exit(1)


def source_text(path: Path | None) -> str:
    """A file, or the files that the sample models were not trained on."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    return "\n".join(read_source(file) for file in held_out_files(standard_library()))


class Progress:
    """Prints how far a group of settings is, and how long that took."""

    def __init__(self, place: str, length: int) -> None:
        self.place, self.length, self.begin = place, length, time.monotonic()

    def __call__(self, tokens: int) -> None:
        """Say that so many tokens of each text are done."""
        seconds = time.monotonic() - self.begin
        console.print(f"{self.place}: {tokens} of {self.length} tokens, {seconds:.0f} s", highlight=False)


class Work:
    """What the cells of a run share.

    Args:
        results: where they go. budget: the time they may take. listing: only say which cells there are.
    """

    def __init__(self, results: Results, budget: Budget, listing: bool) -> None:
        self.results, self.budget, self.listing = results, budget, listing
        self.where = environment()
        self.failed: list[str] = []

    def measure_model(
        self, source: str, settings: list[Setting], common: dict[str, Any], device: str, together: int, text: str
    ) -> None:
        """Measure the missing settings of a model, a group of them beside a baseline at a time."""
        name = Path(source).name
        place = f"{name}/{common['dtype']}/{common['texts']}x{common['length']}"
        keys = {setting: f"{place}/{setting.name}" for setting in settings}
        missing = [setting for setting, key in keys.items() if self.is_missing(key)]
        if not missing:
            return
        loaded = load(rt.sample_model(source) if source in SAMPLES else source, common["dtype"], device)
        ids = text_ids(loaded, text, common["texts"], common["prompt"] + common["length"] + 1)
        run = Run(ids, common["prompt"], common["impl"], common["backend"])
        common = {"model": name, **common, "positions": getattr(loaded.model.config, "max_position_embeddings", None)}
        for begin in range(0, len(missing), together):
            group = missing[begin : begin + together]
            if not self.has_room(keys[group[0]]):
                return
            try:
                found, memory = measure_group(loaded.model, group, run, Progress(place, common["length"]))
            except Exception as error:
                self.fail(f"{place}, the baseline", error)
                return
            finally:
                clean_up(loaded.model)
            for setting, record in found.items():
                self.put(keys[setting], record if isinstance(record, Exception) else common | record)
            if memory:
                self.results.put(f"{place}/heads", common | memory, self.where)

    def measure_layers(self, settings: list[Setting], were_chosen: bool, rows: int, steps: int) -> None:
        """Measure the missing layers: for each format a shared copy beside a separate one."""
        shared = [setting for setting in settings if setting.readout is None and not setting.decay_skip]
        if were_chosen and len(shared) < len(settings):
            raise ValueError(
                "with --synthetic a setting is checkpoint or checkpoint/wWINDOW, the format of both copies"
            )
        for kind in KINDS:
            for setting in shared:
                key = f"synthetic/{kind}/{rows}x{steps}/{setting.name}"
                if setting.checkpoint == "float32" or not self.is_missing(key):
                    continue
                if not self.has_room(key):
                    return
                try:
                    record: dict[str, Any] | Exception = measure_synthetic(kind, setting, rows, steps)
                except Exception as error:
                    record = error
                self.put(key, record)

    def is_missing(self, key: str) -> bool:
        """Whether a cell is to be measured; none is if they are only to be listed."""
        if self.listing:
            console.print(f"{key}  {'to do' if self.results.needs(key) else 'done'}", highlight=False)
            return False
        return self.results.needs(key)

    def has_room(self, key: str) -> bool:
        """Whether the time allows another group."""
        if not self.budget.has_room():
            console.print(f"stopped before {key}: the time is up; run again to continue")
            return False
        return True

    def put(self, key: str, record: dict[str, Any] | Exception) -> None:
        """Store a cell; one that raised is reported and left out, so that a later run tries again."""
        if isinstance(record, Exception):
            self.fail(key, record)
            return
        if record["status"].startswith("wrong"):
            self.failed.append(key)
        self.results.put(key, record, self.where)
        console.print(f"{key}: {record['status']}", highlight=False)

    def fail(self, what: str, error: Exception) -> None:
        """Report what raised."""
        console.print(f"[red]{escape(what)}: {type(error).__name__}[/red] {escape(str(error)[:1000])}")
        self.failed.append(what)


if __name__ == "__main__":
    typer.run(main)
