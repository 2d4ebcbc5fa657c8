"""Which launch configuration is the fastest for an operator, a geometry, a batch size and a number of tokens."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.launch import choose, override
from replay_transformers.kernels.launch_table import Entry, Launch
from replay_transformers.kernels.validation import power_of_two

from .checks import WrongResultError
from .timing import Timing, measure
from .workloads import Settings, Workload, make_workload

Timer = Callable[..., Timing]

# `tokens` of an entry -> tokens of the step that is timed for it
TOKENS = {"1": 1, "2-8": 4}
CONVOLUTION = "causal_conv"
BLOCKS = {"mamba2": (4, 8, 16, 32), "gated_delta": (16, 32, 64, 128), CONVOLUTION: (128, 256, 512, 1024)}
SHARES = (1, 2, 4, 8, 16)
WARPS = (1, 2, 4)
# of a program's block per thread; Gated DeltaNet streams it, the others keep it in registers
FEWEST_VALUES, MOST_VALUES = 4, {"mamba2": 128, "gated_delta": 512, CONVOLUTION: 128}
SWEEP_MS = 15.0


@dataclass(frozen=True)
class Case:
    """What one entry of the table is about.

    Args:
        operator: "mamba2", "gated_delta" or "causal_conv".
        rows: the batch size.
        bucket: a key of `TOKENS`.
    """

    operator: str
    geometry: LayerGeometry
    rows: int
    bucket: str

    def __str__(self) -> str:
        shape = f"{self.geometry.conv_dim}"
        if self.operator != CONVOLUTION:
            shape = f"{self.geometry.heads}x{self.geometry.head_dim}x{self.geometry.state_dim}"
        return f"{self.operator} {shape}, batch {self.rows}, tokens {self.bucket}"

    @property
    def tokens(self) -> int:
        """Of the step that is timed."""
        return TOKENS[self.bucket]

    @property
    def size(self) -> int:
        """Rows times heads, or times channels."""
        return self.rows * (self.geometry.conv_dim if self.operator == CONVOLUTION else self.geometry.heads)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a head; the convolution has none."""
        return (0, 0) if self.operator == CONVOLUTION else (self.geometry.head_dim, self.geometry.state_dim)

    def usual(self, device: torch.device) -> Launch:
        """What the tables in force say."""
        return choose(self.operator, device, self.size, self.tokens, *self.shape)

    def entry(self, gpu: str, launch: Launch) -> Entry:
        """The line of the table."""
        return Entry(gpu, self.operator, *self.shape, self.bucket, self.size, launch)


@dataclass
class Outcome:
    """Medians in microseconds by configuration, and why some have none."""

    usual: Launch
    times: dict[Launch, float] = field(default_factory=dict)
    refused: dict[Launch, str] = field(default_factory=dict)
    wrong: dict[Launch, str] = field(default_factory=dict)

    @property
    def best(self) -> Launch:
        """The fastest."""
        return min(self.times, key=self.times.__getitem__)


def cases(geometries: Iterable[LayerGeometry], batches: Iterable[int]) -> list[Case]:
    """Every operator of these layers, twice the same left out."""
    batches = list(batches)
    every = [
        Case(operator, geometry, rows, bucket)
        for geometry in geometries
        for operator in (geometry.kind, CONVOLUTION)
        for bucket in TOKENS
        for rows in batches
    ]
    return list({case.entry("", Launch(1, 1)).place: case for case in every}.values())


def condense(entries: Iterable[Entry]) -> list[Entry]:
    """Without the entries that say the same as the one below them, which holds for their sizes then."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.place):
        is_first = not kept or kept[-1].place[:-1] != entry.place[:-1]
        if is_first or kept[-1].launch != entry.launch:
            kept.append(entry)
    return kept


def of_prepare(case: Case, start: Launch) -> list[Launch]:
    """Configurations that differ from ``start`` in the prepare kernel, up to a whole group per program."""
    if case.operator == CONVOLUTION:
        return []
    group = case.geometry.heads // case.geometry.groups
    return [
        dataclasses.replace(start, share=share, share_warps=warps)
        for share in SHARES
        for warps in WARPS
        if share < 2 * group
    ]


def of_step(case: Case, start: Launch) -> list[Launch]:
    """Configurations that differ from ``start`` in the step kernel (the convolution has no other)."""
    if case.operator == CONVOLUTION:
        widest, values = case.geometry.conv_dim, 1
    else:
        widest, values = case.shape
    return [
        dataclasses.replace(start, block=block, warps=warps)
        for block in BLOCKS[case.operator]
        for warps in WARPS
        if block <= power_of_two(widest)
        and FEWEST_VALUES <= block * values / (32 * warps) <= MOST_VALUES[case.operator]
    ]


def candidates(case: Case, device: torch.device) -> list[Launch]:
    """Enough configurations that every kernel of the search is compiled."""
    usual = case.usual(device)
    return list(dict.fromkeys([usual, *of_prepare(case, usual), *of_step(case, usual)]))


def tune(case: Case, settings: Settings, timer: Timer = measure) -> Outcome:
    """Check and time: the usual configuration first, then the prepare kernel, then the step kernel.

    Raises:
        RuntimeError: no configuration runs; says why.
    """
    workload = make_workload(case.operator, case.geometry, case.rows, case.tokens, settings)
    outcome = Outcome(case.usual(settings.device))
    start = outcome.usual
    for stage in (lambda *_: [outcome.usual], of_prepare, of_step):
        for launch in stage(case, start):
            if launch not in outcome.times:
                _try(case.operator, launch, workload, outcome, settings.device, timer)
        start = min(outcome.times, key=outcome.times.__getitem__, default=start)
    if not outcome.times:
        reasons = [*outcome.wrong.values(), *outcome.refused.values()]
        raise RuntimeError(f"{case}: no configuration runs; the first one: {reasons[0]}")
    return outcome


def _try(
    operator: str, launch: Launch, workload: Workload, outcome: Outcome, device: torch.device, timer: Timer
) -> None:
    try:
        with override(operator, launch):
            workload.check()
            time = timer(workload.calls, device, SWEEP_MS).p50
    except WrongResultError as error:
        outcome.wrong[launch] = str(error)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # too much shared memory, too many registers: whatever the compiler says
        outcome.refused[launch] = f"{type(error).__name__}: {error}"
    else:
        outcome.times[launch] = time


def compile_one(case: Case, launch: Launch, settings: Settings) -> None:
    """Compile what ``launch`` needs into Triton's cache on disk; run in a process of its own, for two rows."""
    workload = make_workload(case.operator, case.geometry, 2, case.tokens, settings, copies=1)
    try:
        with override(case.operator, launch):
            workload.calls[0]()
    except Exception:
        return  # `tune` meets it again and says so
