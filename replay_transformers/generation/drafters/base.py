"""What the loop of `replay_transformers.generation.loop` asks of a drafter, and of the models that it runs."""

from typing import Protocol

import torch
from transformers.generation.logits_process import LogitsProcessorList

from replay_transformers.generation.acceptance import Draft
from replay_transformers.generation.processing import process
from replay_transformers.generation.rows import Rows

__all__ = ["Drafter", "RowModel", "draw", "no_draft"]


class RowModel(Protocol):
    """A model with a cache whose rows may have seen different numbers of tokens."""

    def prefill(self, rows: Rows) -> torch.Tensor:
        """Take in the prompts; logits ``[B, vocabulary]`` of the token behind them."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take in ``[B, T]`` more tokens, uncommitted; logits ``[B, T, vocabulary]`` behind each of them."""

    def reject(self, rejected: torch.Tensor, longest: int | None = None) -> None:
        """Forget the last ``rejected`` (int64 ``[B]``) uncommitted tokens and commit the others.

        Args:
            longest: tokens in the longest row then, if known: saves waiting for the GPU.
        """


class Drafter(Protocol):
    """Proposes tokens for all rows at once.

    Attributes:
        most: tokens of the longest draft.
        reads_states: whether `start` and `verified` get the last hidden states of the target.
    """

    most: int
    reads_states: bool

    def start(self, rows: Rows, states: torch.Tensor | None) -> None:
        """Called once, behind the first token that the target generated.

        Args:
            rows: the sequences, that token included.
            states: ``[B, S, hidden]`` of the tokens that the target's first forward took in, at the end of the prompts.
        """

    def draft(self, rows: Rows, length: int) -> Draft:
        """Propose up to ``length`` (1 or more) tokens behind each row. What finished rows get does not matter."""

    def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: torch.Tensor | None) -> None:
        """Called after every round, when the rows have grown.

        Args:
            rows: the sequences after the round.
            drafted: length of the round's draft; 0 if there was none.
            added: int64 ``[B]``, tokens by which each row grew: 0 for rows that were finished before.
            states: ``[B, drafted + 1, hidden]`` of the tokens that the target took in.
        """


def no_draft(rows: Rows) -> Draft:
    """No token for any row."""
    return Draft(rows.ids.new_empty(rows.batch, 0), torch.zeros_like(rows.lengths))


def draw(
    processors: LogitsProcessorList, rows: Rows, tokens: torch.Tensor, logits: torch.Tensor, do_sample: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One more token of every row's draft.

    Args:
        processors: of the logits. rows: the sequences so far.
        tokens: int64 ``[B, K]``, the draft so far.
        logits: float32 ``[B, 1, vocabulary]`` behind it.
        do_sample: draw the token instead of taking the likeliest.

    Returns:
        int64 ``[B, 1]``; the probabilities that it was drawn from, ``[B, 1, vocabulary]``, None if it was not drawn.
    """
    scores = process(processors, rows, tokens, logits)
    if not do_sample:
        return scores.argmax(-1), None
    probabilities = scores.softmax(-1)
    return torch.multinomial(probabilities.squeeze(1), 1), probabilities
