"""Assisted generation of known texts with drafts that are right with a set probability, each row by itself."""

from dataclasses import dataclass, field

import torch

from replay_transformers.generation.acceptance import Accepted, Draft, accept_equal
from replay_transformers.generation.loop import Loop
from replay_transformers.generation.rows import Rows

from .speculative_loop import KnownDrafter


class ChanceText:
    """The sequences of a batch, and drafts of which each token is right with a probability.

    Args:
        ids: int64 ``[B, S]``, prompts and what follows, as far as drafts reach.
        chance: from 0 to 1. vocabulary: tokens there are.
    """

    def __init__(self, ids: torch.Tensor, chance: float, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(2)
        right = torch.rand(ids.shape, generator=generator).to(ids.device) < chance
        self.ids, self.drafts = ids, torch.where(right, ids, (ids + 1) % vocabulary)


def behind(rows: Rows, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` tokens of each row ``[B, S]`` that come behind what it has."""
    places = rows.lengths[:, None] + torch.arange(count, device=tokens.device)
    return tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))


class ChanceDrafter(KnownDrafter):
    """Proposes the drafts, behind what each row has."""

    text: ChanceText

    def draft(self, rows: Rows, length: int) -> Draft:
        """What comes next, right or wrong."""
        return Draft(behind(rows, self.text.drafts, length), self.counts)


@dataclass
class ChanceLoop(Loop):
    """The target takes its argmax and then chooses the known tokens.

    Args:
        text: the known sequences and their drafts.
        kept_rows: rows whose scores are kept, while they have fewer than ``kept_until`` tokens.
        kept: their scores ``[tokens, vocabulary]`` on the host, by row.
        grown: by how many tokens each row grew, round by round, int64 ``[B]``; a finished one by 0.
    """

    text: ChanceText = field(kw_only=True)
    kept_rows: list[int] = field(default_factory=list, kw_only=True)
    kept_until: int = field(default=0, kw_only=True)
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict, kw_only=True)
    grown: list[torch.Tensor] = field(default_factory=list, kw_only=True)

    def choose(self, rows: Rows, draft: Draft, scores: torch.Tensor) -> Accepted:
        """The known tokens; drafts are compared with them."""
        scores.argmax(-1)
        accepted = accept_equal(draft, behind(rows, self.text.ids, scores.shape[1]))
        if any(rows.host_lengths[row] < self.kept_until for row in self.kept_rows):
            self._keep(rows, accepted, scores)
        self.grown.append((accepted.drafts + 1) * rows.active)
        return accepted

    def _keep(self, rows: Rows, accepted: Accepted, scores: torch.Tensor) -> None:
        counts = (accepted.drafts + 1).tolist()
        for row in self.kept_rows:
            self.kept.setdefault(row, []).append(scores[row, : counts[row]].float().cpu())
