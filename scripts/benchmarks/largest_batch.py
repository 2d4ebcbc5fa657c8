"""The largest batch whose `generate` fits the GPU: doubled until it does not, then bisected."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .generate_cells import (
    Cell,
    Expected,
    Settings,
    checked_rows,
    clean_up,
    expected_output,
    generate_arguments,
    is_out_of_memory,
    logit_error,
    on_several,
    patches,
    prompt_ids,
    step_times,
)
from .generate_steps import StepRecorder, run_generate
from .several_gpus import devices_of
from .timing import peak_memory, reset_peaks

MULTIPLE = 8  # of every batch that is tried
MOST_ROWS = 1 << 16
UNFINISHED = "searching"

Record = dict[str, Any]
Tried = dict[str, Record | None]  # by batch size: times where it fits, None where it does not


@dataclass(frozen=True)
class LargestBatch(Cell):
    """A configuration whose largest batch is looked for, beginning at ``batch``."""

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.preset.name}/{self.label}/largest/p{self.prompt}{on_several(self.gpus)}"


def next_batch(tried: Tried, start: int) -> int | None:
    """What to try next; None if the largest batch is known."""
    if not tried:
        return max(MULTIPLE, start // MULTIPLE * MULTIPLE)
    fits = max((int(batch) for batch, times in tried.items() if times), default=0)
    fails = min((int(batch) for batch, times in tried.items() if not times), default=None)
    if fails is None:
        return 2 * fits if fits < MOST_ROWS else None
    middle = (fits + fails) // 2 // MULTIPLE * MULTIPLE
    return middle if middle > fits else None


def search(
    model: Any,
    cell: LargestBatch,
    settings: Settings,
    earlier: Record | None,
    save: Callable[[Record], None],
    has_room: Callable[[], bool],
) -> None:
    """Try batches until the largest is known, the time is up or logits are wrong.

    Args:
        earlier: what an unfinished search has saved.
        save: is given the record after every try; its status is `UNFINISHED` but for the last one.
        has_room: whether the time allows another try.
    """
    tried: Tried = dict(earlier["tried"]) if earlier else {}
    expected: Expected | None = None
    while (batch := next_batch(tried, cell.batch)) is not None:
        if not has_room():
            return
        if expected is None:
            expected = expected_output(model, MULTIPLE, cell.prompt, settings.checked)
        times = tried[str(batch)] = attempt(model, cell, batch, settings, expected)
        if times and not times["logit_error"] <= settings.tolerance:
            save({**_record(cell, tried), "status": f"wrong: logits differ by {times['logit_error']:.0%}"})
            return
        save(_record(cell, tried))
    record = _record(cell, tried)
    save({**record, "status": "measured" if record["batch"] else "does not fit"})


def _record(cell: LargestBatch, tried: Tried) -> Record:
    best = max((int(batch) for batch, times in tried.items() if times), default=0)
    return {
        "preset": cell.preset.name,
        "configuration": cell.label,
        "batch": best,
        "prompt": cell.prompt,
        "gpus": cell.gpus,
        "status": UNFINISHED,
        "tried": tried,
        **(tried.get(str(best)) or {}),
    }


def attempt(model: Any, cell: LargestBatch, batch: int, settings: Settings, expected: Expected) -> Record | None:
    """Logits' error and times of a batch; None if it does not fit.

    Args:
        expected: of the `MULTIPLE` prompts that all rows have while logits are compared; those that are timed differ.
    """
    record = None
    try:
        with patches(cell):
            record = _attempt(model, cell, batch, settings, expected)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    clean_up(model)
    return record


def _attempt(model: Any, cell: LargestBatch, batch: int, settings: Settings, expected: Expected) -> Record:
    device, devices, arguments = model.device, devices_of(model), generate_arguments(cell, settings)
    reset_peaks(devices)
    alike = torch.arange(batch, device=device) % MULTIPLE
    checker = StepRecorder(device, checked_rows(batch), expected.tokens[alike])
    ids = prompt_ids(model, MULTIPLE, cell.prompt)[alike]
    first_call, _ = run_generate(model, ids, settings.checked, checker, **arguments)
    error = logit_error(torch.stack(checker.logits), expected.logits)
    recorder = StepRecorder(device)
    run_generate(model, prompt_ids(model, batch, cell.prompt), settings.long, recorder, **arguments)
    times = step_times(recorder, settings)
    return {
        "first_call_s": round(first_call, 3),
        "logit_error": round(error, 4),
        **{name: round(value, 4) for name, value in times.items()},
        "tokens_per_s": round(1e3 * batch / times["step_ms"], 2),
        **peak_memory(devices),
    }
