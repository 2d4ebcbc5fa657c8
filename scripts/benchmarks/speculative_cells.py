"""One cell of the speculation benchmark: a model, a method, a batch size, a number of tokens per forward."""

import fnmatch
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import CompileConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import replay_transformers as rt
from replay_transformers.generation.draft_length import DraftLength
from replay_transformers.generation.rows import Rows
from replay_transformers.patches.capture import with_own_backend
from replay_transformers.patches.row_models import ReplayRows

from .generate_cells import checked_rows, is_out_of_memory, logit_error, on_several, prompt_ids
from .generate_steps import run_generate
from .presets import Preset
from .profiles import KernelTimes, heaviest
from .several_gpus import devices_of, is_spread, prepare
from .speculative_chance import ChanceDrafter, ChanceLoop, ChanceText
from .speculative_loop import KnownDrafter, KnownLoop, KnownText, RoundRecorder, SnapshotRows
from .timing import peak_memory, summarise

# replay: rejected drafts are forgotten by moving a pointer. snapshots: the state is copied, and copied back.
# plain: the same loop without drafts. generate: transformers' own loop without drafts. All on fixed shapes.
PLAIN, SPECULATIVE = ("plain", "generate"), ("replay", "snapshots")
METHODS = (*PLAIN, *SPECULATIVE)
BATCHES = (1, 8, 32, 128, 256)
FORWARDS = (5, 2, 4, 6, 8)  # tokens; the first one is measured at every batch size before the others
# what compiles the forwards -> arguments of `generate`
COMPILING: dict[str, dict[str, Any]] = {
    "inductor": {},
    "cudagraphs": {"compile_config": CompileConfig(backend="cudagraphs")},
    "none": {"disable_compile": True},
}
BACKENDS = tuple(COMPILING)
PROFILED_WINDOWS = 4


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Args:
        tokens: of a forward, drafts and the one before them; 1 without drafts.
        accepted: drafts that are accepted in each round.
        backend: what compiles the forwards.
        gpus: that the model is spread over.
        chance: with which each draft is right, instead of a set number of them.
    """

    preset: Preset
    method: str
    batch: int
    tokens: int
    accepted: int
    backend: str
    gpus: int = 1
    chance: float | None = None

    @property
    def key(self) -> str:
        """Its name in the results."""
        right = f"a{self.accepted}" if self.chance is None else f"p{self.chance:g}"
        name = f"{self.preset.name}/{self.method}/b{self.batch}/t{self.tokens}/{right}/{self.backend}"
        return name + on_several(self.gpus)


@dataclass(frozen=True)
class Settings:
    """What is the same in all cells.

    Args:
        prompt: tokens of the prompts.
        new_tokens: tokens of a row in the timed rounds, at least; several windows.
        warm: rounds before them, in which forwards are compiled.
        checked: tokens over which logits are compared with a forward without a cache; more than a window.
        tolerance: largest error of the logits, relative to their spread (see `generate_cells.Settings`).
        window: of the replay caches.
        checkpoint: precision of their state.
        profiled: record the time of a round by kernel as well.
    """

    prompt: int = 64
    new_tokens: int = 160
    warm: int = 8
    checked: int = 20
    tolerance: float = 0.5
    window: int = 16
    checkpoint: str = "float32"
    profiled: bool = False


def default_accepted(tokens: int) -> int:
    """All but the last draft, and at least one."""
    return max(1, tokens - 2)


def all_cells(
    presets: list[Preset],
    batches: list[int],
    forwards: list[int],
    accepted: int | None,
    backends: list[str],
    only: list[str] | None,
    gpus: int = 1,
    chance: float | None = None,
) -> list[Cell]:
    """Every combination that a pattern of ``only`` matches, what a comparison needs next to each other."""
    cells = []
    for preset, backend, tokens, batch in itertools.product(presets, backends, forwards, batches):
        kept = default_accepted(tokens) if accepted is None else min(accepted, tokens - 1)
        if tokens == forwards[0]:
            cells += [Cell(preset, method, batch, 1, 0, backend, gpus) for method in PLAIN]
        if chance is None:
            cells += [Cell(preset, method, batch, tokens, kept, backend, gpus) for method in SPECULATIVE]
        else:
            cells.append(Cell(preset, "replay", batch, tokens, 0, backend, gpus, chance))
    return [cell for cell in cells if not only or any(fnmatch.fnmatch(cell.key, f"*{pattern}*") for pattern in only)]


@torch.no_grad()
def measure_cell(model: Any, cell: Cell, settings: Settings, expected: torch.Tensor) -> dict[str, Any]:
    """Time and check; what does not fit into memory says so in ``status``, and so does a failed check.

    Args:
        expected: what `expected_logits` gives for this batch size.
    """
    record: dict[str, Any] = {
        "preset": cell.preset.name, "method": cell.method, "batch": cell.batch, "tokens": cell.tokens,
        "accepted": cell.accepted, "backend": cell.backend, "prompt": settings.prompt, "window": settings.window,
        "checkpoint": settings.checkpoint, "gpus": cell.gpus, "status": "measured",
    }  # fmt: skip
    if cell.chance is not None:
        record |= {"chance": cell.chance, "accepted": None}
    try:
        with rt.enable():
            measured = _measure_loop if cell.chance is None else _measure_chance
            if cell.method == "generate":
                measured = _measure_generate
            record |= measured(model, cell, settings, expected)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        record["status"] = "does not fit"
    return record


@torch.no_grad()
def expected_logits(model: Any, batch: int, settings: Settings) -> torch.Tensor:
    """Logits ``[checked, rows, vocabulary]`` of some rows' known tokens, by a forward without a cache."""
    length = settings.prompt + settings.checked
    ids = known_ids(model, batch, length, settings.prompt)[checked_rows(batch)]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, settings.prompt - 1 :]
    return logits.float().cpu().transpose(0, 1)


