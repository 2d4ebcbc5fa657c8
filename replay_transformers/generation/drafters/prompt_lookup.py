"""Prompt lookup: a row's last tokens have been there before, and what followed then is proposed again.

The same choice as transformers' `PromptLookupCandidateGenerator`, for all rows at once: the longest n-gram at the end
of the row that occurs earlier in it, and its first occurrence.
"""

import torch

from replay_transformers.generation.acceptance import Draft
from replay_transformers.generation.rows import Rows

__all__ = ["PromptLookup"]


class PromptLookup:
    """Drafts copied from the row itself.

    Args:
        most: tokens of the longest draft.
        ngram: tokens of the longest n-gram that is looked up.
    """

    reads_states = False

    def __init__(self, most: int, ngram: int) -> None:
        self.most, self.ngram = most, ngram

    def start(self, rows: Rows, states: torch.Tensor | None) -> None:
        """Nothing to prepare."""

    def draft(self, rows: Rows, length: int) -> Draft:
        """Up to ``length`` tokens that followed the first occurrence of the longest n-gram."""
        begin = torch.zeros_like(rows.lengths)  # 0: none found
        for size in range(min(self.ngram, rows.longest - 1), 0, -1):
            windows = rows.ids[:, : rows.longest].unfold(1, size, 1)
            places = torch.arange(windows.shape[1], device=begin.device)
            is_match = (windows == rows.last(size)[:, None]).all(2)
            # behind the padding, and with at least one token behind it
            is_match &= (places >= rows.padding[:, None]) & (places + size < rows.lengths[:, None])
            found = torch.where(is_match.any(1), is_match.to(torch.int64).argmax(1) + size, 0)
            begin = torch.where(begin > 0, begin, found)
        counts = torch.where(begin > 0, (rows.lengths - begin).clamp(max=length), 0)
        places = begin[:, None] + torch.arange(length, device=begin.device)
        return Draft(rows.ids.gather(1, places.clamp(max=rows.ids.shape[1] - 1)), counts)

    def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: torch.Tensor | None) -> None:
        """Nothing to keep."""
