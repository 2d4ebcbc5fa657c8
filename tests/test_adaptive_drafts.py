"""Adaptive drafts in `generate`: they stop while they are wrong or too dear, and come back when they are right.

A pretended clock says how long rounds take, so that the lengths do not depend on the machine.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from replay_transformers.generation.acceptance import Draft
from replay_transformers.generation.loop import Loop
from replay_transformers.generation.rows import Rows
from replay_transformers.patches import batched
from tests.support.batches import Oracle, Rounds, observed
from tests.support.models import full_logits, prompt
from tests.test_assisted import EVERY_CACHE, EVERY_FAMILY, tiny

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.core]
MOST, PADS, PROMPT = 8, [0, 3, 6], 9
WRONG, RIGHT, STEPS = 90, 340, 460  # new tokens: wrong drafts up to the first, right ones up to the second


class Changing(Oracle):
    """Wrong drafts for a long stretch of the text, then right ones, then wrong ones; rounds take a pretended time.

    Args:
        truth: the sequences.
        right: the places of right drafts in the text.
        token: seconds that a drafted token costs; a round without any takes 1.
    """

    def __init__(self, truth: torch.Tensor, right: range, token: float) -> None:
        super().__init__(truth, MOST, "right")
        self.right, self.token, self.now = right, token, 0.0
        self.lengths: list[int] = []  # length of the shortest row at the end of each round

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def draft(self, rows: Rows, length: int) -> Draft:
        """What comes next where it is to be right, something else elsewhere."""
        draft = super().draft(rows, length)
        places = rows.lengths[:, None] + torch.arange(length)
        is_right = (places >= self.right.start) & (places < self.right.stop)
        return Draft(torch.where(is_right, draft.tokens, (draft.tokens + 1) % 90), draft.counts)

    def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: Any) -> None:
        """The time passes."""
        self.now += 1 + self.token * drafted
        self.lengths.append(int(rows.lengths.min()))


@functools.cache
def truth(family: str) -> torch.Tensor:
    """Greedy decoding of three padded rows, which a full forward confirms; a few tokens beyond what is asked for."""
    model, inputs = tiny(family), prompt(len(PADS), PROMPT, PADS)
    arguments = {"cache_implementation": "replay", "do_sample": False}
    ids = model.generate(**inputs, **arguments, max_new_tokens=STEPS + MOST)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, PROMPT:])], dim=1)
    assert torch.equal(full_logits(model, ids, mask)[:, PROMPT - 1 : -1].argmax(-1), ids[:, PROMPT:])
    return ids


def run(family: str, implementation: str, drafter: Changing, steps: int, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """Adaptive drafts of this drafter, by its clock: the tokens of greedy decoding, and what happened."""
    monkeypatch.setattr(batched, "Loop", functools.partial(Loop, clock=drafter.clock))
    model, config = tiny(family), {"window": 16, "draft_length": "adaptive"}
    arguments = {"cache_implementation": implementation, "cache_config": config, "do_sample": False}
    with observed(model, lambda built: drafter) as rounds:
        output = model.generate(
            **prompt(len(PADS), PROMPT, PADS), **arguments, max_new_tokens=steps, prompt_lookup_num_tokens=MOST
        )
    assert torch.equal(output, truth(family)[:, : PROMPT + steps])
    return rounds


@EVERY_CACHE
@EVERY_FAMILY
def test_drafts_stop_come_back_and_stop(family: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts are tried again now and then; right ones grow to the longest; wrong ones again are given up."""
    drafter = Changing(truth(family), range(PROMPT + WRONG, PROMPT + RIGHT), token=0.1)
    rounds = run(family, implementation, drafter, STEPS, monkeypatch)
    starts = [PROMPT + 1, *drafter.lengths[:-1]]
    phases: list[list[int]] = [[], [], []]
    for start, drafted in zip(starts, rounds.drafted, strict=True):
        phases[(start >= PROMPT + WRONG) + (start >= PROMPT + RIGHT)].append(drafted)
    first, second, third = phases
    assert first[0] == 4, "nothing is known yet"
    assert first.count(0) > 0.8 * len(first)
    assert second[-10:] == [MOST] * 10
    assert third.count(0) > 0.5 * len(third)
    assert third[-10:] == [0] * 10
    assert max(rounds.accepted()) == MOST


@EVERY_FAMILY
def test_right_drafts_that_take_too_long(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock alone: a drafted token that takes as long as a round and a half is not worth it."""
    dear, cheap = (Changing(truth(family), range(PROMPT + STEPS), token) for token in (1.5, 0.1))
    drafted = run(family, "replay", dear, 120, monkeypatch).drafted
    assert drafted[0] == 4
    assert drafted.count(0) > 0.8 * len(drafted)
    assert run(family, "replay", cheap, 120, monkeypatch).drafted.count(MOST) >= 5
