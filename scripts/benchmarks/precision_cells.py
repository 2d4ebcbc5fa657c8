"""What a setting of the state's precision costs on text, against a float32 state fed with the same tokens."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import replay_transformers as rt
from replay_transformers.cli.loading import Loaded
from replay_transformers.patches.capture import cuda_graphs
from replay_transformers.patches.versions import generate_cache_name

from .precision_decay import DecayReader
from .precision_grid import Setting, bins, place, short
from .timing import synchronise

BASELINE = Setting("float32")
BACKENDS = ("cudagraphs", "none")
MOST_GRAPHS = 256  # compiled forwards of one model at once, one per cache


@dataclass(frozen=True)
class Run:
    """What all settings of a model are measured on.

    Args:
        ids: texts, int64 ``[rows, prompt + length + 1]``, on the model's device.
        prompt: tokens that are taken in at once.
        impl: of the caches.
        backend: what runs the steps, out of `BACKENDS`.
    """

    ids: torch.Tensor
    prompt: int
    impl: str
    backend: str

    @property
    def steps(self) -> int:
        """Tokens of a row that are fed one by one."""
        return self.ids.shape[1] - self.prompt - 1


def text_ids(loaded: Loaded, text: str, rows: int, length: int) -> torch.Tensor:
    """Pieces of a text of ``length`` tokens each, that begin at equal distances: int64 ``[rows, length]``.

    Raises:
        ValueError: a text with fewer tokens.
    """
    ids = loaded.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    if len(ids) < rows * length:
        raise ValueError(f"{rows} texts of {length} tokens need {rows * length}, the text given has {len(ids)}")
    begins = [row * (len(ids) // rows) for row in range(rows)]
    return torch.stack([ids[begin : begin + length] for begin in begins]).to(loaded.model.device)


class Lane:
    """The model on a cache of its own.

    Raises:
        ValueError, NotImplementedError: a setting that the cache does not take.
    """

    def __init__(self, model: Any, setting: Setting, run: Run, call: Callable[..., Any], reads_decay: bool) -> None:
        self.run, self.call = run, call
        self.cache = rt.ReplayCache(model.config, setting.config(run.impl), max_cache_len=run.ids.shape[1])
        self.places = torch.arange(run.ids.shape[1], device=run.ids.device).expand(len(run.ids), -1)
        self._forward(model, run.ids[:, : run.prompt], 0)
        self.decay = DecayReader(self.cache, run.prompt, setting.decay_skip) if reads_decay else None

    def _forward(self, call: Callable[..., Any], ids: torch.Tensor, seen: int) -> torch.Tensor:
        places = self.places[:, seen : seen + ids.shape[1]].contiguous()
        named = {generate_cache_name(): self.cache, "use_cache": True, "return_dict": True, "logits_to_keep": 1}
        return call(input_ids=ids.contiguous(), position_ids=places, **named).logits[:, -1]

    def step(self, index: int) -> torch.Tensor:
        """Take in the row's next token: log-probabilities of the one after it, float64 ``[rows, vocabulary]``."""
        if self.decay is not None:
            self.decay.before()
        seen = self.run.prompt + index
        logits = self._forward(self.call, self.run.ids[:, seen : seen + 1], seen)
        if index == 0 and self.cache.cursor.empty:
            raise ValueError("small states are updated eagerly here, the window is not used: take impl='triton'")
        if self.decay is not None:
            self.decay.after()
        return logits.float().double().log_softmax(-1)


class Scores:
    """What is kept of a lane, float64 ``[steps, rows]`` each, on the device."""

    def __init__(self, run: Run) -> None:
        shape = run.steps, len(run.ids)
        self.divergence, self.agrees, self.likelihood = (
            torch.zeros(shape, dtype=torch.float64, device=run.ids.device) for _ in range(3)
        )

    def put(self, index: int, got: torch.Tensor, want: torch.Tensor, truth: torch.Tensor) -> None:
        """Compare log-probabilities with the baseline's; ``truth`` is the next token, int64 ``[rows]``."""
        self.divergence[index] = (want.exp() * (want - got)).sum(-1)
        self.agrees[index] = got.argmax(-1) == want.argmax(-1)
        self.likelihood[index] = got.gather(1, truth[:, None])[:, 0]


