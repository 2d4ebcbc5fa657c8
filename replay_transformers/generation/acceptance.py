"""Which drafted tokens a target accepts, row by row.

Greedy, or with a drafter that has no distribution: the target chooses its own token everywhere, and a draft is accepted
as long as it is what the target chose. Drafts that were sampled are accepted by their probabilities (speculative
sampling, Leviathan et al. 2023, algorithm 1), which keeps the target's distribution.
"""

from dataclasses import dataclass

import torch

__all__ = ["Accepted", "Draft", "accept_by_probability", "accept_equal"]


@dataclass
class Draft:
    """What a drafter proposes in one round.

    Args:
        tokens: int64 ``[B, K]``.
        counts: int64 ``[B]``, how many of them each row has; the others are no proposals.
        probabilities: float32 ``[B, K, vocabulary]`` from which the tokens were drawn; None if they were not drawn.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    probabilities: torch.Tensor | None = None


@dataclass
class Accepted:
    """What a row goes on with.

    Args:
        tokens: int64 ``[B, K + 1]``: accepted drafts, and behind them one token of the target's own.
        drafts: int64 ``[B]``, how many drafts are accepted.
    """

    tokens: torch.Tensor
    drafts: torch.Tensor


def accept_equal(draft: Draft, chosen: torch.Tensor) -> Accepted:
    """Accept drafts as long as they equal the target's tokens ``[B, K + 1]``."""
    return Accepted(chosen, _leading(draft, chosen[:, :-1] == draft.tokens))


def accept_by_probability(
    draft: Draft, probabilities: torch.Tensor, generator: torch.Generator | None = None
) -> Accepted:
    """Accept drafts by the ratio of the target's probabilities ``[B, K + 1, vocabulary]`` to the drafter's.

    The token behind them is drawn from what the target's distribution has more than the drafter's, or from the target's
    where all drafts of the row are accepted.
    """
    assert draft.probabilities is not None
    drawn = draft.tokens[..., None]
    target, drafter = probabilities[:, :-1].gather(2, drawn), draft.probabilities.gather(2, drawn)
    uniform = torch.rand(drawn.shape, device=drawn.device, generator=generator)
    drafts = _leading(draft, (uniform * drafter < target).squeeze(2))
    place = drafts[:, None, None].expand(-1, 1, probabilities.shape[2])
    there = probabilities.gather(1, place).squeeze(1)
    most = draft.tokens.shape[1] - 1
    rest = (there - draft.probabilities.gather(1, place.clamp(max=most)).squeeze(1)).clamp_(min=0)
    # nothing is left where the two agree up to rounding
    is_whole = (drafts == draft.counts) | (rest.sum(1) <= 0)
    own = torch.multinomial(torch.where(is_whole[:, None], there, rest), 1, generator=generator)
    tokens = torch.cat([draft.tokens, own], dim=1)
    return Accepted(tokens.scatter(1, drafts[:, None], own), drafts)


def _leading(draft: Draft, accepted: torch.Tensor) -> torch.Tensor:
    """How many drafts are accepted without a gap, int64 ``[B]``."""
    order = torch.arange(draft.tokens.shape[1], device=accepted.device)
    return (accepted & (order < draft.counts[:, None])).to(torch.int64).cumprod(1).sum(1)
