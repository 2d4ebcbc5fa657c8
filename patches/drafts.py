"""What drafters propose in assisted generation: how much at most, and where a draft is cut."""

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import transformers
from packaging.version import Version

from replay_transformers.cache import ReplayCache
from replay_transformers.geometry import text_config
from replay_transformers.patches.mtp import HEADS, LAYER_NAMES, mtp_layers
from replay_transformers.patches.versions import cache_argument

__all__ = [
    "DFLASH",
    "DraftLimits",
    "check_drafter",
    "drafted_tokens",
    "keep_assistant_apart",
    "limit_drafts",
    "mtp_named_as_transformers_does",
    "uses_mtp",
    "warn_of_two",
]

logger = logging.getLogger(__name__)

DEFAULT_ASSISTANT_TOKENS = 20  # transformers' own, for an assistant that does not say
FIRST_WITH_MTP = Version("5.23.0")
DEFAULT_MTP_TOKENS = 3
DFLASH = "dflash"
EARLY_EXIT, LOOKUP, MTP = "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp"
NO_EARLY_EXIT = ("nemotron_h",)  # transformers always runs all of its layers

_config_lock = Lock()


def drafted_tokens(model: Any, generation_config: Any, assistant_model: Any, asked: int | None) -> int | None:
    """How many tokens the drafter of a `generate` call proposes at most in one round; None without a drafter.

    Args:
        asked: num_assistant_tokens of the call, or of its target's generation configuration.

    Raises:
        ValueError: it would draft fewer than one token.
    """
    named = _named(generation_config)
    if named[:1] == [EARLY_EXIT]:
        return _assistant_tokens(model)
    if named[:1] == [LOOKUP]:
        return _count(LOOKUP, generation_config.prompt_lookup_num_tokens, floats=False)
    if uses_mtp(generation_config):
        return DEFAULT_MTP_TOKENS if asked is None else _count("num_assistant_tokens", asked)
    if assistant_model is None:
        return None
    if getattr(generation_config, "speculation_type", None) == DFLASH:
        return int(assistant_model.config.block_size) - 1
    return _assistant_tokens(assistant_model)


def uses_mtp(generation_config: Any) -> bool:
    """Whether the model's own MTP head drafts: of two drafters that a call names, transformers takes the other one."""
    return _named(generation_config)[:1] == [MTP]


def _named(generation_config: Any) -> list[str]:
    """The drafters that a configuration names, the one that transformers takes first; all come before an assistant."""
    names = [name for name in (EARLY_EXIT, LOOKUP) if getattr(generation_config, name) is not None]
    return names + [MTP] * bool(getattr(generation_config, MTP, None))


def _assistant_tokens(assistant: Any) -> int:
    tokens = assistant.generation_config.num_assistant_tokens
    name = "num_assistant_tokens of the assistant's generation_config"
    return DEFAULT_ASSISTANT_TOKENS if tokens is None else _count(name, tokens)


def _count(name: str, value: Any, *, floats: bool = True) -> int:
    """A number of tokens; transformers' own schedules make whole floats of an assistant's."""
    is_whole = type(value) is int or (floats and isinstance(value, float) and value.is_integer())
    if not is_whole or value < 1:
        raise ValueError(
            f"{name} must be a whole number of at least 1, got {value!r}: so many tokens are drafted at a time; leave "
            "the drafter out to decode without drafts"
        )
    return int(value)


def warn_of_two(generation_config: Any, assistant_model: Any) -> None:
    """Say which drafter is taken where a call names several: transformers would not."""
    taken, *others = _named(generation_config) + ["assistant_model"] * (assistant_model is not None)
    if others:
        logger.warning("generate got several drafters: %s drafts, without %s", taken, " and ".join(others))


def check_drafter(model: Any, generation_config: Any) -> None:
    """Raise for drafters that do not work with this model, one of the families that a replay cache serves."""
    config = text_config(model.config)
    exit_layer = generation_config.assistant_early_exit
    if exit_layer is not None:
        if config.model_type in NO_EARLY_EXIT:
            raise NotImplementedError(
                f"assistant_early_exit is not supported for {type(model).__name__}: transformers runs all of its layers"
            )
        if (
            isinstance(exit_layer, bool)
            or not isinstance(exit_layer, int)
            or not 0 < exit_layer < len(config.layer_types)
        ):
            raise ValueError(
                f"assistant_early_exit must be an int from 1 to {len(config.layer_types) - 1}, one layer less than the "
                f"model has, got {exit_layer!r}"
            )
    elif uses_mtp(generation_config):
        if Version(transformers.__version__) < FIRST_WITH_MTP:
            raise NotImplementedError(
                f"use_mtp needs transformers {FIRST_WITH_MTP} or newer for {type(model).__name__}, found "
                f"{transformers.__version__}"
            )
        if config.model_type not in HEADS:
            raise NotImplementedError(
                f"use_mtp is not supported for {type(model).__name__} yet; it is for model types {list(HEADS)}"
            )
        found = mtp_layers(config)
        if found != 1:
            raise ValueError(
                f"use_mtp needs a model with one MTP layer ({', '.join(LAYER_NAMES[:-1])} or {LAYER_NAMES[-1]} in its "
                f"configuration), {'this one names none' if found is None else f'got {found}'}"
            )


@contextmanager
def mtp_named_as_transformers_does(model: Any) -> Iterator[None]:
    """While the MTP drafter is built, the model's configuration names its MTP layers as transformers looks for them.

    For that long only: what is in a configuration is saved with the model.
    """
    config = text_config(model.config)
    with _config_lock:
        names = {"num_mtp_layers": mtp_layers(config), "mtp_layer_types": ["full_attention"]}
        missing = {name: value for name, value in names.items() if getattr(config, name, None) is None}
        held = {name: vars(config)[name] for name in missing if name in vars(config)}
        try:
            for name, value in missing.items():
                setattr(config, name, value)
            yield
        finally:
            for name in missing:
                delattr(config, name)
            for name, value in held.items():
                setattr(config, name, value)


