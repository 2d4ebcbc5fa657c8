"""State-space assistants keep the right state: every draft is the assistant's own greedy continuation of the text.

A wrong state of the assistant changes no token of the result, which the target decides: the drafts are compared.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from replay_transformers.generation.acceptance import Draft
from replay_transformers.generation.draft_length import DraftLength
from replay_transformers.generation.rows import Rows
from tests.support.batches import Rounds, observed
from tests.support.models import PAD, full_logits, greedy_without_cache, prompt
from tests.support.speculation import fitted, never_unsure, perturbed, speculate
from tests.test_assisted import EVERY_CACHE, EVERY_FAMILY, mostly_right, tiny, tiny_llama

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.core]
STEPS, DRAFTS, PADS = 32, 4, [0, 3, 6, 1, 2]


class Texts:
    """An assistant's drafts, each with the text that it goes on from, of rows that are not finished."""

    reads_states = False

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.most = drafter, drafter.most
        self.proposed: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # row, its text, its draft

    def start(self, rows: Rows, states: Any) -> None:
        """The assistant's own."""
        self.drafter.start(rows, states)

    def draft(self, rows: Rows, length: int) -> Draft:
        """The assistant's own, noted."""
        draft = self.drafter.draft(rows, length)
        for row in rows.active.nonzero().flatten().tolist():
            text = rows.ids[row, rows.padding[row] : rows.lengths[row]].clone()
            self.proposed.append((row, text, draft.tokens[row].clone()))
        return draft

    def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: Any) -> None:
        """The assistant's own."""
        self.drafter.verified(rows, drafted, added, states)


@functools.cache
def truth(family: str) -> torch.Tensor:
    """Greedy decoding of five padded rows with a full forward per token, and some way beyond what is asked for."""
    inputs = prompt(5, 9, PADS)
    return greedy_without_cache(tiny(family), inputs["input_ids"], inputs["attention_mask"], STEPS + DRAFTS)


def generated(family: str, implementation: str, assistant: Any, **more: Any) -> tuple[torch.Tensor, Rounds, Texts]:
    """The result, what happened, and what was drafted."""
    arguments = {"max_new_tokens": STEPS, "do_sample": False, "cache_implementation": implementation, **more}
    arguments["cache_config"] = {"window": 3, "draft_length": "fixed"}
    with observed(tiny(family), Texts) as rounds:
        output = tiny(family).generate(**prompt(5, 9, PADS), **arguments, assistant_model=assistant)
    return output, rounds, rounds.drafter


def check_drafts(assistant: Any, proposed: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
    """Each one is what the assistant goes on with, by a full forward over the text and the draft."""
    for row, text, draft in proposed:
        ids = torch.cat([text, draft[:-1]])[None]
        own = full_logits(assistant, ids)[0, len(text) - 1 :].argmax(-1)
        assert torch.equal(draft, own), f"row {row} behind {len(text)} tokens"


def differing(rounds: Rounds) -> int:
    """Rounds in which rows that took part accepted different numbers of drafts."""
    return sum(len({added for added in row if added}) > 1 for row in rounds.added)


@EVERY_CACHE
@EVERY_FAMILY
def test_every_draft_is_the_assistants_own_continuation(family: str, implementation: str) -> None:
    output, rounds, texts = generated(family, implementation, mostly_right(family))
    assert torch.equal(output, truth(family)[:, : 9 + STEPS])
    rounds.check(accepting=3)
    assert differing(rounds) >= 5
    assert {row for row, _, _ in texts.proposed} == set(range(5))
    check_drafts(mostly_right(family), texts.proposed)


@EVERY_CACHE
@EVERY_FAMILY
def test_rows_that_go_on_when_others_have_ended(family: str, implementation: str) -> None:
    """Finished rows take part with padding; those that go on are drafted for as before."""
    end = int(truth(family)[0, 14])
    new = truth(family)[:, 9 : 9 + STEPS]
    behind = (new == end).cumsum(1) - (new == end).long() > 0
    output, rounds, texts = generated(family, implementation, mostly_right(family), eos_token_id=end)
    longest = int((~behind).sum(1).max())
    assert torch.equal(output[:, 9:], new.masked_fill(behind, PAD)[:, :longest])
    assert sum(0 in added and max(added) > 0 for added in rounds.added) >= 3, "rounds in which some rows have ended"
    check_drafts(mostly_right(family), texts.proposed)


@EVERY_CACHE
@EVERY_FAMILY
def test_rounds_without_a_draft_in_between(family: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assistant takes in behind them what it has not seen."""
    lengths = [DRAFTS, 0, 2, 0, 0, DRAFTS, 1, 0, 0, 0, 3] * 5
    monkeypatch.setattr(DraftLength, "choose", lambda self: lengths.pop(0))
    output, rounds, texts = generated(family, implementation, mostly_right(family))
    assert torch.equal(output, truth(family)[:, : 9 + STEPS])
    assert {0, 1, 2, 3, DRAFTS} <= set(rounds.drafted)
    assert differing(rounds) >= 2
    check_drafts(mostly_right(family), texts.proposed)


@EVERY_CACHE
@EVERY_FAMILY
def test_the_targets_own_weights_are_always_right(family: str, implementation: str) -> None:
    same = perturbed(tiny(family), 0.0)
    output, rounds, texts = generated(family, implementation, same)
    assert torch.equal(output, truth(family)[:, : 9 + STEPS])
    for row, text, draft in texts.proposed:
        place = PADS[row] + len(text)
        assert torch.equal(draft, truth(family)[row, place : place + len(draft)]), f"row {row}, round at {place}"
    rounds.check(accepting=DRAFTS, rejecting=False)
    assert all(added == [DRAFTS + 1] * 5 for added in rounds.added[:-1])


@functools.cache
def agreeing(family: str) -> tuple[Any, Any, torch.Tensor]:
    """An attention model, a state-space model with which it mostly agrees, and the text that it generates.

    It has learned how that model goes on, but with another token in place of each that is a multiple of 4.
    """
    assistant, ids = never_unsure(perturbed(tiny(family), 0.0), DRAFTS), prompt(1, 9)["input_ids"]
    for _ in range(STEPS):
        following = full_logits(assistant, ids)[:, -1:].argmax(-1)
        ids = torch.cat([ids, torch.where(following % 4 == 0, (following - 1).abs(), following)], dim=1)
    return fitted(tiny_llama(), ids, torch.ones_like(ids)), assistant, ids


@EVERY_FAMILY
def test_drafts_for_an_attention_model_that_mostly_agrees(family: str) -> None:
    """In transformers' own loop, whose rounds the assistant's cache follows."""
    target, assistant, ids = agreeing(family)
    forwards: list[list[int]] = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    rounds = speculate(target, prompt(1, 9), assistant_model=assistant, max_new_tokens=STEPS, do_sample=False)
    hook.remove()
    plain = target.generate(**prompt(1, 9), max_new_tokens=STEPS, do_sample=False)
    assert torch.equal(rounds.sequences, plain)
    assert torch.equal(plain, ids), "the target has learned the text"
    rounds.check(accepting=2)
    accepted = [added - 1 for added in rounds.accepted]
    assert sum(count >= 2 for count in accepted) >= 4
    assert sum(count < drafted for count, drafted in zip(accepted, rounds.drafted, strict=True)) >= 3
    proposed, length = [], 9
    for tokens, drafted, added in zip(forwards, rounds.drafted, rounds.accepted, strict=True):
        if drafted:
            proposed.append((0, ids[0, :length], torch.tensor(tokens[-drafted:])))
        length += added
    check_drafts(assistant, proposed)
