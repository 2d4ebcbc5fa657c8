"""The largest batch whose `generate` fits the GPU, to one part in 32.

Looked for around a first guess, in steps that double until one batch fits and another does not, then bisected, since
every try compiles. For a replay cache the guess is what `replay-transformers check` predicts.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from replay_transformers import ReplayConfig
from replay_transformers.cli.check_memory import (
    Load,
    layer_footprints,
    meta_cache,
    predict_peak,
    uses_library,
    weight_bytes,
)
from replay_transformers.cli.check_places import Place, Places, largest_batch

from .generate_cells import (
    STOCK,
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
RESOLUTION = 32  # parts of a batch; also of the first guess, in the first step from it
CAREFUL = 0.98  # of what is predicted to fit
MOST_ROWS = 1 << 16
UNFINISHED = "searching"

Record = dict[str, Any]
Tried = dict[str, Record | None]  # by batch size: times where it fits, None where it does not


@dataclass(frozen=True)
class LargestBatch(Cell):
    """A configuration whose largest batch is looked for, beginning at ``batch`` where there is no prediction."""

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.preset.name}/{self.label}/largest/p{self.prompt}{on_several(self.gpus)}"


def next_batch(tried: Tried, start: int) -> int | None:
    """What to try next; None if the largest batch is known."""
    first = rounded(start)
    if not tried:
        return first
    fits = max((int(batch) for batch, times in tried.items() if times), default=0)
    fails = min((int(batch) for batch, times in tried.items() if not times), default=None)
    step = rounded(first // RESOLUTION) << (len(tried) - 1)
    if fails is None:
        return min(fits + step, MOST_ROWS) if fits < MOST_ROWS else None
    if not fits and fails - step >= MULTIPLE:
        return fails - step
    if fails - fits <= max(MULTIPLE, fits // RESOLUTION):
        return None
    return (fits + fails) // 2 // MULTIPLE * MULTIPLE


def rounded(batch: int) -> int:
    """Down to a batch that may be tried."""
    return max(MULTIPLE, batch // MULTIPLE * MULTIPLE)


def predicted(model: Any, cell: LargestBatch, settings: Settings) -> int | None:
    """What should just fit; None where there is no prediction: without a replay cache, or not on one GPU."""
    devices = devices_of(model)
    if cell.configuration in STOCK or len(devices) > 1 or devices[0].type != "cuda":
        return None
    config, length = ReplayConfig(**cell.cache_settings), cell.prompt + settings.long
    load = Load(config, length, cell.prompt, model.dtype)
    cache = meta_cache(model.config, load)
    load = replace(load, library=uses_library(cache, model.dtype))
    layers = len(model.base_model.layers)
    on_meta = cell.preset.build("meta", model.dtype, layers).eval()
    clean_up(model)
    memory = torch.cuda.mem_get_info(devices[0])[0] + torch.cuda.memory_reserved(devices[0])
    name = str(devices[0])
    place = Place(name, memory, weight_bytes(on_meta), list(range(layers)))
    places = Places({name: place}, [name] * layers, {"": name})
    peak = functools.cache(functools.partial(predict_peak, on_meta, load))
    found = largest_batch(places, layer_footprints(cache), peak)
    assert found is not None, "the memory is known"
    return rounded(int(CAREFUL * found))


def search(
    model: Any,
    cell: LargestBatch,
    settings: Settings,
    earlier: Record | None,
    save: Callable[[Record], None],
    has_room: Callable[[], bool],
    at_once: Callable[[int, int], int] = lambda batch, prompt: batch,
) -> None:
    """Try batches until the largest is known, the time is up or logits are wrong.

    Args:
        earlier: what an unfinished search has saved.
        save: is given the record after every try; its status is `UNFINISHED` but for the last one.
        has_room: whether the time allows another try.
        at_once: of so many rows with such prompts, how many stock takes; what it cannot take does not fit it.

    Raises:
        ValueError: stock cannot take a single one of the prompts, so that there is nothing to compare with.
    """
    if not at_once(1, cell.prompt):
        raise ValueError(f"prompts of {cell.prompt} tokens are too long for stock's scan: choose shorter ones")
    tried: Tried = dict(earlier["tried"]) if earlier else {}
    expected: Expected | None = None

    def is_refused(batch: int) -> bool:
        return cell.configuration in STOCK and at_once(batch, cell.prompt) < batch

    def record() -> Record:
        is_limited = any(is_refused(int(batch)) for batch in tried)
        return _record(cell, tried) | ({"limit": "stock's scan"} if is_limited else {})

    start = int(next(iter(tried))) if tried else predicted(model, cell, settings) or cell.batch
    while (batch := next_batch(tried, start)) is not None:
        if not has_room():
            return
        if is_refused(batch):
            tried[str(batch)] = None
            save(record())
            continue
        if expected is None:
            rows = at_once(MULTIPLE, cell.prompt)
            expected = expected_output(model, MULTIPLE, cell.prompt, settings.checked, rows)
        times = tried[str(batch)] = attempt(model, cell, batch, settings, expected)
        if times and not times["logit_error"] <= settings.tolerance:
            save(record() | {"status": f"wrong: logits differ by {times['logit_error']:.0%}"})
            return
        save(record())
    found = record()
    save({**found, "status": "measured" if found["batch"] else "does not fit"})


def _record(cell: LargestBatch, tried: Tried) -> Record:
    best = max((int(batch) for batch, times in tried.items() if times), default=0)
    return {
        **cell.facts,
        "batch": best,
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
