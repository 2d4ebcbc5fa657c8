"""One cell of the kernel benchmark: the tuned eager baseline and every replay step of one model at one batch size."""

import functools
import gc
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from replay_transformers.cursor import WRITE_THROUGH_BYTES
from replay_transformers.geometry import LayerGeometry

from . import operators
from .checks import check_eager, check_replay, check_update
from .eager import EAGER, tiles, update_all
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
        checkpoints: names of the checkpoint's dtypes.
        ceiling: bytes per second of the fastest read.
        activations: dtype of the inputs.
        skip_replay: measure the baseline only.
    """

    implementation: str
    window: int
    tokens: tuple[int, ...]
    checkpoints: tuple[str, ...]
    ceiling: float
    device: torch.device
    activations: torch.dtype = torch.bfloat16
    skip_replay: bool = False


def measure_cell(geometry: LayerGeometry, rows: int, settings: Settings) -> Record:
    """Check, then time. All numbers in microseconds; raises `WrongResultError` if a result is wrong."""
    record: Record = {
        "kind": geometry.kind,
        "batch": rows,
        "window": settings.window,
        "read_ceiling_tb_s": round(settings.ceiling / 1e12, 3),
        "eager": _eager(geometry, rows, settings),
        "replay": {},
    }
    for checkpoint in () if settings.skip_replay else settings.checkpoints:
        for tokens in settings.tokens:
            release()
            record["replay"][f"t{tokens}/{checkpoint}"] = _replay(geometry, rows, tokens, checkpoint, settings)
    release()
    return record


def release() -> None:
    """Give the layers' memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def layer_count(geometry: LayerGeometry, rows: int, itemsize: int, device: torch.device) -> int:
    """How many layers to rotate over, in whole cycles of phases where there are many."""
    state_bytes = rows * geometry.heads * geometry.head_dim * geometry.state_dim * itemsize
    needed = max(2, -(-PAST_THE_CACHE * cache_bytes(device) // state_bytes))
    if rows < operators.PHASES and device.type == "cuda":
        needed = -(-needed // operators.PHASES) * operators.PHASES
    return min(needed, MOST_LAYERS)


def _eager(geometry: LayerGeometry, rows: int, settings: Settings) -> Record:
    operator, device = EAGER[geometry.kind], settings.device
    count = layer_count(geometry, rows, torch.float32.itemsize, device)
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


def _share(traffic: int, timing: Timing, settings: Settings) -> float:
    return round(traffic / (timing.p50 * 1e-6) / settings.ceiling, 4)


def _replay(geometry: LayerGeometry, rows: int, tokens: int, checkpoint: str, settings: Settings) -> Record:
    folder = f"replay_transformers.kernels.{geometry.kind}"
    kernel = importlib.import_module(f"{folder}.{settings.implementation}").replay_step
    step = functools.partial(kernel, max_records=settings.window)  # as the layers call it
    reference = importlib.import_module(f"{folder}.reference").replay_step
    device, window, dtype = settings.device, settings.window, getattr(torch, checkpoint)
    capacity = operators.ring_capacity(window, tokens)
    layers = [
        operators.replay_layer(
            geometry, rows, tokens, capacity=capacity, dtype=settings.activations, state_dtype=dtype, device=device
        )
        for _ in range(layer_count(geometry, rows, dtype.itemsize, device))
    ]
    middle = torch.full((rows,), window // 2, device=device)
    full = torch.full((rows,), window, device=device)
    cursors = {
        "plain": [operators.cursor(middle, None)],
        "plain_with_folds": [operators.cursor(middle, torch.zeros_like(middle))],
        "flush": [operators.cursor(full, full)],
    }
    if tokens == 1:
        cursors["spread"] = operators.spread_cursors(rows, window, device)
    timings = {}
    for name, places in cursors.items():
        check_replay(f"{name}, T = {tokens}, {checkpoint}", step, reference, layers[0], places[0])
        timings[name] = measure(rotated_steps(step, layers, places), device, FINAL_MS)
    is_written_through = tokens == 1 and layers[0].buffers["state"].nbytes <= WRITE_THROUGH_BYTES
    if is_written_through and settings.implementation == "triton":
        update = importlib.import_module(f"{folder}.update").update
        check_update(geometry.kind, update, layers[0])
        calls = [functools.partial(update, *layer.operands, state=layer.buffers["state"]) for layer in layers]
        timings["update"] = measure(calls, device, FINAL_MS)
    traffic = operators.plain_traffic(geometry, rows, tokens, window // 2, dtype.itemsize)
    return {
        **{name: timing.to_dict() for name, timing in timings.items()},
        "amortised": round(((window - 1) * timings["plain"].p50 + timings["flush"].p50) / window, 3),
        "share_of_ceiling": _share(traffic, timings["plain"], settings),
    }


def rotated_steps(
    step: Callable[..., Any], layers: list[operators.ReplayLayer], cursors: list[dict[str, Any]]
) -> list[Callable[[], Any]]:
    """One call per layer, with the cursors in turn."""
    return [
        functools.partial(step, *layer.operands, **layer.buffers, **places)
        for layer, places in zip(layers, itertools.cycle(cursors), strict=False)
    ]
