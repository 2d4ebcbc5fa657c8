"""Runs prompts on a replay cache with and without drafters: the tokens, the time, and what was accepted."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

import replay_transformers as rt
from replay_transformers.cli.loading import CommandError, Loaded
from replay_transformers.generation.watch import watched

__all__ = ["PLAIN", "DraftRun", "Speculation", "SpeculationSettings", "encode", "speculate"]

PLAIN = "plain"
WARM_UP_TOKENS = 6


@dataclass(frozen=True)
class SpeculationSettings:
    """What to run.

    Args:
        max_new_tokens: tokens to generate.
        window: the replay cache's window.
        drafts: tokens of the longest draft.
        length: how long drafts are: "fixed" or "adaptive", as in `ReplayConfig`.
        cache: "replay" or "replay_static".
        rounds: timed runs of each.
        warm_up_tokens: tokens of an untimed run before them.
        more: other arguments of `generate` with a replay cache.
    """

    max_new_tokens: int
    window: int
    drafts: int = 4
    length: str = "fixed"
    cache: str = "replay"
    rounds: int = 1
    warm_up_tokens: int = WARM_UP_TOKENS
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> dict[str, Any]:
        """Arguments of `generate` with the stock cache."""
        return {"max_new_tokens": self.max_new_tokens, "do_sample": False, "num_beams": 1}

    @property
    def replay(self) -> dict[str, Any]:
        """The same with a replay cache."""
        config = {"window": self.window, "draft_length": self.length}
        return self.greedy | self.more | {"cache_implementation": self.cache, "cache_config": config}

    def drafters(self, assistant: Any) -> dict[str, dict[str, Any]]:
        """More arguments by drafter; none for plain decoding."""
        return {
            PLAIN: {},
            "prompt lookup": {"prompt_lookup_num_tokens": self.drafts},
            "assistant": {"assistant_model": assistant},
            "MTP": {"use_mtp": True, "num_assistant_tokens": self.drafts},
        }


@dataclass
class DraftRun:
    """What one drafter did.

    Args:
        seconds: of each timed run.
        forwards: of the target behind the prompts. turns: rows that took part in them.
        drafted, accepted: drafts of all rows.
        is_equal: whether the tokens are those of greedy decoding with the stock cache.
        refusal: why `generate` does not take it with this model; None if it does.
    """

    seconds: list[float] = field(default_factory=list)
    forwards: int = 0
    turns: int = 0
    drafted: int = 0
    accepted: int = 0
    is_equal: bool = True
    refusal: str | None = None

    @property
    def median_seconds(self) -> float:
        """The median over the timed runs."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens by which a row grows in a forward of the target."""
        return (self.turns + self.accepted) / self.turns if self.turns else 1.0

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were accepted; None without any."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True)
class Speculation:
    """The runs on one batch of prompts by drafter, with what they were asked to do."""

    loaded: Loaded
    prompts: list[str]
    settings: SpeculationSettings
    runs: dict[str, DraftRun]

    @property
    def is_right(self) -> bool:
        """Whether all tokens are equal, or the dtype is one in which the two best tokens may tie."""
        return all(run.is_equal for run in self.runs.values()) or self.loaded.dtype != "float32"

    def speed_up(self, name: str) -> float:
        """How many times as fast as plain decoding a drafter is."""
        return self.runs[PLAIN].median_seconds / self.runs[name].median_seconds


def encode(loaded: Loaded, prompts: list[str]) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of prompts padded on the left, int64 ``[B, T]`` on the model's device.

    Raises:
        CommandError: a prompt of no tokens.
    """
    if any(not ids for ids in loaded.tokenizer(prompts)["input_ids"]):
        raise CommandError("the prompt is empty: give it at least one token")
    encoded = loaded.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    return {name: encoded[name].to(loaded.model.device) for name in ("input_ids", "attention_mask")}


def speculate(
    loaded: Loaded,
    assistant: Any,
    inputs: dict[str, torch.Tensor],
    settings: SpeculationSettings,
    about: Callable[[str], None] = lambda drafter: None,
) -> dict[str, DraftRun]:
    """Generate without and with each drafter.

    Args:
        loaded: the model. assistant: a smaller one with its vocabulary; its number of drafts is **set**.
        inputs: what `encode` gives.
        about: called with the drafter that runs next.
    """
    assistant.generation_config.num_assistant_tokens = settings.drafts
    arguments = {name: settings.replay | drafter for name, drafter in settings.drafters(assistant).items()}
    with rt.enable():
        expected = loaded.model.generate(**inputs, **settings.greedy)
        runs = {name: _warm_up(loaded.model, inputs, arguments[name], settings.warm_up_tokens) for name in arguments}
        for _ in range(settings.rounds):
            for name, run in runs.items():
                if run.refusal is None:
                    about(name)
                    _add(run, loaded.model, inputs, arguments[name], expected)
    return runs


def _warm_up(model: Any, inputs: dict[str, torch.Tensor], arguments: dict[str, Any], tokens: int) -> DraftRun:
    # stopping early keeps the shapes, and so a compiled model
    stop = StoppingCriteriaList([MaxLengthCriteria(inputs["input_ids"].shape[1] + tokens)])
    try:
        model.generate(**inputs, **arguments, stopping_criteria=stop)
    except (ValueError, NotImplementedError) as error:
        return DraftRun(refusal=str(error))
    return DraftRun()


def _add(
    run: DraftRun, model: Any, inputs: dict[str, torch.Tensor], arguments: dict[str, Any], expected: torch.Tensor
) -> None:
    """One timed run; its figures replace those of the one before."""
    with watched() as rounds:
        _synchronise(model.device)
        start = time.perf_counter()
        tokens = model.generate(**inputs, **arguments)
        _synchronise(model.device)
        run.seconds.append(time.perf_counter() - start)
    run.is_equal &= torch.equal(tokens, expected)
    run.forwards = rounds.forwards or tokens.shape[1] - inputs["input_ids"].shape[1] - 1
    run.turns, run.drafted, run.accepted = rounds.turns, rounds.drafted, rounds.accepted


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
