"""Models of transformers as the batched loop sees them: rows have taken in different numbers of tokens."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from replay_transformers.cache import ReplayCache
from replay_transformers.generation.row_cache import RowCache
from replay_transformers.generation.row_forward import RowForward, weakly
from replay_transformers.generation.rows import Rows
from replay_transformers.geometry import text_config
from replay_transformers.patches.versions import generate_cache_name

__all__ = ["AttentionRows", "ReplayRows", "TargetRows", "attention_forward", "first_of", "runs_in_rows"]

# what a prompt's forward takes and later ones do not, or what is given anew
IMAGES = (
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, "mm_encoder_outputs", "mm_token_type_ids", "image_grid_thw",
    "video_grid_thw", "second_per_grid_ts",
)  # fmt: skip
ONLY_FIRST = (
    *IMAGES, "attention_mask", "position_ids", "cache_position", "token_type_ids", "inputs_embeds", "logits_to_keep",
    "next_sequence_length", "is_first_iteration",
)  # fmt: skip


ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
POSITIONS_FROM_MASKS = ("bloom",)


def first_of(assistant: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the target's prompt consists of besides tokens and an assistant takes as well: images."""
    names = set(inspect.signature(assistant.forward).parameters) & set(IMAGES)
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Of a left-padded prompt, int64 ``[B, S]``."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _last_states(output: Any) -> torch.Tensor | None:
    return output.hidden_states[-1] if output.get("hidden_states") is not None else None


class ReplayRows:
    """A model on a `ReplayCache`.

    Args:
        model: the model, whose decoder is patched.
        cache: its cache, empty or not.
        call: runs a forward; `model` itself or a compiled one.
        first: what the forward over the prompts gets besides (images).
        arguments: what the others get.
        lengths: numbers of tokens per row that ``call`` is for, where it is not for all.
    """

    def __init__(
        self,
        model: Any,
        cache: ReplayCache,
        call: Callable[..., Any],
        first: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
        lengths: Collection[int] | None = None,
    ) -> None:
        self.model, self.cache, self.call, self.lengths = model, cache, call, lengths
        self.first, self.arguments = first or {}, arguments or {}
        self.mask: torch.Tensor | None = None
        self.is_fixed = cache.is_compileable
        self.states: torch.Tensor | None = None
        self._more = 0  # tokens that the cache held and the rows do not show
        self._shift: torch.Tensor | None = None  # int64 [B]: of positions, where they do not count tokens from 0

    def prefill(self, rows: Rows) -> torch.Tensor:
        """Take in the prompts; logits ``[B, vocabulary]`` of the token behind them."""
        mask, ids = rows.prompt_mask, rows.ids[:, : rows.prompt]
        named = {generate_cache_name(): self.cache, "use_cache": True, "return_dict": True, **self.first}
        places = None if self._counts_positions else positions(mask)
        output = self.model(input_ids=ids, attention_mask=mask, position_ids=places, logits_to_keep=1, **named)
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
        is_own = self._counts_positions or self._shift is not None
        places = self._positions(tokens) if is_own else None
        call = self.call if self.lengths is None or tokens.shape[1] in self.lengths else self.model
        output = call(input_ids=tokens, attention_mask=self.mask, position_ids=places, **inputs)
        self.states = _last_states(output)
        return output.logits

    @property
    def _counts_positions(self) -> bool:
        """Whether the model (a vision-language one) does it itself, and later on by one length for all rows."""
        return hasattr(getattr(self.model, "model", None), "rope_deltas")

    def _positions(self, tokens: torch.Tensor) -> torch.Tensor:
        shifts = self.model.model.rope_deltas if self._counts_positions else self._shift
        starts = self.cache.row_lengths().to(tokens.device)
        if self.mask is not None:
            starts = starts - (~self.mask).sum(1).to(tokens.device)
        if shifts is not None:
            starts = starts + shifts.view(-1).to(tokens.device)
        return starts[:, None] + torch.arange(tokens.shape[1], device=starts.device)

    def reject(self, rejected: torch.Tensor, longest: int | None = None) -> None:
        """Forget the last ``rejected`` (int64 ``[B]``) uncommitted tokens and commit the others."""
        self.cache.reject_rows(rejected, None if longest is None else longest + self._more)


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
        later = {name: value for name, value in arguments.items() if name not in ONLY_FIRST}
        super().__init__(model, cache, call, arguments=later)
        self._prefill, self._mask, self._places = prefill, mask, arguments.get("position_ids")

    def prefill(self, rows: Rows) -> torch.Tensor:
        """Take in what the cache has not seen of the prompts."""
        output = self._prefill()
        self.states = _last_states(output)
        logits = output.logits[:, -1].to(rows.ids.device, copy=True)
        self.begin(rows, self._mask)
        if self._places is not None and self._places.ndim == 2 and not self._counts_positions:
            # the user's own, or of a prompt that is padded on the right: transformers goes on from the last one
            hidden = 0 if self.mask is None else (~self.mask).sum(1)
            shift = self._places[:, -1] + 1 - (self.cache.row_lengths().to(self._places.device) - hidden)
            self._shift = shift if bool(shift.any()) else None
        return logits

    def forget(self, rows: Rows) -> None:
        """After an exception: reject what the rows do not have, or else mark the cache as one that broke off."""
        cursor = self.cache.cursor
        if cursor.plan is not None or cursor.broken or not cursor.ragged:
            return
        surplus = self.cache.row_lengths().to(rows.lengths.device) - (rows.lengths - 1 + self._more)
        rejected = surplus.minimum(cursor.tensors()[2].to(rows.lengths.device))
        if bool((surplus < 0).any()) or bool((surplus - rejected > 1).any()):
            cursor.broken = True
            return
        self.cache.reject_rows(rejected.clamp(min=0), rows.longest + self._more)
        if len(set(self.cache.row_lengths().tolist())) == 1:
            self.cache.join_rows()


