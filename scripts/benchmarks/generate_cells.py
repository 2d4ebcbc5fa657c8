"""One cell of the generate benchmark: a model, a configuration, a batch size and a prompt length."""

import contextlib
import fnmatch
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers import cursor

from .generate_steps import StepRecorder, run_generate
from .precision_grid import Setting
from .presets import Preset
from .profiles import NAME_LENGTH, kernel_times, step_profile
from .several_gpus import devices_of
from .stock import require_kernel
from .timing import peak_memory, quantile, reset_peaks

# name -> arguments of `generate`. On a GPU transformers compiles the fixed ones by itself, with CUDA graphs.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "replay": {"cache_implementation": "replay"},
    "replay_static": {"cache_implementation": "replay_static"},
    # graphs recorded as they are, without inductor: a quicker first call, unfused pointwise operations
    "replay_static_graphs": {
        "cache_implementation": "replay_static",
        "compile_config": CompileConfig(backend="cudagraphs"),
    },
    # the same runner with an eager update of the state, or writing it at every step through the ring: what is left of
    # the gain is not the method's
    "replay_static_eager": {"cache_implementation": "replay_static"},
    "replay_static_window_1": {"cache_implementation": "replay_static", "cache_config": {"window": 1}},
}
EAGER = "replay_static_eager"
STOCK = ("dynamic", "static")
HEAVIEST = 5
FIXED_SHAPES = tuple(name for name in CONFIGURATIONS if "static" in name)
SHAPES = ((1, 64), (8, 64), (32, 64), (256, 64), (8, 4096), (8, 32768))
PROFILED_TOKENS = (5, 21)  # new tokens of two calls, whose difference is a whole window of steps
MODEL_STATE = ("_compiled_call", "_last_compile_config", "_previous_max_cache_length")  # what `generate` leaves behind


FLOAT32 = Setting("float32")


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Args:
        gpus: that the model is spread over.
    """

    preset: Preset
    configuration: str
    batch: int
    prompt: int
    precision: Setting = FLOAT32
    gpus: int = 1

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.preset.name}/{self.label}/b{self.batch}/p{self.prompt}{on_several(self.gpus)}"

    @property
    def label(self) -> str:
        """The configuration, with the precision of a replay cache's state where that is not float32."""
        is_default = self.configuration in STOCK or self.precision == FLOAT32
        return self.configuration if is_default else f"{self.configuration}@{self.precision.label}"

    @property
    def facts(self) -> dict[str, Any]:
        """What its record begins with."""
        return {
            "preset": self.preset.name,
            "configuration": self.label,
            "batch": self.batch,
            "prompt": self.prompt,
            "gpus": self.gpus,
        }

    @property
    def cache_settings(self) -> dict[str, Any]:
        """Of the replay cache."""
        one = self.precision
        settings = {"checkpoint": one.checkpoint, "readout": one.readout, "decay_skip": one.decay_skip}
        return settings | {"max_draft": 0}  # what `generate` takes without a drafter


AnyCell = TypeVar("AnyCell", bound=Cell)


def on_several(gpus: int) -> str:
    """The end of a cell's key where the model is spread over several GPUs; nothing for one."""
    return f"/{gpus}gpus" if gpus > 1 else ""


@dataclass(frozen=True)
class Settings:
    """What is the same in all cells.

    Args:
        short, long: new tokens of the two timed calls; their difference is a multiple of the window, so that every
            phase of it counts alike.
        checked: tokens over which logits are compared with the dynamic cache's; more than a window.
        tolerance: largest error of the logits, relative to their spread. Rounding in bfloat16 makes up to 0.25 of it in
            a model of 32 layers with random weights; a lost state makes more than 1.
        check_kernels: profile stock and raise unless its fast kernels run.
        profiled: record the time of a decode step by kernel as well.
    """

    short: int = 17
    long: int = 81
    checked: int = 20
    tolerance: float = 0.5
    check_kernels: bool = True
    profiled: bool = False


@dataclass(frozen=True)
class Expected:
    """Greedy tokens of the dynamic cache ``[B, steps]``, and some rows' logits ``[steps, rows, vocabulary]``."""

    tokens: torch.Tensor
    logits: torch.Tensor


def all_cells(
    presets: list[Preset],
    shapes: list[tuple[int, int]],
    only: list[str] | None,
    precisions: Sequence[Setting] = (FLOAT32,),
    gpus: int = 1,
) -> list[Cell]:
    """Every combination that a pattern of ``only`` matches, all configurations of a shape next to each other."""
    cells = [
        Cell(preset, configuration, batch, prompt, precision, gpus)
        for preset in presets
        for batch, prompt in shapes
        for precision in precisions
        for configuration in CONFIGURATIONS
    ]
    return matching(cells, only)


def matching(cells: list[AnyCell], only: list[str] | None) -> list[AnyCell]:
    """The cells whose key a pattern of ``only`` matches, the first of each key; all without patterns."""
    named: dict[str, AnyCell] = {}
    for cell in cells:  # stock's do not depend on the precision of a replay cache, nor a search on where it begins
        named.setdefault(cell.key, cell)
    return [cell for key, cell in named.items() if not only or any(fnmatch.fnmatch(key, f"*{part}*") for part in only)]


