"""Assisted generation for a batch whose rows accept different numbers of drafted tokens.

Every round is one forward of the target over each row's last token and its draft. What is rejected is forgotten by
moving the row's pointer in the cache. A finished row takes part with padding, all of which is forgotten.

On a GPU, where nothing that the host decides depends on a round's outcome, the host hears of it while the next round is
under way already, and the GPU never waits for the host. The price is one round in vain after the last one.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from replay_transformers.generation.acceptance import Accepted, Draft, accept_by_probability, accept_equal
from replay_transformers.generation.draft_length import DraftLength
from replay_transformers.generation.drafters.base import Drafter, RowModel, no_draft
from replay_transformers.generation.processing import end_on_the_device, needs_ids, process, stops
from replay_transformers.generation.rows import Answer, Rows

__all__ = ["Kept", "Loop", "Target"]

AHEAD_ON = "cuda"  # the device that rounds are sent to before the last one's outcome is known


class Target(RowModel, Protocol):
    """The model that decides.

    Attributes:
        states: ``[B, T, hidden]``, last hidden states of the latest forward, if they are asked for.
        is_fixed: forwards of another length cost a compilation.
    """

    states: torch.Tensor | None
    is_fixed: bool


@dataclass
class Kept:
    """Scores or logits of the generated tokens, collected round by round."""

    parts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, values: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep the first ``counts`` (int64 ``[B]``) of the values ``[B, T, vocabulary]`` of each row."""
        if self.parts:  # by now the host has waited for the last round anyway
            before, kept = self.parts[-1]
            self.parts[-1] = before[:, : int(kept.max())].clone(), kept
        self.parts.append((values, counts))

    def by_token(self) -> tuple[torch.Tensor, ...]:
        """One tensor ``[B, vocabulary]`` per generated token; zeros for rows that were finished."""
        values = torch.cat([values for values, _ in self.parts], dim=1)
        kept = torch.cat([torch.arange(v.shape[1], device=c.device) < c[:, None] for v, c in self.parts], dim=1)
        longest = int(kept.sum(1).max())
        # the kept ones of a row first, in their order
        order = kept.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :longest]
        is_there = kept.gather(1, order)
        picked = values.gather(1, order[..., None].expand(-1, -1, values.shape[2]))
        return tuple(picked.masked_fill(~is_there[..., None], 0.0).unbind(1))


