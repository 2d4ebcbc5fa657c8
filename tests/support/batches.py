"""Batches in which every row accepts what it accepts, under observation, and a drafter that knows the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from replay_transformers.generation.acceptance import Draft
from replay_transformers.generation.rows import Rows
from replay_transformers.patches import batched


@dataclass
class Rounds:
    """What happened in one call.

    Args:
        forwards: new tokens per row in each forward of the target on a cache, those over the prompts first.
        prefill: how many forwards those are. judged: how many there were by the end of the last round.
        drafted: length of each round's draft.
        proposed: tokens that each row had as its draft, round by round.
        added: tokens by which each row grew, round by round.
        drafter: the one that was used. rows: its rows.
    """

    forwards: list[int] = field(default_factory=list)
    prefill: int = 0
    judged: int = 0
    drafted: list[int] = field(default_factory=list)
    proposed: list[list[int]] = field(default_factory=list)
    added: list[list[int]] = field(default_factory=list)
    drafter: Any = None
    rows: Any = None

    def accepted(self) -> list[int]:
        """Drafts that were accepted, of every round and row that took part."""
        return [added - 1 for row in self.added for added in row if added]

    def check(self, accepting: int = 2, rejecting: bool = True, evened: bool = False, prompts: int = 1) -> None:
        """One forward per round, and so many over the prompts; rows that accept so many drafts; rows that reject some.

        With ``evened``, more forwards may have brought the rows of a cache that is returned to one length.
        """
        assert self.prefill == prompts
        assert self.forwards[self.prefill : self.judged] == [drafted + 1 for drafted in self.drafted]
        assert evened or self.judged == len(self.forwards), "one forward of the target per round"
        assert max(self.accepted()) >= accepting, f"no row accepts {accepting} drafts"
        rejected = [0]
        for proposed, grown in zip(zip(*self.proposed, strict=True), zip(*self.added, strict=True), strict=True):
            active = [drafts - (added - 1) for drafts, added in zip(proposed, grown, strict=True) if added]
            rejected += active[:-1]  # in a row's last round drafts may be left out for its length
        assert not rejecting or max(rejected) > 0, "no row rejects a draft"


@contextmanager
def observed(model: Any, replace: Callable[[Any], Any] | None = None, is_compiled: bool = False) -> Iterator[Rounds]:
    """Notes what the calls of `generate` within do; ``replace`` gives another drafter in place of the one built.

    Forwards of a model that is compiled are not counted: the hook would be compiled as well.
    """
    rounds, original = Rounds(), batched.drafter_of

    class Watched:
        def __init__(self, drafter: Any) -> None:
            self.drafter, self.most, self.reads_states = drafter, drafter.most, drafter.reads_states
            rounds.drafter = drafter

        def start(self, rows: Rows, states: Any) -> None:
            rounds.rows, rounds.prefill = rows, len(rounds.forwards)
            self.drafter.start(rows, states)

        def draft(self, rows: Rows, length: int) -> Draft:
            self.latest = self.drafter.draft(rows, length)
            return self.latest

        def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: Any) -> None:
            rounds.judged = len(rounds.forwards)
            rounds.drafted.append(drafted)
            rounds.proposed.append(self.latest.counts.tolist() if drafted else [0] * rows.batch)
            rounds.added.append(added.tolist())
            self.drafter.verified(rows, drafted, added, states)

    def build(*args: Any) -> Watched:
        drafter = original(*args)
        return Watched(drafter if replace is None else replace(drafter))

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("use_cache"):
            rounds.forwards.append(kwargs["input_ids"].shape[1])

    hook = None if is_compiled else model.register_forward_pre_hook(note, with_kwargs=True)
    batched.drafter_of = build
    try:
        yield rounds
    finally:
        if hook is not None:
            hook.remove()
        batched.drafter_of = original


class Oracle:
    """Knows the sequences. Drafts differ in length by row, some rounds have none, and now and then a token is wrong."""

    reads_states = False

    def __init__(self, truth: torch.Tensor, most: int, pattern: str = "mixed") -> None:
        self.truth, self.most, self.pattern, self.round = truth, most, pattern, 0

    def start(self, rows: Rows, states: Any) -> None:
        """Nothing to prepare."""

    def draft(self, rows: Rows, length: int) -> Draft:
        """What comes next, with faults where the pattern has them."""
        self.round += 1
        places = rows.lengths[:, None] + torch.arange(length, device=rows.ids.device)
        known = torch.cat([self.truth, self.truth.new_zeros(rows.batch, length)], dim=1)
        tokens = known.gather(1, places.clamp(max=known.shape[1] - 1))
        counts = torch.full_like(rows.lengths, length)
        if self.pattern == "mixed":
            row = torch.arange(rows.batch, device=rows.ids.device)
            counts = (row + self.round) % (length + 1) if self.round % 3 else torch.zeros_like(counts)
            is_wrong = (places + row[:, None]) % 4 == 0
            tokens = torch.where(is_wrong, (tokens + 1) % 90, tokens)
        elif self.pattern == "wrong":
            tokens = (tokens + 1) % 90
        return Draft(tokens, counts)

    def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: Any) -> None:
        """Nothing to keep."""
