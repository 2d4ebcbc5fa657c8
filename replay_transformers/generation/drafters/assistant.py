"""A smaller model with the target's vocabulary drafts, one forward per token, for all rows at once."""

import torch
from transformers.generation.logits_process import LogitsProcessorList

from replay_transformers.generation.acceptance import Draft
from replay_transformers.generation.drafters.base import RowModel, draw
from replay_transformers.generation.rows import Rows

__all__ = ["Assistant"]


class Assistant:
    """Drafts of a model.

    Between two rounds it has seen all tokens of a row but the last two; the first forward of a round takes these in,
    whether or not it had seen the first of them in the round before.

    Args:
        model: the assistant with a cache of its own.
        most: tokens of the longest draft.
        processors: of the target's logits, applied to the assistant's as well.
        do_sample: draw the drafts, and say from which distribution.
    """

    reads_states = False
    spare = 1  # tokens that its cache must be able to reject beside drafts
    lengths = (1, 2)  # of its forwards, where no round went without a draft

    def __init__(self, model: RowModel, most: int, processors: LogitsProcessorList, do_sample: bool) -> None:
        self.model, self.most, self.processors, self.do_sample = model, most, processors, do_sample
        self._behind = 0  # rounds without a draft since the last one
        self._longest = 0  # tokens that its longest row has seen, or more: the host does not ask

    def start(self, rows: Rows, states: torch.Tensor | None) -> None:
        """Take in the prompts."""
        self.model.prefill(rows)
        self._longest = rows.prompt - 1
        self.model.reject(torch.ones_like(rows.lengths), self._longest)

    def draft(self, rows: Rows, length: int) -> Draft:
        """Exactly ``length`` tokens per row."""
        tokens, probabilities = rows.ids.new_empty(rows.batch, 0), []
        following, self._behind = rows.last(2 + self._behind), 0
        self._longest += following.shape[1] - 1  # what a finished row keeps of this round
        for _ in range(length):
            logits = self.model.forward(following)[:, -1:].float()
            following, drawn_from = draw(self.processors, rows, tokens, logits, self.do_sample)
            tokens = torch.cat([tokens, following], dim=1)
            if drawn_from is not None:
                probabilities.append(drawn_from)
        counts = torch.full_like(rows.lengths, length)
        return Draft(tokens, counts, torch.cat(probabilities, dim=1) if probabilities else None)

    def verified(self, rows: Rows, drafted: int, added: torch.Tensor, states: torch.Tensor | None) -> None:
        """Forget what the target did not accept."""
        if not drafted:
            self._behind += 1
            return
        # it has seen two old tokens and all drafts but the last; of a row that is finished it keeps one, as good as any
        self._longest = max(rows.longest - 2, self._longest)
        self.model.reject((drafted + 1 - added).clamp(max=drafted), self._longest)
