"""Models of transformers as the batched loop sees them: forwards whose rows have taken in different numbers of tokens."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from replay_transformers.cache import ReplayCache
from replay_transformers.generation.rows import Rows
from replay_transformers.patches.versions import generate_cache_name

__all__ = ["AttentionRows", "ReplayRows", "TargetRows"]

# what a prompt's forward takes and later ones do not, or what is given anew
ONLY_FIRST = (
    "attention_mask", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "inputs_embeds",
    "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "logits_to_keep",
    "next_sequence_length", "is_first_iteration",
)  # fmt: skip


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Of a left-padded prompt, int64 ``[B, S]``."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


class ReplayRows:
    """A model on a `ReplayCache`.

    Args:
        model: the model, whose decoder is patched.
        cache: its cache, empty or not.
        call: runs a forward; `model` itself or a compiled one.
        arguments: what every forward gets besides.
    """

    def __init__(self, model: Any, cache: ReplayCache, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.model, self.cache, self.call, self.arguments = model, cache, call, arguments
        self.mask: torch.Tensor | None = None
        self.is_fixed = cache.is_compileable
        self.states: torch.Tensor | None = None
        self._more = 0  # tokens that the cache held and the rows do not show

    def prefill(self, rows: Rows) -> torch.Tensor:
        """Take in the prompts; logits ``[B, vocabulary]`` of the token behind them."""
        mask = (torch.arange(rows.prompt, device=rows.ids.device) >= rows.padding[:, None]).long()
        ids = rows.ids[:, : rows.prompt]
        named = {generate_cache_name(): self.cache, "use_cache": True, **self.arguments}
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions(mask),
            logits_to_keep=1,
            return_dict=True,
            **named,
        )
        self.begin(rows, mask)
        return output.logits[:, -1]

    def begin(self, rows: Rows, mask: torch.Tensor | None) -> None:
        """From now on rows differ. The mask ``[B, tokens in the cache]`` is 0 for padding."""
        seen = int(self.cache.get_seq_length())
        self._more = seen - rows.prompt
        if mask is not None:
            width = self.cache.get_mask_sizes(0)[0] if self.is_fixed else seen
            held = mask[:, :seen].bool()
            self.mask = torch.ones(held.shape[0], width, dtype=torch.bool, device=held.device)
            self.mask[:, : held.shape[1]] = held
        self.cache.separate_rows()
        self.cache.activate_past_recording()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take in ``[B, T]`` more tokens, uncommitted; logits ``[B, T, vocabulary]`` behind each of them."""
        inputs = {generate_cache_name(): self.cache, "use_cache": True, "return_dict": True, **self.arguments}
        output = self.call(input_ids=tokens, attention_mask=self.mask, position_ids=self._positions(tokens), **inputs)
        self.states = output.hidden_states[-1] if output.get("hidden_states") is not None else None
        return output.logits

    def _positions(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Where a vision-language model counts positions by itself, and by one length for all rows; else None."""
        shifts = getattr(getattr(self.model, "model", None), "rope_deltas", 0)
        if isinstance(shifts, int):
            return None
        starts = self.cache.row_lengths()
        if self.mask is not None:
            starts = starts - (~self.mask).sum(1)
        if shifts is not None:
            starts = starts + shifts.view(-1).to(starts.device)
        return starts[:, None] + torch.arange(tokens.shape[1], device=starts.device)

    def reject(self, rejected: torch.Tensor, longest: int | None = None) -> None:
        """Forget the last ``rejected`` (int64 ``[B]``) uncommitted tokens and commit the others."""
        if longest is None:
            self.cache.cursor.commit(rejected)
            longest = int(self.cache.row_lengths().max()) - self._more
        else:
            self.cache.cursor.commit(rejected)
        self.cache.cursor.longest = longest + self._more


class TargetRows(ReplayRows):
    """The model whose `generate` was called.

    Args:
        prefill: runs the first forward: its output.
        mask: of all that is in the cache after it, ``[B, S]``; None without padding.
    """

    def __init__(
        self,
        model: Any,
        cache: ReplayCache,
        call: Callable[..., Any],
        arguments: dict[str, Any],
        prefill: Callable[[], Any],
        mask: torch.Tensor | None,
    ) -> None:
        super().__init__(model, cache, call, {k: v for k, v in arguments.items() if k not in ONLY_FIRST})
        self._prefill, self._mask = prefill, mask

    def prefill(self, rows: Rows) -> torch.Tensor:
        """Take in what the cache has not seen of the prompts."""
        output = self._prefill()
        self.states = output.hidden_states[-1] if output.get("hidden_states") is not None else None
        logits = output.logits[:, -1].clone()
        self.begin(rows, self._mask)
        return logits


class AttentionRows:
    """A model without a recurrent state, on a `DynamicCache`: rejected keys stay, and a mask hides them."""

    states: None = None

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, DynamicCache()
        self.seen = torch.empty(0)
        self.pending = 0

    def prefill(self, rows: Rows) -> torch.Tensor:
        """Take in the prompts; logits ``[B, vocabulary]`` of the token behind them."""
        self.seen = torch.arange(rows.prompt, device=rows.ids.device) >= rows.padding[:, None]
        self.pending = rows.prompt
        mask = self.seen.long()
        return self._call(rows.ids[:, : rows.prompt], mask, positions(mask))[:, -1]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take in ``[B, T]`` more tokens; logits ``[B, T, vocabulary]`` behind each of them."""
        rows, count = tokens.shape
        places = self.seen.sum(1, keepdim=True) + torch.arange(count, device=tokens.device)
        causal = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        mask = torch.cat([self.seen[:, None].expand(-1, count, -1), causal.expand(rows, -1, -1)], dim=2)[:, None]
        if self.model.config._attn_implementation != "sdpa":
            dtype = self.model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        self.seen = torch.cat([self.seen, torch.ones_like(tokens, dtype=torch.bool)], dim=1)
        self.pending += count
        return self._call(tokens, mask, places)

    def _call(self, tokens: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        named = {generate_cache_name(): self.cache, "use_cache": True, "return_dict": True}
        return self.model(input_ids=tokens, attention_mask=mask, position_ids=places, **named).logits

    def reject(self, rejected: torch.Tensor, longest: int | None = None) -> None:
        """Hide the last ``rejected`` (int64 ``[B]``) tokens since the last call."""
        recent = self.seen[:, -self.pending :]
        back = torch.arange(self.pending, 0, -1, device=recent.device)
        recent &= back > rejected[:, None]
        self.pending = 0