def runs_in_rows(model: Any) -> bool:
    """Whether a model of another family than the supported ones can draft for rows of different lengths.

    It must have nothing but attention, and take its positions from `position_ids` and its mask as it is given.
    """
    config = text_config(model.config)
    kinds = set(getattr(config, "layer_types", None) or ()) <= ATTENTION
    return kinds and not getattr(model, "_is_stateful", False) and config.model_type not in POSITIONS_FROM_MASKS


def attention_forward(model: Any) -> Callable[..., torch.Tensor]:
    """Runs a model without a recurrent state as `RowForward` asks for it, and does not keep it alive: its logits."""
    call = weakly(model.__call__)

    def run(tokens: torch.Tensor, mask: Any, positions: torch.Tensor, cache: RowCache) -> torch.Tensor:
        named = {generate_cache_name(): cache, "use_cache": True, "return_dict": True}
        return call(input_ids=tokens, attention_mask=mask, position_ids=positions, **named).logits

    return run


class AttentionRows:
    """A model without a recurrent state, on a `RowCache`.

    Args:
        forward: its forwards, made of `attention_forward`; by default on a cache that grows.

    Raises:
        NotImplementedError: a model that has one.
    """

    def __init__(self, model: Any, forward: RowForward | None = None) -> None:
        if not runs_in_rows(model):
            raise NotImplementedError(
                f"{type(model).__name__} cannot draft for a batch: it has layers that are no attention, or positions "
                "that cannot be given to it row by row"
            )
        if forward is None:
            cache = RowCache(text_config(model.config).num_hidden_layers)
            run = attention_forward(model)
            forward = RowForward(cache, run, model.config._attn_implementation, model.dtype)
        self.model, self.forward, self.cache = model, forward, forward.cache

    def prefill(self, rows: Rows) -> torch.Tensor:
        """Take in the prompts; logits ``[B, vocabulary]`` of the token behind them."""
        self.cache.begin(rows.padding)
        self.cache.advance(rows.prompt)
        ids, mask = rows.ids[:, : rows.prompt], rows.prompt_mask
        return self.forward.run(ids, mask, self.cache.positions(), self.cache)[:, -1]

    def reject(self, rejected: torch.Tensor, longest: int | None = None) -> None:
        """Forget the last ``rejected`` (int64 ``[B]``) tokens of each row."""
        self.cache.reject(rejected, longest)
