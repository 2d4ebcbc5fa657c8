"""The sequences of a batch whose rows grow by different numbers of tokens."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Answer", "Rows"]

GROWTH = 256  # columns that are added at a time


class Answer:
    """Numbers on their way to the host.

    Args:
        values: int64 ``[n, B]``.
        grown: tokens by which rows may have grown since what was asked before it.
    """

    def __init__(self, values: torch.Tensor, grown: int) -> None:
        self.grown = grown
        self._arrived: Any = None
        self._values = values
        self._heard: list[list[int]] | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    @property
    def is_heard(self) -> bool:
        """Whether the values have been waited for."""
        return self._heard is not None

    def get(self) -> list[list[int]]:
        """The values, waited for."""
        if self._heard is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._heard = self._values.tolist()
        return self._heard


class Rows:
    """Token ids per row, each row as long as it is, on the device; nothing here waits for it.

    Args:
        ids: prompts, int64 ``[B, S]``, padded on the left.
        mask: ``[B, S]``, 0 for padding; None without any.
        pad: the token that fills what a row has not got.

    Attributes:
        ids: int64 ``[B, at least the longest row]``.
        lengths: int64 ``[B]``, tokens of each row, padding included.
        padding: int64 ``[B]``, padding tokens on the left of each row.
        active: bool ``[B]``, the rows that are not finished.
        host_lengths, host_active: the same as lists, as of the last answer that was heard.
        unheard: tokens by which rows may have grown since then.
        limit: tokens that no row exceeds, if there is such a number.
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor | None, pad: int) -> None:
        batch, self.prompt = ids.shape
        self.pad = pad
        self.ids = ids.to(torch.int64, copy=True)
        self.lengths = torch.full((batch,), self.prompt, dtype=torch.int64, device=ids.device)
        self.padding = torch.zeros_like(self.lengths)
        if mask is not None and mask.shape[1] >= self.prompt:
            self.padding = (mask[:, -self.prompt :].cumsum(1) == 0).sum(1).to(ids.device)
        self.active = torch.ones(batch, dtype=torch.bool, device=ids.device)
        self.host_lengths = [self.prompt] * batch
        self.host_active = [True] * batch
        self.unheard = self._unasked = 0
        self.limit: int | None = None

    @property
    def batch(self) -> int:
        """Rows."""
        return self.ids.shape[0]

    @property
    def prompt_mask(self) -> torch.Tensor:
        """Of the prompts ``[B, S]``: int64, 0 for padding on the left and 1 elsewhere."""
        return (torch.arange(self.prompt, device=self.ids.device) >= self.padding[:, None]).long()

    @property
    def longest(self) -> int:
        """Tokens of the longest row; more, where rows have grown and the host has not heard how much."""
        most = max(self.host_lengths) + self.unheard
        return most if self.limit is None or not self.unheard else min(most, max(self.limit, max(self.host_lengths)))

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens behind the longest row."""
        missing = self.longest + tokens - self.ids.shape[1]
        if missing > 0:
            columns = self.ids.new_full((self.batch, max(missing, GROWTH)), self.pad)
            self.ids = torch.cat([self.ids, columns], dim=1)

    def last(self, count: int = 1) -> torch.Tensor:
        """The last ``count`` tokens of every row, int64 ``[B, count]``; padding where a row has fewer."""
        back = torch.arange(count, 0, -1, device=self.ids.device)
        places = self.lengths[:, None] - back
        return self.ids.gather(1, places.clamp(min=0)).masked_fill(places < 0, self.pad)

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Add the first ``counts`` (int64 ``[B]``) of the tokens ``[B, T]`` to each row, in place."""
        self.ids = self._with(tokens, counts)
        self.lengths += counts
        self.unheard, self._unasked = self.unheard + tokens.shape[1], self._unasked + tokens.shape[1]

    def followed_by(self, tokens: torch.Tensor) -> torch.Tensor:
        """A copy of `ids` in which every row goes on with all its tokens ``[B, T]``."""
        return self._with(tokens, torch.full_like(self.lengths, tokens.shape[1]))

    def _with(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        self.reserve(tokens.shape[1])
        order = torch.arange(tokens.shape[1], device=tokens.device)
        places = self.lengths[:, None] + order
        kept = torch.where(order < counts[:, None], tokens, self.ids.gather(1, places))
        return self.ids.scatter(1, places, kept)

    def ask(self, *more: torch.Tensor, agree: Callable[..., None] | None = None) -> Answer:
        """Send lengths and activity to the host, with more int64 ``[B]`` tensors, in one transfer.

        Args:
            agree: overwrites what is sent with what another process sends.
        """
        grown, self._unasked = self._unasked, 0
        values = torch.stack([self.lengths, self.active.to(torch.int64), *more])
        if agree is not None:
            agree(values)
        return Answer(values, grown)

    def hear(self, answer: Answer) -> list[list[int]]:
        """Take note of what was asked for: what came with lengths and activity. Answers are heard in their order.

        One that was heard already says the same again and changes nothing.
        """
        is_new, values = not answer.is_heard, answer.get()
        if is_new:
            self.host_lengths, self.host_active = values[0], [bool(value) for value in values[1]]
            self.unheard -= answer.grown
        return values[2:]

    def read(self, *more: torch.Tensor) -> list[list[int]]:
        """Ask and hear at once."""
        return self.hear(self.ask(*more))

    def finished(self) -> torch.Tensor:
        """The sequences ``[B, longest]``, shorter ones padded on the right."""
        order = torch.arange(self.longest, device=self.ids.device)
        return self.ids[:, : self.longest].masked_fill(order >= self.lengths[:, None], self.pad)