def known_ids(model: Any, batch: int, length: int, prompt: int) -> torch.Tensor:
    """Prompts and what follows, int64 ``[B, length]``: random; a longer text begins as a shorter one does."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, model.config.vocab_size, (length - prompt, batch), generator=generator).T
    return torch.cat([prompt_ids(model, batch, prompt), rows.to(model.device)], dim=1)


class KnownRun:
    """A loop over known tokens, ready to run.

    Args:
        warmed: called as the rounds that count begin.

    Attributes:
        rounds: that it makes. timed: how many of them count, the last ones.
    """

    def __init__(self, model: Any, cell: Cell, settings: Settings, warmed: Callable[[], None] | None = None) -> None:
        added, drafts = cell.accepted + 1, cell.tokens - 1
        self.timed = -(-settings.new_tokens // added)
        self.rounds = max(settings.warm, -(-settings.checked // added)) + self.timed
        self.last = settings.prompt + 1 + self.rounds * added
        self.ids = known_ids(model, cell.batch, self.last + 2 * cell.tokens, settings.prompt)  # and a round in vain
        text = KnownText(self.ids, settings.prompt, cell.accepted, model.config.vocab_size)
        self.rows, self.forwards = Rows(self.ids[:, : settings.prompt], None, 0), [0]
        self.target = _target(model, cell, settings, self.last, self.forwards)
        self.recorder = RoundRecorder(devices_of(model), self.rounds - self.timed, warmed)
        common = _loop_arguments(model, cell, settings, self.last, self.recorder)
        self.loop = KnownLoop(self.target, KnownDrafter(text, drafts), text=text, **common)

    def run(self) -> int:
        """All rounds; how many were made in vain at the end."""
        self.loop.run(self.rows)
        return int(self.loop.goes_ahead(self.rows))


def _measure_loop(model: Any, cell: Cell, settings: Settings, expected: torch.Tensor) -> dict[str, Any]:
    known = KnownRun(model, cell, settings)
    in_vain, target, rounds, forwards = known.run(), known.target, known.rounds, known.forwards
    times = known.recorder.rounds()[:rounds]
    held = sum(target.cache.memory_footprint().values())
    copies = target.snapshot_bytes if isinstance(target, SnapshotRows) else 0
    record = _times(times[-known.timed :], cell, model) | {
        "warm_up_s": round(sum(times[: -known.timed]) / 1e3, 3),
        "forwards_per_round": forwards[0] / (rounds + in_vain),
        "cache_gib": round(held / 2**30, 4),
        "snapshot_gib": round(copies / 2**30, 4),
        "logit_error": round(logit_error(torch.cat(known.loop.kept)[: settings.checked], expected), 4),
    }
    each = 2 if isinstance(target, SnapshotRows) and target.kept < cell.tokens else 1
    if len(times) != rounds or forwards[0] != each * (rounds + in_vain):
        record["status"] = f"wrong: {len(times)} rounds with {forwards[0]} forwards, expected {rounds} of {each}"
    elif not torch.equal(known.rows.finished(), known.ids[:, : known.last]):
        record["status"] = "wrong: other tokens than the known ones"
    elif settings.profiled:
        record["profile_ms"] = _profile(model, cell, settings)
    return _checked(record, settings)


def _profile(model: Any, cell: Cell, settings: Settings) -> dict[str, float]:
    """Milliseconds of a round by kernel, over some windows, in a run of its own."""
    watch = KernelTimes()
    known = KnownRun(model, cell, replace(settings, new_tokens=PROFILED_WINDOWS * settings.window), watch.start)
    known.run()
    # where rounds go ahead of the host, one has been launched before the watch began, and one is in vain at the end
    return heaviest(watch.stop(), known.timed)


def _measure_chance(model: Any, cell: Cell, settings: Settings, expected: torch.Tensor) -> dict[str, Any]:
    """Rounds in which no row has ended, of rows that accept different numbers of drafts."""
    drafts, last = cell.tokens - 1, settings.prompt + settings.checked + settings.warm + settings.new_tokens
    assert cell.chance is not None
    ids = known_ids(model, cell.batch, last + 2 * cell.tokens, settings.prompt)
    text, forwards = ChanceText(ids, cell.chance, model.config.vocab_size), [0]
    rows, target = Rows(ids[:, : settings.prompt], None, 0), _target(model, cell, settings, last, forwards)
    recorder = RoundRecorder(devices_of(model), warm=1 + settings.warm)
    common = _loop_arguments(model, cell, settings, last, recorder)
    loop = ChanceLoop(target, ChanceDrafter(text, drafts), text=text, **common)
    loop.run(rows)
    grown = torch.stack(loop.grown)[1:].cpu()  # behind the first token, which the prompts' forward gives
    # the last round of a row may be cut
    whole = int((grown > 0).all(1).sum()) - 1
    times = recorder.rounds()
    scores = torch.stack([torch.cat(loop.kept[row])[: settings.checked] for row in loop.kept_rows], dim=1)
    tokens = float(grown[settings.warm : whole].double().mean())
    record = _times(times[settings.warm : whole], cell, model, tokens) | {
        "warm_up_s": round(sum(times[: settings.warm]) / 1e3, 3),
        "forwards_per_round": forwards[0] / (len(grown) + int(loop.goes_ahead(rows))),
        "logit_error": round(logit_error(scores, expected), 4),
    }
    if not torch.equal(rows.finished(), ids[:, :last]):
        record["status"] = "wrong: other tokens than the known ones"
    return _checked(record, settings)


def _loop_arguments(model: Any, cell: Cell, settings: Settings, last: int, recorder: RoundRecorder) -> dict[str, Any]:
    """What loops over known tokens are given alike; rows end at ``last``."""
    drafts = cell.tokens - 1
    return {
        "length": DraftLength(drafts, "fixed" if drafts else "off"),
        "processors": LogitsProcessorList(),
        "criteria": StoppingCriteriaList([MaxLengthCriteria(last)]),
        "do_sample": False,
        "max_length": last + drafts,  # so that the last draft is as long as the others
        "clock": recorder.clock,
        "decoding": model._optimize_model_for_decode,
        "kept_rows": checked_rows(cell.batch),
        "kept_until": settings.prompt + settings.checked,
    }


def _target(model: Any, cell: Cell, settings: Settings, length: int, forwards: list[int]) -> ReplayRows:
    """The model on a cache with fixed shapes; its forwards behind the prompts are counted.

    Of a model on several devices the forward over the prompts makes every layer's buffers where the layer is.
    """
    drafts = max(rt.ReplayConfig().max_draft, cell.tokens)  # one more than drafts, as `generate` has it for batches
    config = rt.ReplayConfig(window=settings.window, max_draft=drafts, checkpoint=settings.checkpoint)
    cache = rt.ReplayCache(model.config, config, max_cache_len=length)
    if is_spread(model):
        prepare(model)
    else:
        cache.allocate(cell.batch, model.dtype, model.device)
    call, again = _calls(model, cell)

    def counted(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forwards[0] += 1
        return run(*args, **kwargs)

    if cell.method == "snapshots":
        calls = (functools.partial(counted, run) for run in (call, again))
        return SnapshotRows(model, cache, *calls, kept=cell.accepted + 1)
    return ReplayRows(model, cache, functools.partial(counted, call))


def _calls(model: Any, cell: Cell) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward as `generate` compiles it, and one for another length. As in `generate`, only on a GPU.

    Where there are two lengths each is compiled for itself: else the compiler takes the second one for a variable.
    """
    if cell.backend == "none" or model.device.type != "cuda":
        return model.__call__, model.__call__
    by_itself = CompileConfig(dynamic=False if cell.method == "snapshots" else None)
    config = COMPILING[cell.backend].get("compile_config", by_itself)
    call = model.get_compiled_call(with_own_backend(config))
    return call, call


