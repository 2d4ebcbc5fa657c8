"""Times of GPU calls: CUDA graphs over many buffers, replayed without a gap, with events between the replays.

On a CPU the calls are run one by one and timed by the clock, which is only good for trying the scripts.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[], object]

WARM_UP_CALLS = 2
SHORTEST_REPLAY_MS = 1.0  # an event costs about a microsecond
FEWEST_SAMPLES, MOST_SAMPLES = 10, 200


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the 20th percentile, the median and the 80th percentile."""

    p20: float
    p50: float
    p80: float

    def to_dict(self) -> dict[str, float]:
        """As plain numbers for JSON."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the two nearest samples."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def summarise(samples: Sequence[float]) -> Timing:
    """Percentiles of samples in microseconds per call."""
    return Timing(*(quantile(samples, fraction) for fraction in (0.2, 0.5, 0.8)))


def measure(calls: Sequence[Call], device: torch.device, budget_ms: float = 200.0) -> Timing:
    """Time per call.

    Args:
        calls: run in turn; give them enough distinct buffers that nothing is served from a cache.
        budget_ms: about how long the measurement may run, compilation and warm-up not counted.
    """
    if device.type != "cuda":
        return summarise([_clock(call) for call in calls])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:WARM_UP_CALLS]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    replay_ms = quantile(_replays(graph, 1, samples=3), 0.5)
    repeats = max(1, math.ceil(SHORTEST_REPLAY_MS / replay_ms))
    samples = min(MOST_SAMPLES, max(FEWEST_SAMPLES, int(budget_ms / (replay_ms * repeats))))
    per_replay = _replays(graph, repeats, samples)
    graph.reset()
    return summarise([1e3 * ms / (repeats * len(calls)) for ms in per_replay])


def _replays(graph: "torch.cuda.CUDAGraph", repeats: int, samples: int) -> list[float]:
    """Milliseconds of each sample of ``repeats`` replays. All are queued at once: the GPU never waits for the host."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    for _ in range(repeats):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        for _ in range(repeats):
            graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in itertools.pairwise(events)]


def _clock(call: Call) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def cache_bytes(device: torch.device) -> int:
    """The GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def synchronise(devices: Sequence[torch.device]) -> None:
    """Wait for the GPUs among the devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def reset_peaks(devices: Sequence[torch.device]) -> None:
    """From now on `peak_memory` counts anew."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory(devices: Sequence[torch.device]) -> dict[str, Any]:
    """The most memory that tensors took since peaks were last reset: ``peak_gib``, 0 on a CPU.

    Of several GPUs it is the fullest one's, and ``peak_gib_by_gpu`` is that of each.
    """
    each = [
        round(torch.cuda.max_memory_allocated(device) / 2**30, 4) if device.type == "cuda" else 0.0
        for device in devices
    ]
    return {"peak_gib": max(each)} | ({"peak_gib_by_gpu": each} if len(each) > 1 else {})


def read_ceiling(device: torch.device, gigabytes: float = 4.0) -> float:
    """The fastest read there is, in bytes per second: the sum of a tensor of several GB, the better of three runs."""
    values = torch.randn(int(gigabytes * 1e9 / 4), device=device)
    best = min(measure([values.sum], device).p50 for _ in range(3))
    return values.nbytes / best * 1e6