def prompt_ids(model: Any, batch: int, length: int) -> torch.Tensor:
    """Random tokens, the same for every configuration."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, model.config.vocab_size, (batch, length), generator=generator)
    return ids.to(model.device)


def checked_rows(batch: int) -> list[int]:
    """The first and the last row."""
    return sorted({0, batch - 1})


def expected_output(model: Any, batch: int, prompt: int, steps: int, at_once: int | None = None) -> Expected:
    """What stock decoding with a dynamic cache gives, ``at_once`` rows at a time; patches must be off."""
    ids, checked, count = prompt_ids(model, batch, prompt), checked_rows(batch), at_once or batch
    tokens, logits = [], []
    for begin in range(0, batch, count):
        some = ids[begin : begin + count]
        rows = [row - begin for row in checked if begin <= row < begin + len(some)]
        recorder = StepRecorder(model.device, rows)
        _, output = run_generate(model, some, steps, recorder)
        tokens.append(output[:, prompt:].clone())
        logits.append(torch.stack(recorder.logits))
        clean_up(model)
    return Expected(torch.cat(tokens), torch.cat(logits, dim=1))


def measure_cell(model: Any, cell: Cell, settings: Settings, expected: Expected | None) -> dict[str, Any]:
    """Check, then time; what does not fit into memory says so in ``status``, and so does a failed check."""
    record: dict[str, Any] = {**cell.facts, "status": "measured"}
    if cell.configuration not in STOCK:
        record |= cell.cache_settings
    try:
        with patches(cell):
            record |= _measure(model, cell, settings, expected)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        record["status"] = "does not fit"
    clean_up(model)
    return record


def is_out_of_memory(error: BaseException) -> bool:
    """Also where the compiler wrapped the error in one of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def clean_up(model: Any) -> None:
    """Forget compiled code, graphs and caches."""
    for name in MODEL_STATE:
        model.__dict__.pop(name, None)
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def patches(cell: Cell) -> Iterator[None]:
    """Patches that are on within the block, unless the cell is stock's."""
    most = sys.maxsize if cell.configuration == EAGER else cursor.WRITE_THROUGH_BYTES
    with (
        contextlib.nullcontext() if cell.configuration in STOCK else rt.enable(),
        mock.patch.object(cursor, "WRITE_THROUGH_BYTES", most),
    ):
        yield


def generate_arguments(cell: Cell, settings: Settings) -> dict[str, Any]:
    """Of `generate`, for every call of a cell."""
    arguments = dict(CONFIGURATIONS[cell.configuration])
    if cell.configuration in FIXED_SHAPES:
        arguments["max_cache_len"] = cell.prompt + settings.long
    if cell.configuration not in STOCK:
        arguments["cache_config"] = {**cell.cache_settings, **arguments.get("cache_config", {})}
    return arguments


def _measure(model: Any, cell: Cell, settings: Settings, expected: Expected | None) -> dict[str, Any]:
    ids, arguments = prompt_ids(model, cell.batch, cell.prompt), generate_arguments(cell, settings)
    device, devices = model.device, devices_of(model)
    checker = StepRecorder(device, checked_rows(cell.batch), None if expected is None else expected.tokens)
    first_call, _ = run_generate(model, ids, settings.checked, checker, **arguments)
    record: dict[str, Any] = {"first_call_s": round(first_call, 3), "logit_error": None}
    if expected is not None:
        record["logit_error"] = round(logit_error(torch.stack(checker.logits), expected.logits), 4)
        if not record["logit_error"] <= settings.tolerance:
            return {**record, "status": f"wrong: logits differ by {record['logit_error']:.0%}"}
    if cell.configuration in STOCK and settings.check_kernels:
        calls = kernel_times(lambda: run_generate(model, ids, 4, StepRecorder(device), **arguments))
        if cell.configuration == "dynamic":
            require_kernel(model, calls)
        # compiled, transformers takes other paths of its own; what ran is written down
        heaviest = sorted(calls, key=calls.__getitem__, reverse=True)[:HEAVIEST]
        record["heaviest_kernels"] = [name[:NAME_LENGTH] for name in heaviest]
    run_generate(model, ids, settings.short, StepRecorder(device), **arguments)
    reset_peaks(devices)
    short, _ = run_generate(model, ids, settings.short, StepRecorder(device), **arguments)
    recorder = StepRecorder(device)
    long, _ = run_generate(model, ids, settings.long, recorder, **arguments)
    times = {
        **step_times(recorder, settings),
        "step_by_difference_ms": 1e3 * (long - short) / (settings.long - settings.short),
    }
    record |= {name: round(value, 4) for name, value in times.items()} | peak_memory(devices)
    if settings.profiled:
        record["profile_ms"] = step_profile(
            lambda count: run_generate(model, ids, count, StepRecorder(device), **arguments), *PROFILED_TOKENS
        )
    return record


def step_times(recorder: StepRecorder, settings: Settings) -> dict[str, float]:
    """Milliseconds of the longer call: its prompt, and its last steps, as many as it has more than the shorter one."""
    prefill, *steps = recorder.milliseconds()
    timed = steps[len(steps) - (settings.long - settings.short) :]
    return {
        "step_ms": sum(timed) / len(timed),
        "step_p50_ms": quantile(timed, 0.5),
        "step_p99_ms": quantile(timed, 0.99),
        "prefill_ms": prefill,
    }


def logit_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest step's error, relative to the spread of its logits: about 1.4 for unrelated ones."""
    centred = want - want.mean(-1, keepdim=True)
    error = (got - want).flatten(1).norm(dim=1) / centred.flatten(1).norm(dim=1)
    return float("inf") if torch.isnan(error).any() else float(error.max())
