"""What the rounds of assisted generation come to: tokens per forward, and how many drafts are accepted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from replay_transformers.generation.acceptance import Accepted, Draft
from replay_transformers.generation.loop import Loop
from replay_transformers.generation.rows import Rows

__all__ = ["Rounds", "watched"]


@dataclass
class Rounds:
    """The forwards of one call. Finished rows do not count.

    Args:
        choices: one per forward of the target, that of the prompts first: drafts of each row and how many of them were
            accepted, int64 ``[B]``, and which rows were not finished, bool ``[B]``.
    """

    choices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def forwards(self) -> int:
        """Forwards of the target behind the prompts."""
        return max(len(self.choices) - 1, 0)

    @property
    def drafted(self) -> int:
        """Drafts of all rows."""
        return sum(int((drafts * active).sum()) for drafts, _, active in self.choices[1:])

    @property
    def accepted(self) -> int:
        """Accepted drafts of all rows."""
        return sum(int((accepted * active).sum()) for _, accepted, active in self.choices[1:])

    @property
    def turns(self) -> int:
        """Rows that took part in those forwards: each row grows by one token per turn, and by its accepted drafts."""
        return sum(int(active.sum()) for _, _, active in self.choices[1:])


@contextmanager
def watched() -> Iterator[Rounds]:
    """The rounds of the one `generate` call with a drafter that is made within, by any thread.

    References are kept, nothing is computed or waited for until a figure is asked for.
    """
    rounds, original = Rounds(), Loop.choose

    def choose(self: Any, rows: Rows, draft: Draft, scores: torch.Tensor) -> Accepted:
        accepted = original(self, rows, draft, scores)
        rounds.choices.append((draft.counts, accepted.drafts, rows.active))
        return accepted

    Loop.choose = choose  # type: ignore[method-assign]
    try:
        yield rounds
    finally:
        Loop.choose = original  # type: ignore[method-assign]
