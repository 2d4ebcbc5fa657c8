"""What drafters did, as a table and as JSON."""

from typing import Any

from rich.table import Table
from rich.text import Text

from replay_transformers.cli.speculation import PLAIN, DraftRun, Speculation, SpeculationSettings

__all__ = ["speculation_as_json", "speculation_as_table", "speculation_note", "speculation_verdict"]

NOTE = (
    "Tokens per forward: by how many tokens a row grows in one forward of the model, without the forward over the "
    "prompt; plain decoding has 1. Accepted: share of the drafted tokens. Time: whole runs, drafter included{rounds}. "
    "Equal: to greedy decoding with the stock cache."
)
ADAPTIVE = (
    "Here every draft has its full length. By default (--draft-length adaptive) generate drafts as many tokens as pay, "
    "and none where drafts do not."
)
GAIN = 1.05  # speed-ups below this are noise


def speculation_as_table(speculation: Speculation) -> Table:
    """A row per drafter."""
    table = Table(title=_title(speculation), title_justify="left", title_style="bold")
    table.add_column("drafter")
    for name in ("tokens per\nforward", "accepted", "time", "speed-up\nover plain", "equal"):
        table.add_column(name, justify="right", vertical="bottom")
    for name, run in speculation.runs.items():
        if run.refusal is not None:
            table.add_row(name, *["-"] * 4, "not run")
            continue
        table.add_row(
            name,
            f"{run.tokens_per_forward:.2f}",
            "-" if run.acceptance is None else f"{run.acceptance:.0%}",
            f"{run.median_seconds:.2f} s",
            "" if name == PLAIN else f"{speculation.speed_up(name):.2f}",
            "yes" if run.is_equal else "no",
        )
    return table


def speculation_note(settings: SpeculationSettings) -> Text:
    """What the columns mean."""
    notes = [NOTE.format(rounds=f", median of {settings.rounds}" if settings.rounds > 1 else "")]
    notes += [ADAPTIVE] if settings.length == "fixed" else []
    return Text(" ".join(notes), style="dim")


def _title(speculation: Speculation) -> str:
    loaded, settings = speculation.loaded, speculation.settings
    rows = len(speculation.prompts)
    padded = ", padded on the left" if rows > 1 else ""
    return (
        f"{loaded.name}, {loaded.dtype} on {loaded.model.device.type}, {settings.cache}, batch of {rows}{padded}, "
        f"up to {settings.drafts} drafts"
    )


def speculation_verdict(speculation: Speculation) -> Text:
    """Whether the tokens are equal, and which drafters pay."""
    run = {name: run for name, run in speculation.runs.items() if run.refusal is None}
    wrong = [name for name in run if not run[name].is_equal]
    text = Text.assemble(("tokens equal: yes", "bold green"), f" ({', '.join(run)})")
    if wrong:
        text = Text.assemble(("tokens equal: no", "bold red"), f" ({', '.join(wrong)})")
        if speculation.loaded.dtype != "float32":
            text.append(
                f". In {speculation.loaded.dtype} two best tokens may be equal up to rounding: no error by itself"
            )
    drafters = [name for name in run if name != PLAIN]
    best = max(drafters, key=speculation.speed_up, default=None)
    if best is not None and speculation.speed_up(best) >= GAIN:
        text.append(f". Fastest: {best}, {speculation.speed_up(best):.2f} times as fast as plain decoding")
    slower = [name for name in drafters if speculation.speed_up(name) < GAIN]
    if slower:
        text.append(f". No gain with {' and '.join(slower)}: {_reason(speculation)}")
    text.append(".")
    for name, other in speculation.runs.items():
        if other.refusal is not None:
            text.append(f"\n{name} was not run: {other.refusal}")
    return text


def _reason(speculation: Speculation) -> str:
    if speculation.loaded.model.device.type == "cpu":
        return (
            "on a CPU a forward takes longer the more tokens it has, and next to a model as small as this one a "
            "drafter is not cheap"
        )
    return "too few of its drafts are accepted for the time that they take"


def speculation_as_json(speculation: Speculation) -> dict[str, Any]:
    """The runs as JSON values."""
    loaded, settings = speculation.loaded, speculation.settings
    return {
        "model": loaded.name,
        "dtype": loaded.dtype,
        "device": loaded.model.device.type,
        "prompts": speculation.prompts,
        "cache": settings.cache,
        "window": settings.window,
        "drafts": settings.drafts,
        "draft_length": settings.length,
        "drafters": {name: _record(speculation, name, run) for name, run in speculation.runs.items()},
    }


def _record(speculation: Speculation, name: str, run: DraftRun) -> dict[str, Any]:
    if run.refusal is not None:
        return {"refusal": run.refusal}
    return {
        "seconds": run.seconds,
        "speed_up": speculation.speed_up(name),
        "forwards": run.forwards,
        "tokens_per_forward": run.tokens_per_forward,
        "drafted": run.drafted,
        "accepted": run.accepted,
        "tokens_equal": run.is_equal,
    }
