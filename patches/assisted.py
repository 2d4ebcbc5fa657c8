"""Assisted generation through transformers' own loop, for supported models on a replay cache.

transformers refuses it for models with a recurrent state, which its caches cannot roll back. While the patches are on
it does not, and the wrapped loop refuses every cache but a `ReplayCache` instead.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from replay_transformers.cache import ReplayCache
from replay_transformers.geometry import text_config
from replay_transformers.patches.batched import generate_in_rows, refusal
from replay_transformers.patches.drafts import (
    DFLASH,
    DraftLimits,
    check_drafter,
    drafted_tokens,
    keep_assistant_apart,
    limit_drafts,
    uses_mtp,
    warn_of_two,
)
from replay_transformers.patches.generate import GenerateSettings, borrow
from replay_transformers.patches.row_models import runs_in_rows
from replay_transformers.patches.versions import cache_argument

__all__ = ["stateful_class", "wrap_speculative_sampling", "wrappers"]

ASSISTED = "assisted_generation"
NEEDS_TOKENIZERS = "different tokenizers"  # in transformers' message about an assistant with another vocabulary


def stateful_class(decoder: type) -> type | None:
    """The base class of a family's models that tells transformers to refuse assisted generation, if there is one."""
    return next((base for base in decoder.__mro__ if vars(base).get("_is_stateful") is True), None)


def wrappers(settings: GenerateSettings, families: tuple[type, ...]) -> dict[str, Callable[[Any], Any]]:
    """Methods of `GenerationMixin` by name, and what to wrap them in.

    Args:
        settings: shared by the wrapped functions.
        families: base classes of the supported models.
    """
    return {
        "_validate_generation_mode": lambda original: _validate_mode(original, settings, families),
        "_assisted_decoding": lambda original: _assisted_decoding(original, settings, families),
        "_get_candidate_generator": lambda original: _candidate_generator(original, settings, families),
        "prepare_inputs_for_generation": lambda original: _prepare_inputs(original, settings),
    }


def _validate_mode(original: Callable[..., Any], settings: GenerateSettings, families: tuple[type, ...]) -> Any:
    """Also notes how much the call's drafter proposes: the caches are built for it."""

    @functools.wraps(original)
    def validate(self: Any, generation_mode: Any, generation_config: Any, mode_kwargs: Any, *args: Any) -> Any:
        assistant, is_ours = mode_kwargs.get("assistant_model"), isinstance(self, families)
        repeats = generation_config.num_return_sequences
        if is_ours and generation_mode == ASSISTED:
            if assistant is not None and not hasattr(assistant, "config"):
                raise ValueError(
                    f"assistant_model must be a model, got {assistant!r}: load one with "
                    "AutoModelForCausalLM.from_pretrained"
                )
            check_drafter(self, generation_config)
            warn_of_two(generation_config, assistant)
            generation_config.num_return_sequences = 1  # more are a batch, which transformers' own loop cannot take
        try:
            result = original(self, generation_mode, generation_config, mode_kwargs, *args)
        except ValueError as error:
            if not is_ours or NEEDS_TOKENIZERS not in str(error):
                raise
            sizes = [text_config(config).vocab_size for config in (self.config, assistant.config)]
            raise ValueError(
                f"the model has {sizes[0]} tokens and the assistant {sizes[1]}: pass both tokenizer= and "
                "assistant_tokenizer= to let it draft for one prompt at a time; for a batch take an assistant with the "
                "model's tokenizer"
            ) from error
        finally:
            generation_config.num_return_sequences = repeats
        if is_ours or isinstance(assistant, families):
            call = settings.call()
            call.drafts = drafted_tokens(self, generation_config, assistant, call.asked)
        return result

    return validate