@dataclass(frozen=True)
class DraftLimits:
    """Where the drafts of one call end.

    Args:
        max_draft: tokens that the target's cache can reject.
        max_length: length of the finished sequence; the target adds a token of its own to every draft.
        stops: says of a sequence ``[1, T]`` whether generation ends with it.
        do_sample: whether the target samples.
    """

    max_draft: int
    max_length: int
    stops: Callable[[torch.Tensor, Any], torch.Tensor]
    do_sample: bool

    def cut(
        self, input_ids: torch.Tensor, candidates: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Shorten candidates ``[1, T]`` for the sequence so far and their logits.

        A draft also ends before the token that would end generation: if the target agrees, that token is the one it
        adds itself. Not if a sampling target accepts by the drafter's probabilities; leaving drafted tokens out then
        would distort its distribution, and `cut_accepted` does it afterwards.
        """
        length = input_ids.shape[1]
        drafted = candidates.shape[1] - length
        kept = max(0, min(drafted, self.max_draft, self.max_length - length - 1))
        if logits is None or not self.do_sample:
            kept = self._before_stop(candidates, length, kept)
        if kept == drafted:
            return candidates, logits
        if kept == 0:  # transformers takes no logits for no candidates
            return candidates[:, :length], None
        return candidates[:, : length + kept], None if logits is None else logits[:, :kept]

    def cut_accepted(self, prefix: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Accepted tokens ``[1, n]`` after a prefix, up to and with the first that ends generation."""
        sequence = torch.cat([prefix, accepted.to(prefix.device)], dim=1)
        kept = self._before_stop(sequence, prefix.shape[1], accepted.shape[1] - 1)
        return accepted[:, : kept + 1]

    def _before_stop(self, sequence: torch.Tensor, length: int, tokens: int) -> int:
        """How many of the ``tokens`` after the first ``length`` come before the one that ends generation."""
        for index in range(tokens):
            if bool(self.stops(sequence[:, : length + index + 1], None).all()):
                return index
        return tokens


def limit_drafts(generator: Any, limits: DraftLimits | None, drafts: int | None) -> None:
    """Have a candidate generator of transformers respect the limits, on this instance only.

    Args:
        generator: the generator.
        limits: where its candidates are cut; None leaves them as they are (the target is not one of our models).
        drafts: bound for a number of assistant tokens that grows from round to round.
    """
    cls, reference = type(generator), weakref.ref(generator)  # no cycle: it would keep the assistant's cache alive

    def get_candidates(input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self: Any = reference()
        if drafts is not None and hasattr(self, "num_assistant_tokens"):
            self.num_assistant_tokens = min(self.num_assistant_tokens, drafts)
        if limits is not None and min(limits.max_draft, limits.max_length - input_ids.shape[1] - 1) < 1:
            return input_ids, None
        with _layers_kept(self):
            candidates, logits = cls.get_candidates(self, input_ids, **kwargs)
        return (candidates, logits) if limits is None else limits.cut(input_ids, candidates, logits)

    generator.get_candidates = get_candidates


@contextmanager
def _layers_kept(generator: Any) -> Iterator[None]:
    """The model's number of layers is what it was, even if an early exit raises."""
    if getattr(generator, "assistant_early_exit", None) is None:
        yield
        return
    model = generator.assistant_model
    config = getattr(model, model.base_model_prefix).config
    layers = config.num_hidden_layers
    try:
        yield
    finally:
        config.num_hidden_layers = layers


def keep_assistant_apart(generator: Any, input_ids: torch.Tensor) -> None:
    """Have an assistant's generator use a replay cache of its own, on this instance only.

    Its `generate` gets a copy of the target's settings, of which those of the cache, of compilation and of stop strings
    (which need a tokenizer that it is not given) are not for it. Without a mask it would take a generated pad token for
    padding. And where tokens are translated between two vocabularies, it may have to take back more than its cache can:
    it then starts over.
    """
    config = generator.generation_config
    config.cache_config = config.cache_implementation = config.compile_config = config.stop_strings = None
    if generator.assistant_kwargs.get("attention_mask") is None and not hasattr(generator, "assistant_tokenizer"):
        generator.assistant_kwargs["attention_mask"] = torch.ones_like(
            input_ids, device=generator.assistant_model.device
        )
    cls, reference = type(generator), weakref.ref(generator)
    signature = inspect.signature(cls._update_past_and_masks)

    def update(new_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self: Any = reference()
        bound = signature.bind(self, new_ids, *args, **kwargs)
        bound.apply_defaults()
        length, cache, given = new_ids.shape[-1], cache_argument(self.assistant_kwargs), bound.arguments
        if isinstance(cache, ReplayCache) and not cache.cursor.fresh:
            kept = length - 1 - given.get("remove_from_pkv", 0) - given["num_added_tokens"]
            if int(cache.get_seq_length()) - kept > int(cache.cursor.tensors()[2].min()):
                cache.reset()
                cache.activate_past_recording()
        if isinstance(cache, ReplayCache) and cache.cursor.fresh:
            if "remove_from_pkv" in given:
                given["remove_from_pkv"] = 0
            given["num_added_tokens"] = min(given["num_added_tokens"], length - 1)
        return cls._update_past_and_masks(*bound.args, **bound.kwargs)

    generator._update_past_and_masks = update