@dataclass
class Loop:
    """One call.

    Args:
        target: the model that decides.
        drafter: what proposes.
        length: how long drafts are.
        processors, criteria: of transformers.
        do_sample: draw tokens instead of taking the likeliest.
        max_length: tokens of a finished sequence, prompt included.
        scores, logits: where to collect them, if they are asked for.
        put: called with int64 ``[B, n]`` host tensors of tokens that all rows have (finished ones: padding).
        shown: tokens of a row that it has been called with, or that need not be.
        clock: seconds.
        agree: where processes share the model, overwrites tensors with those of the first one.
        decoding: a context of the forwards behind the prompts.
    """

    target: Target
    drafter: Drafter
    length: DraftLength
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    do_sample: bool
    max_length: int
    scores: Kept | None = None
    logits: Kept | None = None
    put: Callable[[torch.Tensor], None] | None = None
    shown: int = 0
    clock: Callable[[], float] = time.perf_counter
    agree: Callable[..., None] | None = None
    decoding: Callable[[], AbstractContextManager[None]] = nullcontext
    _seconds: float = field(default=0.0, init=False)  # that the last round took
    # a round whose time is not agreed on yet
    _unobserved: tuple[int, int, int, int, int] | None = field(default=None, init=False)
    _heard: float = field(default=0.0, init=False)  # when the last round's outcome was

    def run(self, rows: Rows) -> None:
        """Generate until every row is finished; the rows are **mutated**."""
        states = self._first(rows)
        if any(rows.host_active):
            self.drafter.start(rows, states)
        del states
        self.target.states = None  # of a whole prompt
        with self.decoding():
            self._rounds(rows)
            if not self._has_end:
                # as in plain generation: without an end-of-sequence token rows go on until the last one is finished
                self.max_length, self.criteria = rows.longest, StoppingCriteriaList([MaxLengthCriteria(rows.longest)])
                rows.active = rows.lengths < rows.longest
                rows.read()
                self._rounds(rows)

    @property
    def _has_end(self) -> bool:
        """Whether finished rows are filled up with padding."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    def _first(self, rows: Rows) -> torch.Tensor | None:
        """The first token, from the target's forward over the prompts; that forward's states, if the drafter asks."""
        logits = self.target.prefill(rows)[:, None]
        self._take(rows, no_draft(rows), logits)
        rows.read()
        self._show(rows)
        return self.target.states if self.drafter.reads_states else None

    def _rounds(self, rows: Rows) -> None:
        rows.limit, self._heard = self.max_length, self.clock()
        goes_ahead, known = self.goes_ahead(rows), set[int]()
        sent: deque[tuple[int, Answer]] = deque()
        while any(rows.host_active):
            draft = self._draft(rows)
            drafted = draft.tokens.shape[1]
            if sent and drafted not in known:  # it may compile, which is not to count as the time of the round before
                self._learn(rows, *sent.popleft())
            known.add(drafted)
            sent.append((drafted, self._round(rows, draft, goes_ahead)))
            while len(sent) > goes_ahead:
                self._learn(rows, *sent.popleft())
        for round_sent in sent:
            self._learn(rows, *round_sent)

    def goes_ahead(self, rows: Rows) -> bool:
        """Whether a round can begin before the host knows how the last one ended."""
        is_sent = self.target.is_fixed and rows.ids.device.type == AHEAD_ON and self.agree is None
        is_kept = self.put is not None or self.scores is not None or self.logits is not None
        return is_sent and not is_kept and not needs_ids(self.processors) and end_on_the_device(self.criteria)

    def _round(self, rows: Rows, draft: Draft, goes_ahead: bool) -> Answer:
        """One round; what the host is to hear of it, waited for unless the next one may go ahead."""
        drafted, active = draft.tokens.shape[1], rows.active
        logits = self.target.forward(torch.cat([rows.last(), draft.tokens], dim=1))
        accepted, added = self._take(rows, draft, logits)
        facts = (active, draft.counts > 0, accepted.drafts, accepted.drafts < draft.counts)
        told = [active * fact.to(torch.int64) for fact in facts]
        if self.agree is not None:
            told.append(torch.full_like(rows.lengths, int(1e6 * self._seconds)))
        answer = rows.ask(*told, agree=self.agree)
        if not goes_ahead:
            rows.hear(answer)
        self.target.reject(drafted + 1 - added, rows.longest - 1)
        self.drafter.verified(rows, drafted, added, self.target.states if self.drafter.reads_states else None)
        return answer

    def _learn(self, rows: Rows, drafted: int, answer: Answer) -> None:
        """From what came of a round."""
        active, proposing, drafts, rejected, *took = rows.hear(answer)
        told = drafted, sum(active), sum(proposing), sum(drafts), sum(rejected)
        self._show(rows)
        started, self._heard = self._heard, self.clock()
        self._seconds = self._heard - started
        if self.agree is None:
            self.length.observe(*told, self._seconds)
            return
        if self._unobserved is not None:
            self.length.observe(*self._unobserved, 1e-6 * took[0][0])
        self._unobserved = told

    def _draft(self, rows: Rows) -> Draft:
        """What is proposed in this round, no more than fits behind the rows."""
        left = (
            self.max_length
            - 1
            - min(length for length, active in zip(rows.host_lengths, rows.host_active, strict=True) if active)
        )
        length = min(self.length.choose(), self.drafter.most)
        if not self.target.is_fixed:
            length = min(length, left)
        if length < 1 or left < 1:
            return no_draft(rows)
        draft = self.drafter.draft(rows, length)
        if self.agree is not None:
            self.agree(draft.tokens, draft.counts)
        draft.counts = draft.counts.minimum(self.max_length - 1 - rows.lengths).clamp(min=0) * rows.active
        return draft

    def _take(self, rows: Rows, draft: Draft, logits: torch.Tensor) -> tuple[Accepted, torch.Tensor]:
        """Choose tokens by the logits ``[B, K + 1, vocabulary]`` behind the draft, and let the rows grow by them.

        Returns:
            what is accepted; int64 ``[B]``, by how many tokens each row has grown.
        """
        if self.processors or self.do_sample or self.scores is not None or self.logits is not None:
            logits = logits.to(torch.float32, copy=True)  # the next forward may write over what a graph returned
        scores = process(self.processors, rows, draft.tokens, logits, draft.counts)
        accepted = self.choose(rows, draft, scores)
        if self.agree is not None:
            self.agree(accepted.tokens, accepted.drafts)
        added, ended = stops(self.criteria, rows, accepted.tokens, accepted.drafts + 1)
        if self.agree is not None:
            self.agree(added, ended)
        added = added * rows.active
        rows.append(accepted.tokens, added)
        rows.active = rows.active & ~ended
        for kept, values in ((self.scores, scores), (self.logits, logits)):
            if kept is not None:
                kept.add(values, added)
        return accepted, added

    def choose(self, rows: Rows, draft: Draft, scores: torch.Tensor) -> Accepted:
        """What the target says of a draft and behind it, by its scores ``[B, K + 1, vocabulary]``."""
        if not self.do_sample:
            return accept_equal(draft, scores.argmax(-1))
        probabilities = scores.softmax(-1)
        if draft.probabilities is not None:
            return accept_by_probability(draft, probabilities)
        return accept_equal(draft, torch.multinomial(probabilities.flatten(0, 1), 1).view(scores.shape[:2]))

    def _show(self, rows: Rows) -> None:
        """Pass on the tokens that every row has by now."""
        if self.put is None:
            return
        going_on = [
            length
            for length, active in zip(rows.host_lengths, rows.host_active, strict=True)
            if active or not self._has_end
        ]
        ready = min(going_on, default=rows.longest)
        if ready > self.shown:
            self.put(rows.finished()[:, self.shown : ready].cpu())
            self.shown = ready
