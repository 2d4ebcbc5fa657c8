"""Where a decode step's time goes: GPU time by kernel, from torch's profiler."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .timing import synchronise

NAME_LENGTH = 80


class KernelTimes:
    """Watches which kernels run; on a machine without a GPU which operators do."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        self.profiler = profile(activities=activities)

    def start(self) -> None:
        """What was launched before is not counted."""
        synchronise(self.gpus)
        self.profiler.start()

    def stop(self) -> Counter[str]:
        """Milliseconds by kernel since the start; by operator, on the CPU, without a GPU."""
        synchronise(self.gpus)
        self.profiler.stop()
        wanted = DeviceType.CUDA if self.on_gpu else DeviceType.CPU
        times: Counter[str] = Counter()
        for event in self.profiler.events() or ():
            if event.device_type == wanted:
                times[event.name] += (event.device_time if self.on_gpu else event.self_cpu_time_total) / 1e3
        return times


def kernel_times(call: Callable[[], object]) -> Counter[str]:
    """Milliseconds by kernel of one call; on a machine without a GPU by operator, on the CPU."""
    watch = KernelTimes()
    watch.start()
    call()
    return watch.stop()


def step_profile(generate: Callable[[int], object], short: int, long: int, most: int = 16) -> dict[str, float]:
    """Milliseconds of a decode step by kernel, the largest first, and of all others together.

    Args:
        generate: makes so many new tokens. short, long: of the two calls whose difference is decoding alone.
        most: kernels that are named.
    """
    times = kernel_times(lambda: generate(long))
    times.subtract(kernel_times(lambda: generate(short)))
    return heaviest(times, long - short, most)


def heaviest(times: Counter[str], steps: int, most: int = 16) -> dict[str, float]:
    """Milliseconds of one of so many steps by kernel, the largest first, and of all others together."""
    shortened: Counter[str] = Counter()
    for name, ms in times.items():
        shortened[name[:NAME_LENGTH]] += ms
    per_step = sorted(((ms / steps, name) for name, ms in shortened.items() if ms > 0), reverse=True)
    named = {name: round(ms, 4) for ms, name in per_step[:most]}
    return {**named, "all others": round(sum(ms for ms, _ in per_step[most:]), 4)}


def calls_profile(calls: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Microseconds of a call by kernel, the largest first; one by one, so without what overlaps in a graph."""

    def all_of_them() -> None:
        for call in calls:
            call()

    all_of_them()
    times = kernel_times(all_of_them)
    return {name[:NAME_LENGTH]: round(1e3 * ms / len(calls), 3) for name, ms in times.most_common() if ms > 0}