def _assisted_decoding(original: Callable[..., Any], settings: GenerateSettings, families: tuple[type, ...]) -> Any:
    @functools.wraps(original)
    def assisted_decoding(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, families):
            return original(self, input_ids, *args, **kwargs)
        cache, call, config = cache_argument(kwargs), settings.call(), kwargs["generation_config"]
        if not isinstance(cache, ReplayCache):
            got = "none" if cache is None else f"a {type(cache).__name__}"
            raise ValueError(
                f"assisted generation with {type(self).__name__} needs a cache that can roll a recurrent state back: "
                f'pass cache_implementation="replay" or "replay_static", or a ReplayCache, got {got}'
            )
        given = inspect.signature(original).bind(self, input_ids, *args, **kwargs).arguments
        reason = refusal(config, given.get("synced_gpus", False), given.get("assistant_tokenizer"))
        names = ("logits_processor", "stopping_criteria", "streamer", "assistant_model")
        processors, criteria, streamer, assistant = (given.get(name) for name in names)
        if reason is None and assistant is not None and not isinstance(assistant, families):
            reason = None if runs_in_rows(assistant) else f"{type(assistant).__name__} as an assistant"
        if reason is None and call.drafts is not None:
            lend = functools.partial(borrow, assistant, settings, call, rows=input_ids.shape[0])
            is_lent = any(lent is cache for _, _, lent in call.borrowed)
            keep = config.return_dict_in_generate or not is_lent
            return generate_in_rows(
                self,
                input_ids,
                processors,
                criteria,
                config,
                streamer,
                assistant,
                lend,
                settings.forwards,
                call.drafts,
                keep,
                given["model_kwargs"],
            )
        if input_ids.shape[0] > 1:
            raise NotImplementedError(
                f"{reason} takes one prompt at a time in assisted generation, got a batch of {input_ids.shape[0]}"
            )
        if uses_mtp(config):
            raise NotImplementedError(f"{reason} is not supported with use_mtp")
        call.seen = _tokens_seen(cache, input_ids, config, kwargs.get("attention_mask"))
        if call.seen and getattr(config, "speculation_type", None) == DFLASH:
            raise NotImplementedError(
                f"speculation_type='dflash' drafts from states of the whole prompt, and the cache holds {call.seen} "
                "tokens already: start with an empty cache, or with another drafter"
            )
        max_draft = cache.replay_config.max_draft
        call.limits = DraftLimits(max_draft, config.max_length, kwargs["stopping_criteria"], config.do_sample)
        if config.compile_config is None:
            config.disable_compile = True  # the number of tokens varies from forward to forward: a graph for each
        recording = cache.cursor.recording
        output = original(self, input_ids, *args, **kwargs)
        cache.cursor.recording = recording
        return output

    return assisted_decoding


def _tokens_seen(cache: ReplayCache, input_ids: torch.Tensor, config: Any, mask: torch.Tensor | None) -> int:
    """Tokens of ``input_ids`` that are in the cache already."""
    seen, length = int(cache.get_seq_length()), input_ids.shape[1]
    if not seen:
        return 0
    masked = getattr(config, "_mask_length", length) if mask is None else mask.shape[1]
    if masked != length or length <= seen:
        raise ValueError(
            f"assisted generation continues a cache with the whole sequence: the {seen} tokens in the cache and "
            f"at least one more, with a mask as long; got {length} tokens and a mask for {masked}"
        )
    return seen


def _prepare_inputs(original: Callable[..., Any], settings: GenerateSettings) -> Any:
    """The first forward of assisted decoding gets only what the cache has not seen, as in plain decoding."""

    @functools.wraps(original)
    def prepare_inputs(self: Any, input_ids: Any, next_sequence_length: Any = None, *args: Any, **kwargs: Any) -> Any:
        seen = settings.call().seen
        if seen and next_sequence_length is None and kwargs.get("is_first_iteration"):
            next_sequence_length = input_ids.shape[1] - seen
        return original(self, input_ids, next_sequence_length, *args, **kwargs)

    return prepare_inputs


def _candidate_generator(original: Callable[..., Any], settings: GenerateSettings, families: tuple[type, ...]) -> Any:
    @functools.wraps(original)
    def candidate_generator(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        call, is_ours = settings.call(), isinstance(self, families)
        generator = original(self, generation_config, *args, **kwargs)
        assistant = getattr(generator, "assistant_model", None)
        if is_ours or isinstance(assistant, families):
            limit_drafts(generator, call.limits if is_ours else None, call.most or call.drafts)
            if isinstance(generator, AssistedCandidateGenerator):
                keep_assistant_apart(generator, kwargs["input_ids"])
        return generator

    return candidate_generator


def wrap_speculative_sampling(original: Callable[..., Any], settings: GenerateSettings) -> Callable[..., Any]:
    """transformers' acceptance by probabilities, which does not stop at stop strings within the accepted tokens."""

    @functools.wraps(original)
    def speculative_sampling(
        candidates: torch.Tensor, logits: torch.Tensor, candidate_length: int, *args: Any, **kwargs: Any
    ) -> Any:
        accepted, matches = original(candidates, logits, candidate_length, *args, **kwargs)
        limits = settings.call().limits
        if limits is None:
            return accepted, matches
        kept = limits.cut_accepted(candidates[:, :-candidate_length], accepted)
        return kept, (matches if kept.shape[1] == accepted.shape[1] else kept.shape[1] - 1)

    return speculative_sampling