def _measure_generate(model: Any, cell: Cell, settings: Settings, expected: torch.Tensor) -> dict[str, Any]:
    warm = max(settings.warm, settings.checked)
    count = 1 + warm + settings.new_tokens
    ids = known_ids(model, cell.batch, settings.prompt + settings.checked, settings.prompt)
    prompts, forced = ids[:, : settings.prompt], ids[:, settings.prompt :]
    arguments: dict[str, Any] = {
        "cache_implementation": "replay_static",
        "max_cache_len": settings.prompt + count,
        "cache_config": {"window": settings.window, "checkpoint": settings.checkpoint},
    }
    arguments |= COMPILING[cell.backend]
    checker = RoundRecorder(devices_of(model), 0, rows=checked_rows(cell.batch), forced=forced)
    seconds, _ = run_generate(model, prompts, settings.checked, checker, **arguments)
    recorder = RoundRecorder(devices_of(model), warm=2 + warm)
    run_generate(model, prompts, count, recorder, **arguments)
    record = _times(recorder.milliseconds()[-settings.new_tokens :], cell, model) | {
        "warm_up_s": round(seconds, 3),
        "forwards_per_round": 1.0,
        "logit_error": round(logit_error(torch.stack(checker.logits), expected), 4),
    }
    return _checked(record, settings)


def _times(rounds: list[float], cell: Cell, model: Any, tokens: float | None = None) -> dict[str, Any]:
    """What rounds of so many milliseconds come to. Flushes are in some of them: throughput is by their mean.

    Args:
        tokens: by which a row grows in a round; by default as many as the cell says.
    """
    mean, spread = sum(rounds) / len(rounds), summarise(rounds)
    tokens = cell.accepted + 1 if tokens is None else round(tokens, 4)
    per_row = 1e3 * tokens / mean
    return {
        "rounds": len(rounds),
        "round_ms": spread.to_dict() | {"mean": round(mean, 4)},
        "tokens_per_round": tokens,
        "row_tokens_per_s": round(per_row, 3),
        "tokens_per_s": round(per_row * cell.batch, 2),
        **peak_memory(devices_of(model)),
    }


def _checked(record: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """A wrong cell has no times."""
    if not record["logit_error"] <= settings.tolerance:
        record["status"] = f"wrong: logits differ by {record['logit_error']:.0%}"
    if record.get("status", "").startswith("wrong"):
        return {name: record[name] for name in ("status", "logit_error")}
    return record
