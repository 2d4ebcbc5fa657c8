"""Where the commands print: text as it is generated, bars, results, and errors of one line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from replay_transformers.cli.check import Check
from replay_transformers.cli.check_report import check_as_json, check_as_text
from replay_transformers.cli.compare import Comparison, Settings, compare
from replay_transformers.cli.loading import CommandError, Loaded, looks_local
from replay_transformers.cli.report import as_json, as_table, verdict
from replay_transformers.cli.speculation import Speculation, SpeculationSettings, encode, speculate
from replay_transformers.cli.speculation_report import (
    speculation_as_json,
    speculation_as_table,
    speculation_note,
    speculation_verdict,
)

__all__ = ["Screen"]


class _TextPrinter(TextStreamer):
    """Prints the generated text word by word."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print what is final."""
        self.console.print(Text(text), end="\n" if stream_end else "", soft_wrap=True)


class _TokenBar(BaseStreamer):
    """A bar that grows with the tokens and goes away at the end; none where the console is no terminal."""

    def __init__(self, title: str, most: int, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task(title, total=most)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then token after token."""
        if self.progress.live.is_started or self.progress.disable:
            self.progress.advance(self.task)
        else:
            self.progress.start()

    def end(self) -> None:
        """Take the bar away."""
        self.progress.stop()


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without the progress bars of transformers."""
    were_shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            transformers.logging.enable_progress_bar()


class Screen:
    """Results go to standard output; bars and errors, which are about the run, to standard error.

    Args:
        quiet: do not stream the text.
        only_json: print nothing but the results as JSON, at the end.
    """

    def __init__(self, quiet: bool = False, only_json: bool = False) -> None:
        self.streams = not (quiet or only_json)
        self.only_json = only_json
        self.out, self.err = Console(), Console(stderr=True)
        self.comparisons: list[Comparison] = []
        self.speculations: list[Speculation] = []

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn a `CommandError` into one line and exit status 2."""
        try:
            yield
        except CommandError as error:
            self.err.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
            raise typer.Exit(2) from None

    @contextmanager
    def loading(self, source: str | Path) -> Iterator[None]:
        """A spinner while a folder is loaded; for a model of the hub its own bars, which know the sizes."""
        if not Path(source).is_dir():
            if not looks_local(source):
                self.err.print(f"Loading {source} from the Hugging Face hub", markup=False, highlight=False)
            yield
            return
        with self.err.status(f"Loading {Path(source).resolve().name}"), _without_bars():
            yield

    def compare(self, loaded: Loaded, prompt: str, settings: Settings) -> None:
        """Run a comparison in sight and print what it found."""

        def streamed(name: str, most: int) -> Any:
            if not self.streams:
                return silent(name, most)
            self.out.rule(f"{loaded.name}, {name} cache", align="left")
            self.out.print(Text(prompt, style="bold"), end="", soft_wrap=True)
            return _TextPrinter(loaded.tokenizer, self.out)

        bars = []

        def silent(name: str, most: int) -> Any:
            bars.append(_TokenBar(f"{loaded.name}, {name} cache", most, self.err))
            return bars[-1]

        try:
            comparison = compare(loaded, prompt, settings, streamed=streamed, silent=silent)
        finally:
            for bar in bars:  # one may have been left by an exception, and it hides the cursor
                bar.end()
        self.comparisons.append(comparison)
        if not self.only_json:
            self.out.print()
            self.out.print(as_table(comparison))
            if settings.stock:
                self.out.print(verdict(comparison), soft_wrap=True)
            self.out.print()

    def speculate(self, loaded: Loaded, assistant: Any, prompts: list[str], settings: SpeculationSettings) -> None:
        """Run prompts with every drafter and print what they did."""
        inputs, title = encode(loaded, prompts), f"{loaded.name}, batch of {len(prompts)}"
        with self.err.status(title) as status, _without_bars():
            runs = speculate(loaded, assistant, inputs, settings, lambda drafter: status.update(f"{title}, {drafter}"))
        found = Speculation(loaded, prompts, settings, runs)
        self.speculations.append(found)
        if not self.only_json:
            self.out.print(speculation_as_table(found))
            self.out.print(speculation_verdict(found), soft_wrap=True)
            self.out.print()

    def show_check(self, found: Check) -> None:
        """Print what a check found; exit with 1 if the model is refused."""
        if self.only_json:
            typer.echo(json.dumps(check_as_json(found), indent=2))
        else:
            self.out.print(check_as_text(found), soft_wrap=True)
        if found.is_refused:
            raise typer.Exit(1)

    def finish(self) -> None:
        """Print the JSON if it is wanted; exit with 1 if tokens differ where they must not."""
        if self.only_json:
            records = [as_json(comparison) for comparison in self.comparisons]
            records += [speculation_as_json(speculation) for speculation in self.speculations]
            typer.echo(json.dumps(records, indent=2))
        elif self.speculations:
            self.out.print(speculation_note(self.speculations[0].settings))
        found: list[Comparison | Speculation] = [*self.comparisons, *self.speculations]
        if not all(one.is_right for one in found):
            raise typer.Exit(1)
