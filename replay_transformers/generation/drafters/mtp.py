"""Multi-token prediction: a small head of the target itself drafts, from the target's own hidden states.

The head takes in, for one token after the other, its embedding and the target's last state at the token before, and
predicts the token behind it. From the second drafted token on the target has no state yet, and the head's own takes its
place. What it kept of those is forgotten at once, so that its cache never holds anything but true states.
"""

from typing import Protocol

import torch
from transformers.generation.logits_process import LogitsProcessorList

from replay_transformers.generation.acceptance import Draft
from replay_transformers.generation.drafters.base import draw
from replay_transformers.generation.row_cache import RowCache
from replay_transformers.generation.row_forward import RowForward
from replay_transformers.generation.rows import Rows

__all__ = ["Head", "MultiTokenPrediction"]

MOST_WAITING = 64  # tokens of rounds without a draft that the head is fed at once


class Head(Protocol):
    """What predicts the token after the next.

    Attributes:
        cached: layers of its cache.
        dtype: of its weights.
    """

    cached: int
    dtype: torch.dtype

    @property
    def implementation(self) -> str:
        """transformers' name of its attention."""

    def forward(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: RowCache,
    ) -> torch.Tensor:
        """States ``[B, T, hidden]`` that predict what comes behind the tokens.

        Args:
            tokens: int64 ``[B, T]``.
            states: ``[B, T, hidden]``, of the tokens before them.
            mask: as the attention takes it.
            positions: int64 ``[B, T]`` of the tokens.
            cache: keeps their keys and values; advanced already.
        """

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, vocabulary]`` of states ``[B, T, hidden]``."""


class MultiTokenPrediction:
    """Drafts of a head.

    Args:
        head: the head.
        most: tokens of the longest draft.
        processors: of the target's logits, applied to the head's as well.
        do_sample: draw the drafts, and say from which distribution.
        feed: the head's forwards on a cache of its own; by default on one that grows.
    """

    reads_states = True

    def __init__(
        self,
        head: Head,
        most: int,
        processors: LogitsProcessorList,
        do_sample: bool,
        feed: RowForward | None = None,
    ) -> None:
        self.head, self.most, self.processors, self.do_sample = head, most, processors, do_sample
        self._feed = feed or RowForward(RowCache(head.cached), head.forward, head.implementation, head.dtype)
        self.cache = self._feed.cache
        self._skipped = 0  # tokens of the prompt before those that the head has seen
        self._last: torch.Tensor  # [B, 1, hidden]: what predicts the token behind each row
        # States of accepted tokens that the head has not taken in: [B, n, hidden], of which the first int64 [B] count.
        self._waiting: torch.Tensor
        self._counts: torch.Tensor

    def start(self, rows: Rows, states: torch.Tensor | None) -> None:
        """Take in the prompts, as far as there are states of them."""
        assert states is not None
        count = min(states.shape[1], rows.prompt + 1)
        self._skipped = rows.prompt - count
        padding = rows.padding - self._skipped
        self.cache.begin(padding.clamp(min=0), (-padding).clamp(min=0) + 1)
        self._last = self._feed(rows.last(count), states[:, -count:])[:, -1:].clone()
        self._wait_for_nothing(rows, states)

    def draft(self, rows: Rows, length: int) -> Draft:
        """Exactly ``length`` tokens per row."""
        self._catch_up(rows)
        tokens, probabilities, state = rows.ids.new_empty(rows.batch, 0), [], self._last
        for place in range(length):
            logits = self.head.logits(state).to(tokens.device).float()
            following, drawn_from = draw(self.processors, rows, tokens, logits, self.do_sample)
            tokens = torch.cat([tokens, following], dim=1)
            if drawn_from is not None:
                probabilities.append(drawn_from)
            if place < length - 1:
                state = self._feed(following, state)
        counts = torch.full_like(rows.lengths, length)
        self.cache.reject(counts - 1, self._slots(rows))
        return Draft(tokens, counts, torch.cat(probabilities, dim=1) if probabilities else None)

    def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: torch.Tensor | None) -> None:
        """Keep the states of the accepted tokens, for the next draft."""
        assert states is not None
        places = self._counts[:, None] + torch.arange(states.shape[1], device=added.device)
        wider = torch.cat([self._waiting, torch.zeros_like(states)], dim=1)
        places = places.to(states.device)[..., None].expand(-1, -1, states.shape[2])
        self._waiting, self._counts = wider.scatter_(1, places, states), self._counts + added
        if self._waiting.shape[1] > MOST_WAITING:
            self._catch_up(rows)

    def _catch_up(self, rows: Rows) -> None:
        """Take in the accepted tokens of the last rounds, and not what is behind them in rows that have fewer."""
        waiting, counts = self._waiting, self._counts
        if waiting.shape[1] == 0:
            return
        places = (rows.lengths - counts)[:, None] + torch.arange(waiting.shape[1], device=counts.device)
        states = self._feed(rows.ids.gather(1, places.clamp(max=rows.ids.shape[1] - 1)), waiting)
        self.cache.reject(waiting.shape[1] - counts, self._slots(rows))
        last = (counts - 1).clamp(min=0).to(states.device)[:, None, None]
        reached = states.gather(1, last.expand(-1, -1, states.shape[2]))
        self._last = torch.where(counts.to(states.device)[:, None, None] > 0, reached, self._last)
        self._wait_for_nothing(rows, waiting)

    def _wait_for_nothing(self, rows: Rows, states: torch.Tensor) -> None:
        self._waiting = states.new_empty(rows.batch, 0, states.shape[2])
        self._counts = torch.zeros_like(rows.lengths)

    def _slots(self, rows: Rows) -> int:
        """Slots of the longest row in the head's cache, once it has seen all tokens: one for each but the first."""
        return rows.longest - 1 - self._skipped
