"""The drafter of a call, as the batched loop takes it.

It runs on caches of its own; where the target's forwards are compiled, its forwards are compiled or recorded as well.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import torch
from transformers import CompileConfig

from replay_transformers.config import ReplayConfig
from replay_transformers.generation.drafters.assistant import Assistant
from replay_transformers.generation.drafters.base import Drafter, RowModel
from replay_transformers.generation.drafters.mtp import MultiTokenPrediction
from replay_transformers.generation.drafters.prompt_lookup import PromptLookup
from replay_transformers.generation.row_cache import RowCache
from replay_transformers.generation.row_forward import RowForward, weakly
from replay_transformers.geometry import FAMILIES, text_config
from replay_transformers.patches.capture import recorded
from replay_transformers.patches.drafts import uses_mtp
from replay_transformers.patches.mtp import MtpHead, head_of
from replay_transformers.patches.placement import is_on_one_device
from replay_transformers.patches.pool import Pool
from replay_transformers.patches.row_models import AttentionRows, ReplayRows, attention_forward, first_of

__all__ = ["FixedShapes", "drafter_of", "one_length_each"]

DEFAULT_NGRAM = 2  # transformers' own


class FixedShapes:
    """What a call needs to run its drafter with shapes that repeat.

    Args:
        pool: recorded forwards that are idle.
        rows: of the batch.
        tokens: of the longest sequence, rejected drafts included.
        levels: lengths that drafts have.
        compile_config: how the target's forwards are compiled.
    """

    def __init__(
        self,
        pool: Pool[RowForward],
        rows: int,
        tokens: int,
        levels: Iterable[int],
        compile_config: CompileConfig | None,
    ) -> None:
        self.pool, self.rows, self.tokens = pool, rows, tokens
        self.levels, self.compile_config = frozenset(levels), compile_config
        self._lent: list[tuple[Any, Hashable, RowForward]] = []

    def borrow(
        self,
        owner: Any,
        run: Callable[..., torch.Tensor],
        layers: int,
        implementation: str,
        dtype: torch.dtype,
        modules: Iterable[torch.nn.Module],
        lengths: Collection[int],
    ) -> RowForward:
        """Forwards of ``owner`` on a cache with room for all tokens, from the pool or new; see `RowForward`.

        Args:
            run: must not refer to the owner.
            modules: whose weights and buffers a recording reads where they are.
        """
        addresses = tuple(
            tensor.data_ptr() for module in modules for tensor in (*module.parameters(), *module.buffers())
        )
        shape = (self.rows, self.tokens, frozenset(lengths), torch.is_inference_mode_enabled())
        key = (*shape, implementation, dtype, addresses)
        forward = self.pool.take(owner, key)
        if forward is None:
            cache = RowCache(layers, slots=self.tokens)
            forward = RowForward(cache, run, implementation, dtype, recorded, lengths)
        self._lent.append((owner, key, forward))
        return forward

    def give_back(self) -> None:
        """Leave what was borrowed to later calls; after an exception it is left to the garbage collector instead."""
        while self._lent:
            self.pool.give_back(*self._lent.pop())


def drafter_of(
    model: Any,
    config: Any,
    assistant: Any,
    lend: Callable[..., Any],
    processors: Any,
    drafts: int,
    arguments: dict[str, Any],
    fixed: FixedShapes | None,
) -> Drafter:
    """What drafts in a call of the target ``model`` with these arguments.

    Args:
        config: of the generation.
        lend: gives the assistant a replay cache.
        drafts: the longest draft.
        fixed: where the target's forwards are compiled.
    """
    if config.prompt_lookup_num_tokens is not None:
        return PromptLookup(drafts, config.max_matching_ngram_size or DEFAULT_NGRAM)
    if uses_mtp(config):
        head = head_of(model)
        feed = _head_forwards(head, fixed) if fixed is not None and is_on_one_device(model) else None
        return MultiTokenPrediction(head, drafts, processors, config.do_sample, feed)
    # rows that are finished keep taking part, and grow in the assistant's cache
    if fixed is not None and (fixed.rows > 1 or not is_on_one_device(assistant)):
        fixed = None
    rows = _assistant_rows(assistant, lend, drafts, arguments, fixed)
    return Assistant(rows, drafts, processors, config.do_sample)


def one_length_each(config: CompileConfig | None) -> CompileConfig:
    """Every length of a forward is compiled by itself, unless the user says otherwise: few occur."""
    config = CompileConfig() if config is None else config
    return config if config.dynamic is not None else dataclasses.replace(config, dynamic=False)


def _head_forwards(head: MtpHead, fixed: FixedShapes) -> RowForward:
    # between drafts it takes in what the target had verified: a token, or a draft and one more
    lengths = {level + 1 for level in fixed.levels}
    return fixed.borrow(head, weakly(head.forward), head.cached, head.implementation, head.dtype, head.modules, lengths)


def _assistant_rows(
    assistant: Any, lend: Callable[..., Any], drafts: int, arguments: dict[str, Any], fixed: FixedShapes | None
) -> RowModel:
    config = text_config(assistant.config)
    if config.model_type not in FAMILIES:
        if fixed is None:
            return AttentionRows(assistant)
        forward = fixed.borrow(
            assistant, attention_forward(assistant), config.num_hidden_layers, assistant.config._attn_implementation,
            assistant.dtype, [assistant], Assistant.lengths,
        )  # fmt: skip
        return AttentionRows(assistant, forward)
    settings = ReplayConfig(max_draft=max(ReplayConfig().max_draft, drafts + Assistant.spare))
    first = first_of(assistant, arguments)
    if fixed is None:
        return ReplayRows(assistant, lend(settings), assistant.__call__, first)
    call = assistant.get_compiled_call(one_length_each(fixed.compile_config))
    return ReplayRows(assistant, lend(settings, max_cache_len=fixed.tokens), call, first, lengths=Assistant.lengths)
