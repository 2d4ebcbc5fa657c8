"""Assisted generation row by row: what transformers hands to its own loop, handed to ours."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from replay_transformers.cache import ReplayCache
from replay_transformers.generation.draft_length import FIRST_LENGTH, DraftLength
from replay_transformers.generation.drafters.mtp import MOST_WAITING
from replay_transformers.generation.loop import Kept, Loop
from replay_transformers.generation.processing import check_processors
from replay_transformers.generation.row_forward import RowForward
from replay_transformers.generation.rows import Rows
from replay_transformers.patches.agreement import agreement
from replay_transformers.patches.drafters import FixedShapes, drafter_of, one_length_each
from replay_transformers.patches.drafts import DFLASH
from replay_transformers.patches.pool import Pool
from replay_transformers.patches.row_models import ReplayRows, TargetRows
from replay_transformers.patches.versions import cache_argument, generate_cache_name

__all__ = ["generate_in_rows", "refusal"]

UNSTEADY = 3  # rounds of a length: one compiles, then one captures the target's forward, and one the drafter's
LAST_STATES = -1  # of all hidden states, those of the last layer; since transformers 5.23


def refusal(config: Any, synced_gpus: bool, assistant_tokenizer: Any) -> str | None:
    """Why a call cannot be served row by row; None if it can."""
    if config.assistant_early_exit is not None:
        return "assistant_early_exit"
    if getattr(config, "speculation_type", None) == DFLASH:
        return "speculation_type='dflash'"
    if assistant_tokenizer is not None:
        return "an assistant with another tokenizer"
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        return "assistant_ensemble_weight"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "output_attentions or output_hidden_states"
    return "synced_gpus" if synced_gpus else None


def generate_in_rows(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    streamer: Any,
    assistant_model: Any,
    lend: Callable[..., ReplayCache],
    forwards: Pool[RowForward],
    drafts: int,
    keep: bool,
    model_kwargs: dict[str, Any],
) -> Any:
    """Assisted generation, each row with as many tokens per round as it accepts.

    Args:
        model: the target. input_ids: prompts, int64 ``[B, S]``.
        logits_processor, stopping_criteria, config, streamer, assistant_model, model_kwargs: as transformers has them.
        lend: gives the assistant a cache. forwards: of drafters, those that are idle.
        drafts: the longest draft.
        keep: somebody may use the cache afterwards.

    Returns:
        what `generate` returns.
    """
    check_processors(logits_processor)
    cache = cache_argument(model_kwargs)
    assert isinstance(cache, ReplayCache)
    _check_new_tokens(cache, input_ids, config, model_kwargs.get("attention_mask"))
    if assistant_model is not None and input_ids.shape[1] == 0:
        raise ValueError("an assistant needs the prompt's token ids: pass input_ids, not inputs_embeds alone")
    # weights that accelerate offloads are on "meta", and run where the tokens are
    place = input_ids.device if model.device.type == "meta" else model.device
    if assistant_model is not None and assistant_model.device not in (place, torch.device("meta")):
        raise ValueError(f"the assistant is on {assistant_model.device} and the model on {place}: move one of them")
    rows = Rows(input_ids, model_kwargs.get("attention_mask"), _pad(config))
    is_compiled = model._valid_auto_compile_criteria(model_kwargs, config)
    levels = sorted({0, min(drafts, FIRST_LENGTH), drafts}) if cache.is_compileable else None
    fixed = None
    # what is cast on the way would be recorded as it happens to be now
    if is_compiled and levels is not None and not torch.is_autocast_enabled(input_ids.device.type):
        longest = max(config.max_length, cache.max_cache_len or 0)  # of a cache for several calls the same in all
        tokens = longest + drafts + MOST_WAITING
        fixed = FixedShapes(forwards, rows.batch, tokens, levels, config.compile_config)
    drafter = drafter_of(model, config, assistant_model, lend, logits_processor, drafts, model_kwargs, fixed)
    if drafter.reads_states:
        model_kwargs = model_kwargs | {"output_hidden_states": LAST_STATES}
    target = _target(model, input_ids, cache, config, is_compiled, model_kwargs)
    loop = Loop(
        target=target,
        drafter=drafter,
        length=DraftLength(drafts, cache.replay_config.draft_length, levels, UNSTEADY if is_compiled else 1),
        processors=logits_processor,
        criteria=stopping_criteria,
        do_sample=config.do_sample,
        max_length=config.max_length,
        scores=Kept() if config.return_dict_in_generate and config.output_scores else None,
        logits=Kept() if config.return_dict_in_generate and config.output_logits else None,
        put=None if streamer is None else streamer.put,
        shown=rows.prompt,
        agree=agreement(model),
        decoding=model._optimize_model_for_decode,  # for many tokens, as in a prompt, its way of experts is too dear
    )
    recording = cache.cursor.recording
    try:
        loop.run(rows)
    except BaseException:
        target.forget(rows)
        cache.cursor.recording = recording
        raise
    if fixed is not None:
        fixed.give_back()
    sequences = rows.finished()
    if keep:
        _even_out(target, rows, sequences)
    cache.cursor.recording = recording
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return sequences
    result: dict[str, Any] = {
        "sequences": sequences,
        "scores": None if loop.scores is None else loop.scores.by_token(),
        "logits": None if loop.logits is None else loop.logits.by_token(),
        generate_cache_name(): cache,
    }
    return GenerateDecoderOnlyOutput(**result)


def _check_new_tokens(cache: ReplayCache, input_ids: torch.Tensor, config: Any, mask: torch.Tensor | None) -> None:
    seen, length = int(cache.get_seq_length()), input_ids.shape[1]
    masked = getattr(config, "_mask_length", length) if mask is None else mask.shape[1]
    if seen and (length <= seen if masked == length else masked != seen + length):
        raise ValueError(
            f"the cache holds {seen} tokens, the prompt has {length} and its mask {masked}: continue a cache with the "
            "whole sequence, at least one token longer, or with new tokens and a mask for all of them"
        )


def _pad(config: Any) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)


def _target(
    model: Any,
    input_ids: torch.Tensor,
    cache: ReplayCache,
    config: Any,
    is_compiled: bool,
    arguments: dict[str, Any],
) -> TargetRows:
    call = model.get_compiled_call(one_length_each(config.compile_config)) if is_compiled else model.__call__
    others = {name: value for name, value in arguments.items() if value is not cache and name != "use_cache"}
    mask = arguments.get("attention_mask")
    return TargetRows(model, cache, call, others, lambda: model._prefill(input_ids, config, arguments), mask)


def _even_out(target: ReplayRows, rows: Rows, sequences: torch.Tensor) -> None:
    """Feed every row what the longest has and it has not, padding, and make the cache one of a single length again.

    It then holds what plain generation would have left in it.
    """
    cache, last = target.cache, sequences.shape[1] - 1
    seen = (rows.lengths - 1).tolist()
    most = cache.replay_config.max_draft
    while min(seen) < last:
        count = min(last - min(seen), most)
        begin = torch.tensor(seen, device=sequences.device)
        places = begin[:, None] + torch.arange(count, device=sequences.device)
        target.forward(sequences.gather(1, places.clamp(max=last)))
        taken = [min(last - length, count) for length in seen]
        seen = [length + new for length, new in zip(seen, taken, strict=True)]
        rejected = count - torch.tensor(taken, device=sequences.device)
        target.reject(rejected, max(seen))
    cache.join_rows()
