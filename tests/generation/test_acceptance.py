"""Acceptance row by row: leading matches, drafts that a row does not have, and the distribution of what is kept."""

from __future__ import annotations

import pytest
import torch

from replay_transformers.generation.acceptance import Draft, accept_by_probability, accept_equal


def test_leading_matches_of_each_row() -> None:
    draft = Draft(torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]]), torch.tensor([3, 3, 1, 0]))
    chosen = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    accepted = accept_equal(draft, chosen)
    assert accepted.drafts.tolist() == [3, 1, 1, 0]
    assert torch.equal(accepted.tokens, chosen)


def test_no_draft_at_all() -> None:
    accepted = accept_equal(
        Draft(torch.empty(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)), torch.ones(2, 1)
    )
    assert accepted.drafts.tolist() == [0, 0]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_accepted_by_probability_follows_the_target(count: int) -> None:
    """The first token of 200,000 rows has the target's distribution, whatever the drafter's, in each of its counts."""
    torch.manual_seed(0)
    rows, vocabulary = 200_000, 4
    target = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    drafter = torch.tensor([[0.6, 0.2, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]])
    tokens = torch.stack([torch.multinomial(row, rows, replacement=True) for row in drafter], dim=1)
    draft = Draft(tokens, torch.full((rows,), count), drafter.expand(rows, -1, -1))
    accepted = accept_by_probability(draft, target.expand(rows, -1, -1))
    assert accepted.drafts.max() == count
    for place in range(count + 1):
        there = accepted.tokens[accepted.drafts >= place, place]
        shares = there.bincount(minlength=vocabulary) / len(there)
        # of n draws a share deviates by at most 0.5 / sqrt(n); five times that is one in two million
        assert (shares - target[place]).abs().max() < 2.5 * len(there) ** -0.5


def test_equal_distributions_accept_everything() -> None:
    """Nothing is left to draw from then, which must not make the draw fail."""
    torch.manual_seed(0)
    probabilities = torch.rand(50, 3, 6).softmax(-1)
    tokens = torch.multinomial(probabilities[:, :2].flatten(0, 1), 1).view(50, 2)
    accepted = accept_by_probability(Draft(tokens, torch.full((50,), 2), probabilities[:, :2]), probabilities)
    assert accepted.drafts.tolist() == [2] * 50
    assert torch.equal(accepted.tokens[:, :2], tokens)
