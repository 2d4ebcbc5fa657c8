"""What a comparison found, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from replay_transformers.cli.compare import Comparison, Run
from replay_transformers.traffic import KINDS, StepTraffic, mean_traffic, whole_windows

__all__ = ["as_json", "as_table", "verdict"]

NOTE = (
    "Bytes: what PyTorch's operators read and wrote of the cache's buffers in decode steps, counted while they ran; "
    "temporaries and attention's keys and values are not included. The mean is over {steps} steps, {windows}. "
    "Counted on plain PyTorch kernels, which read all slots of a ring, used or not, and in a flush the state more than "
    "once. "
    "Time: whole runs without the counting{rounds}."
)


def _columns(comparison: Comparison) -> list[tuple[str, Sequence[StepTraffic], StepTraffic | None]]:
    """Title, the steps counted, and their mean, for each column of the table."""
    columns: list[tuple[str, Sequence[StepTraffic], StepTraffic | None]] = []
    if "stock" in comparison.runs:
        steps: Sequence[StepTraffic] = comparison.runs["stock"].steps
        columns.append(("stock", steps, mean_traffic(steps)))
    steps = comparison.runs["replay"].steps
    plain = [step for step in steps if not step.wrote_state]
    flush = [step for step in steps if step.wrote_state]
    columns += [(title, part, mean_traffic(part)) for title, part in (("plain", plain), ("flush", flush))]
    return [*columns, ("mean", steps, mean_traffic(whole_windows(steps)))]


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def as_table(comparison: Comparison) -> Group:
    """The table of a comparison, with a note that says what was counted."""
    columns = _columns(comparison)
    table = Table(title=_title(comparison), title_justify="left", title_style="bold")
    table.add_column("bytes per decode step")
    for title, _, _ in columns:
        table.add_column(title if title == "stock" else f"replay\n{title}", justify="right", vertical="bottom")
    for kind in KINDS:
        for what in ("reads", "writes"):
            cells = [None if mean is None else getattr(mean, what)[kind] for _, _, mean in columns]
            table.add_row(f"{kind}, {what}", *map(_bytes, cells), end_section=what == "writes")
    table.add_row("all", *(_bytes(None if mean is None else mean.total) for _, _, mean in columns), end_section=True)
    table.add_row("decode steps counted", *(str(len(steps)) for _, steps, _ in columns))
    times = {"stock": comparison.runs.get("stock"), "mean": comparison.runs["replay"]}
    table.add_row("time of a run", *(_time(times.get(title)) for title, _, _ in columns))
    return Group(table, Text(_note(comparison), style="dim"))


def _note(comparison: Comparison) -> str:
    steps, rounds = comparison.runs["replay"].steps, comparison.settings.rounds
    whole = sum(step.wrote_state for step in steps) > 1
    return NOTE.format(
        steps=len(whole_windows(steps)),
        windows="from flush to flush" if whole else "too few for a whole window",
        rounds=f", median of {rounds}" if rounds > 1 else "",
    )


def _time(run: Run | None) -> str:
    return "" if run is None else f"{run.median_seconds:.2f} s"


def _title(comparison: Comparison) -> str:
    loaded, settings = comparison.loaded, comparison.settings
    title = f"{loaded.name}, {loaded.dtype} on {loaded.model.device.type}, {settings.cache}, window {settings.window}"
    return ", ".join([title, *(f"{name} {value}" for name, value in settings.precision.items())])


def verdict(comparison: Comparison) -> Text:
    """Whether the tokens are equal, and what it means if they are not."""
    stock, where = len(comparison.runs["stock"].tokens), comparison.first_difference
    if where is None:
        return Text.assemble(("tokens equal: yes", "bold green"), f" ({stock} of {stock}, greedy)")
    text = Text.assemble(("tokens equal: no", "bold red"), f" (the first difference is in new token {where + 1})")
    if comparison.settings.is_narrow:
        text.append(". With a state of another precision they may part; without these options they do not in float32.")
    elif comparison.loaded.dtype != "float32":
        text.append(
            f". In {comparison.loaded.dtype} the two best tokens are sometimes equal up to rounding, and the caches "
            "round differently, so this is no error by itself; --dtype float32 compares exactly."
        )
    return text


def as_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as JSON values."""
    loaded, settings = comparison.loaded, comparison.settings
    record: dict[str, Any] = {
        "model": loaded.name,
        "dtype": loaded.dtype,
        "device": loaded.model.device.type,
        "prompt": comparison.prompt,
        "cache": settings.cache,
        "window": settings.window,
        "precision": dict(settings.precision),
        "caches": {name: _run_record(comparison, name) for name in comparison.runs},
        "bytes_per_decode_step": {
            title if title == "stock" else f"replay_{title}": mean and {"reads": mean.reads, "writes": mean.writes}
            for title, _, mean in _columns(comparison)
        },
    }
    if "stock" in comparison.runs:
        record["tokens_equal"] = comparison.first_difference is None
        record["first_difference"] = comparison.first_difference
    return record


def _run_record(comparison: Comparison, name: str) -> dict[str, Any]:
    run = comparison.runs[name]
    return {
        "text": comparison.loaded.tokenizer.decode(run.tokens, skip_special_tokens=True),
        "new_tokens": run.tokens,
        "seconds": run.seconds,
        "decode_steps_counted": len(run.steps),
        "steps_that_wrote_the_state": sum(step.wrote_state for step in run.steps),
    }
