"""Runs a prompt with the stock cache and with a replay cache: the tokens, the time, and the bytes of each."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

import replay_transformers as rt
from replay_transformers.cli.loading import Loaded
from replay_transformers.traffic import StepTraffic, count_steps

__all__ = ["Comparison", "Run", "Settings", "compare"]

WARM_UP_TOKENS = 3

# given a run's cache ("stock", "replay") and its most tokens: the streamer for `generate`
MakeStreamer = Callable[[str, int], Any]


@dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        max_new_tokens: tokens to generate.
        window: the replay cache's window.
        cache: "replay" or "replay_static".
        stock: run the stock cache too: transformers' own of the same kind, growing or static.
        precision: the replay cache's settings for it that are not the default, by the names of `ReplayConfig`.
        rounds: timed runs of each.
        max_counted_tokens: most tokens of a counted run, which is slow; a whole window is counted all the same.
    """

    max_new_tokens: int
    window: int
    cache: str = "replay"
    stock: bool = True
    rounds: int = 1
    max_counted_tokens: int = 64
    precision: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_narrow(self) -> bool:
        """Whether the replay cache's state, or what is read of it, has less than float32."""
        wide = {"float32", "float64", None}
        formats = {self.precision.get(name) for name in ("checkpoint", "readout")}
        return bool(formats - wide) or self.precision.get("decay_skip", 0) > 0

    @property
    def names(self) -> list[str]:
        """The caches to run, by name."""
        return ["stock", "replay"] if self.stock else ["replay"]

    @property
    def counted_tokens(self) -> int:
        """Tokens of a counted run."""
        return min(self.max_new_tokens, max(self.max_counted_tokens, 2 * self.window + 2))

    def arguments(self, name: str, impl: str = "auto") -> dict[str, Any]:
        """Arguments of `generate` for greedy decoding with a cache; ``impl`` is the replay cache's implementation."""
        greedy: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "num_beams": 1}
        if name == "replay":
            settings = {"window": self.window, "impl": impl, **self.precision}
            return greedy | {"cache_implementation": self.cache, "cache_config": settings}
        return greedy | ({"cache_implementation": "static"} if self.cache == "replay_static" else {})


@dataclass
class Run:
    """What one cache did: its new tokens, the seconds of each timed run, the bytes of each counted decode step."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[StepTraffic] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """The median over the timed runs."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """The runs of one model by cache, with what they were asked to do."""

    loaded: Loaded
    prompt: str
    settings: Settings
    runs: dict[str, Run]

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token in which the caches differ; None if they agree or only one ran."""
        if len(self.runs) < 2:
            return None
        stock, replay = self.runs["stock"].tokens, self.runs["replay"].tokens
        differing = (index for index, pair in enumerate(zip(stock, replay, strict=False)) if pair[0] != pair[1])
        end = None if len(stock) == len(replay) else min(len(stock), len(replay))
        return next(differing, end)

    @property
    def is_right(self) -> bool:
        """Whether the tokens are equal, or need not be: where two best tokens may tie, or the state is narrow."""
        return self.first_difference is None or self.loaded.dtype != "float32" or self.settings.is_narrow


def compare(
    loaded: Loaded, prompt: str, settings: Settings, *, streamed: MakeStreamer, silent: MakeStreamer
) -> Comparison:
    """Generate with each cache: a few tokens to warm up, then timed, then counted.

    Args:
        loaded: the model. prompt: the text to continue. settings: what to run.
        streamed: makes the streamer of the first timed run of each cache. silent: that of every other run.

    Raises:
        CommandError: a prompt of no tokens.
    """
    inputs = loaded.encode(prompt)
    runs = {name: Run() for name in settings.names}
    with rt.enable():
        for name in runs:
            _generate(loaded, inputs, settings.arguments(name), most=WARM_UP_TOKENS)
        for number in range(settings.rounds):
            for name, run in runs.items():
                streamer = (silent if number else streamed)(name, settings.max_new_tokens)
                start = time.perf_counter()
                run.tokens = _generate(loaded, inputs, settings.arguments(name), streamer=streamer)
                run.seconds.append(time.perf_counter() - start)
        for name, run in runs.items():
            most = settings.counted_tokens
            with count_steps(loaded.model) as run.steps:
                # what PyTorch's dispatcher sees: neither kernels of another kind nor compiled code
                arguments = settings.arguments(name, impl="reference") | {"disable_compile": True}
                _generate(loaded, inputs, arguments, most=most, streamer=silent(name, most))
    return Comparison(loaded, prompt, settings, runs)


def _generate(
    loaded: Loaded,
    inputs: dict[str, torch.Tensor],
    arguments: dict[str, Any],
    most: int | None = None,
    streamer: Any = None,
) -> list[int]:
    """The new tokens, at most ``most`` of them: stopping early keeps the shapes, and so a compiled model."""
    length = inputs["input_ids"].shape[1]
    stop = StoppingCriteriaList([] if most is None else [MaxLengthCriteria(length + most)])
    sequences = loaded.model.generate(**inputs, **arguments, stopping_criteria=stop, streamer=streamer)
    return sequences[0, length:].tolist()