@torch.no_grad()
def measure_group(
    model: Any, settings: list[Setting], run: Run, report: Callable[[int], None] = lambda tokens: None
) -> tuple[dict[Setting, dict[str, Any] | Exception], dict[str, Any]]:
    """Decode the texts with the baseline and with each setting, step by step side by side.

    Beside the caches only the latest log-probabilities and a few numbers per step and row are held, whatever the
    length. Nothing waits for the device before the end, but for the reports.

    Args:
        report: is told how many tokens of each text are done, at the end of every bin.

    Returns:
        per setting its record, or what it raised; and how long the heads remember.
    """
    found: dict[Setting, dict[str, Any] | Exception] = {}
    lanes: dict[Setting, Lane] = {}
    with rt.enable(), _calls(model, run.backend) as make:
        start = time.monotonic()
        baseline = Lane(model, BASELINE, run, make(), reads_decay=True)
        reference, scores, ends = Scores(run), {}, {end for _, end in bins(run.steps)}
        for setting in settings:
            with _kept(found, setting):
                lanes[setting] = Lane(model, setting, run, make(), reads_decay=bool(setting.decay_skip))
                scores[setting] = Scores(run)
        for index in range(run.steps):
            if not lanes:
                return found, {}
            want, truth = baseline.step(index), run.ids[:, run.prompt + index + 1]
            reference.put(index, want, want, truth)
            for setting, lane in list(lanes.items()):
                with _kept(found, setting):
                    scores[setting].put(index, lane.step(index), want, truth)
                if setting in found:
                    del lanes[setting], lane
            if index + 1 in ends:
                synchronise([run.ids.device])
                report(index + 1)
        for lane in (baseline, *lanes.values()):
            if lane.decay is not None:
                lane.decay.close()
        for setting, lane in lanes.items():
            found[setting] = _record(setting, lane, scores[setting], reference)
        assert baseline.decay is not None
        heads = baseline.decay.memory()
        return found, heads | {"seconds_of_group": round(time.monotonic() - start, 2)}


@contextlib.contextmanager
def _kept(found: dict[Setting, Any], setting: Setting) -> Iterator[None]:
    """What a setting raises is its result, without the frames, which hold its cache."""
    try:
        yield
    except Exception as error:
        found[setting] = error.with_traceback(None)


@contextlib.contextmanager
def _calls(model: Any, backend: str) -> Iterator[Callable[[], Callable[..., Any]]]:
    """Makes a compiled forward for one cache.

    A backend that is an object of its own keeps the graph of one cache from being captured anew for the next one.
    """
    if backend == "none":
        yield lambda: model
        return
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        yield lambda: torch.compile(model.forward, backend=functools.partial(cuda_graphs), dynamic=False)


def _record(setting: Setting, lane: Lane, scores: Scores, reference: Scores) -> dict[str, Any]:
    record: dict[str, Any] = {
        "checkpoint": setting.checkpoint, "readout": setting.readout, "window": setting.window,
        "decay_skip": setting.decay_skip, "status": "measured",
    }  # fmt: skip
    wrong = (~scores.divergence.isfinite()).any(1).nonzero()
    if len(wrong):
        return record | {"status": f"wrong: not finite from token {int(wrong[0])} on"}
    if setting.decay_skip and lane.decay is not None:
        record |= lane.decay.skipped()
    held = lane.cache.memory_footprint()
    record |= {f"{name}_bytes": held[name] for name in ("checkpoint", "readout", "ring")}
    return record | {"bins": [_bin(scores, reference, *ends) for ends in bins(lane.run.steps)]}


def _bin(scores: Scores, reference: Scores, begin: int, end: int) -> dict[str, Any]:
    divergence, agrees, likelihood, other = (
        x[begin:end] for x in (scores.divergence, scores.agrees, scores.likelihood, reference.likelihood)
    )
    difference = likelihood - other
    rows = divergence.mean(0)
    return place(begin, end) | {
        "kl": short(divergence.mean()),
        "kl_error": short(standard_error(divergence)),
        "kl_rows": [short(rows.min()), short(rows.max())],
        "kl_rows_deviation": short(rows.std(correction=1)) if len(rows) > 1 else None,
        "kl_max": short(divergence.max()),
        "agreement": short(agrees.mean()),
        "log_likelihood": short(likelihood.mean()),
        "log_likelihood_difference": short(difference.mean()),
        "log_likelihood_difference_error": short(standard_error(difference)),
    }


def standard_error(values: torch.Tensor) -> torch.Tensor:
    """Of the mean of all values, as if they were independent; 0 for a single one."""
    if values.numel() < 2:
        return values.new_zeros(())
    return values.std(correction=1) / values.numel() ** 0.5
