"""What a cell of the kernel benchmark has: the tuned eager baseline and replay steps of one model at one batch size."""

import functools
import gc
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from replay_transformers.cursor import WRITE_THROUGH_BYTES
from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.formats import FORMATS, Format

from . import operators
from .checks import check_eager, check_replay, check_update
from .eager import EAGER, tiles, update_all
from .precision_grid import Setting
from .profiles import calls_profile
from .timing import Timing, cache_bytes, measure

PAST_THE_CACHE = 4  # how many times the L2 cache the layers' states take together
MOST_LAYERS = 512
SWEEP_MS, FINAL_MS = 40.0, 200.0

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is the same in all cells.

    Args:
        implementation: module of each operator's folder that has `replay_step`: "triton" or "reference".
        window: flush window.
        tokens: forward lengths of the replay step.
        precisions: of the state, and of the copy that is read.
        ceiling: bytes per second of the fastest read.
        activations: dtype of the inputs.
        time_steps: the shortest and the longest.
        profiled: record the time of a plain step and of a flush by kernel as well.
    """

    implementation: str
    window: int
    tokens: tuple[int, ...]
    precisions: tuple[Setting, ...]
    ceiling: float
    device: torch.device
    activations: torch.dtype = torch.bfloat16
    time_steps: tuple[float, float] = operators.TIME_STEPS
    profiled: bool = False

    @property
    def steps(self) -> dict[str, tuple[int, Setting]]:
        """Tokens and precision of every replay step by its name in the results: ``t1/float32/fp8``."""
        return {f"t{tokens}/{one.label}": (tokens, one) for one in self.precisions for tokens in self.tokens}


def measure_baseline(geometry: LayerGeometry, rows: int, settings: Settings) -> Record:
    """Check, then time, the tuned eager update. All numbers in microseconds; raises `WrongResultError`."""
    release()
    return {
        "kind": geometry.kind,
        "batch": rows,
        "window": settings.window,
        "read_ceiling_tb_s": round(settings.ceiling / 1e12, 3),
        "eager": _eager(geometry, rows, settings),
        "replay": {},
    }


def release() -> None:
    """Give the layers' memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def layer_count(geometry: LayerGeometry, rows: int, form: Format, device: torch.device, skipped: float = 0.0) -> int:
    """How many layers to rotate over, in whole cycles of phases where there are many.

    Args:
        form: of what a plain step reads. skipped: share of the heads that are not read.
    """
    state_bytes = (1 - skipped) * rows * geometry.heads * form.head_bytes(geometry.head_dim, geometry.state_dim)
    needed = max(2, math.ceil(PAST_THE_CACHE * cache_bytes(device) / max(1, state_bytes)))
    if rows < operators.PHASES and device.type == "cuda":
        needed = -(-needed // operators.PHASES) * operators.PHASES
    return min(needed, MOST_LAYERS)


def _eager(geometry: LayerGeometry, rows: int, settings: Settings) -> Record:
    operator, device = EAGER[geometry.kind], settings.device
    count = layer_count(geometry, rows, FORMATS["float32"], device)
    layers = [operators.eager_layer(geometry, rows, settings.activations, device) for _ in range(count)]
    sweep = {tile: measure(update_all(operator, tile, layers), device, SWEEP_MS).p50 for tile in tiles(geometry)}
    best = min(sweep, key=sweep.__getitem__)
    check_eager(operator, best, layers[0])
    timing = measure(update_all(operator, best, layers), device, FINAL_MS)
    traffic = 2 * layers[0]["state"].nbytes
    return {
        **timing.to_dict(),
        "tile": {"rows": best.rows, "warps": best.warps},
        "tried": len(sweep),
        "share_of_ceiling": _share(traffic, timing, settings),
    }


def _share(traffic: float, timing: Timing, settings: Settings) -> float:
    return round(traffic / (timing.p50 * 1e-6) / settings.ceiling, 4)


def measure_step(geometry: LayerGeometry, rows: int, tokens: int, precision: Setting, settings: Settings) -> Record:
    """Check, then time, the replay step. All numbers in microseconds; raises `WrongResultError`."""
    release()
    folder = f"replay_transformers.kernels.{geometry.kind}"
    kernel = importlib.import_module(f"{folder}.{settings.implementation}").replay_step
    step = functools.partial(kernel, max_records=settings.window)  # as the layers call it
    reference = importlib.import_module(f"{folder}.reference").replay_step
    device, window = settings.device, settings.window
    cursors = _cursors(rows, tokens, window, device)
    layers = _layers(geometry, rows, tokens, precision, settings, cursors["plain"][0])
    skipped = mean_skipped(layers, cursors["plain"])
    timings = {}
    for name, places in cursors.items():
        check_replay(f"{name}, T = {tokens}, {precision.label}", step, reference, layers[0], places[0])
        timings[name] = measure(rotated_steps(step, layers, places), device, FINAL_MS)
    if tokens == 1 and settings.implementation == "triton" and _is_written_through(geometry, rows, precision):
        update = importlib.import_module(f"{folder}.update").update
        check_update(geometry.kind, update, layers[0])
        calls = [functools.partial(update, *layer.operands, state=layer.states["state"]) for layer in layers]
        timings["update"] = measure(calls, device, FINAL_MS)
    form = FORMATS[precision.read]
    unread = skipped * rows * geometry.heads * form.head_bytes(geometry.head_dim, geometry.state_dim)
    traffic = sum(operators.plain_bytes(geometry, rows, tokens, window // 2, form)) - round(unread)
    record: Record = {
        **{name: timing.to_dict() for name, timing in timings.items()},
        "amortised": round(((window - 1) * timings["plain"].p50 + timings["flush"].p50) / window, 3),
        "layers": len(layers),
        "plain_bytes": traffic,
        "share_of_ceiling": _share(traffic, timings["plain"], settings),
    }
    if settings.profiled:
        profiled = {name: rotated_steps(step, layers, cursors[name]) for name in ("plain", "flush")}
        record["profile_us"] = {name: calls_profile(calls) for name, calls in profiled.items()}
    if precision.decay_skip:
        record["skipped"] = round(skipped, 4)
        record["time_steps"] = list(settings.time_steps)
    return record


def _is_written_through(geometry: LayerGeometry, rows: int, precision: Setting) -> bool:
    """Whether a cache would update the state eagerly, as `Cursor` decides it."""
    head_bytes = FORMATS[precision.checkpoint].head_bytes(geometry.head_dim, geometry.state_dim)
    return precision.config("auto").is_plain and rows * geometry.heads * head_bytes <= WRITE_THROUGH_BYTES


def _cursors(rows: int, tokens: int, window: int, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Cursors by the name of the timing, over which the layers rotate."""
    middle = torch.full((rows,), window // 2, device=device)
    full = torch.full((rows,), window, device=device)
    cursors = {
        "plain": [operators.cursor(middle, None)],
        "plain_with_folds": [operators.cursor(middle, torch.zeros_like(middle))],
        "flush": [operators.cursor(full, full)],
    }
    if tokens == 1:
        cursors["spread"] = operators.spread_cursors(rows, window, device)
    return cursors


def _layers(
    geometry: LayerGeometry, rows: int, tokens: int, precision: Setting, settings: Settings, plain: dict[str, Any]
) -> list[operators.ReplayLayer]:
    """As many as it takes that what plain steps read does not stay in the L2 cache."""
    capacity, device = operators.ring_capacity(settings.window, tokens), settings.device
    make = functools.partial(
        operators.replay_layer, geometry, rows, tokens, capacity=capacity, dtype=settings.activations,
        precision=precision, device=device, time_steps=settings.time_steps,
    )  # fmt: skip
    layers = [make(), make()]
    count = layer_count(geometry, rows, FORMATS[precision.read], device, mean_skipped(layers, [plain]))
    return layers + [make() for _ in range(count - len(layers))]


def mean_skipped(layers: list[operators.ReplayLayer], cursors: list[dict[str, Any]]) -> float:
    """Share of (row, head) whose state is not read in `rotated_steps`, which none of these cursors folds."""
    shares = [operators.skipped_share(*pair) for pair in zip(layers, itertools.cycle(cursors), strict=False)]
    return sum(shares) / len(shares)


def rotated_steps(
    step: Callable[..., Any], layers: list[operators.ReplayLayer], cursors: list[dict[str, Any]]
) -> list[Callable[[], Any]]:
    """One call per layer, with the cursors in turn."""
    return [
        functools.partial(step, *layer.operands, **layer.buffers, **layer.settings, **places)
        for layer, places in zip(layers, itertools.cycle(cursors), strict=False)
    ]
