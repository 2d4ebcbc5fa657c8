"""The sequences of a batch whose rows grow by different numbers of tokens."""

import torch

__all__ = ["Rows"]

GROWTH = 256  # columns that are added at a time


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
        host_lengths, host_active: the same as lists, as of the last `read`.
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
        """Tokens of the longest row, as of the last `read`."""
        return max(self.host_lengths)

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

    def followed_by(self, tokens: torch.Tensor) -> torch.Tensor:
        """A copy of `ids` in which every row goes on with all its tokens ``[B, T]``."""
        return self._with(tokens, torch.full_like(self.lengths, tokens.shape[1]))

    def _with(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        self.reserve(tokens.shape[1])
        order = torch.arange(tokens.shape[1], device=tokens.device)
        places = self.lengths[:, None] + order
        kept = torch.where(order < counts[:, None], tokens, self.ids.gather(1, places))
        return self.ids.scatter(1, places, kept)

    def read(self, *more: torch.Tensor) -> list[list[int]]:
        """Bring lengths and activity to the host, with more int64 ``[B]`` tensors, in one transfer."""
        values = torch.stack([self.lengths, self.active.to(torch.int64), *more]).tolist()
        self.host_lengths, self.host_active = values[0], [bool(value) for value in values[1]]
        return values[2:]

    def finished(self) -> torch.Tensor:
        """The sequences ``[B, longest]``, shorter ones padded on the right."""
        order = torch.arange(self.longest, device=self.ids.device)
        return self.ids[:, : self.longest].masked_fill(order >= self.lengths[:, None], self.pad)
