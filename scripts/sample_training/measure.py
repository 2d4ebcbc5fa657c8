"""Figures of a trained model on held-out text: nats per character, and how often its MTP head is right."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .models import MtpHead
from .tokenizer import BOS_ID
from .trainer import hidden_states


@dataclass
class HeldOut:
    """Sums over the held-out texts."""

    nats: float = 0.0
    characters: int = 0
    tokens: int = 0
    mtp_agreements: int = 0
    mtp_drafts: int = 0

    @property
    def nats_per_character(self) -> float:
        """Nats for all tokens of the texts over all their characters."""
        return self.nats / self.characters

    @property
    def mtp_acceptance(self) -> float | None:
        """The share of positions where the MTP head's first choice is the main model's next first choice."""
        return self.mtp_agreements / self.mtp_drafts if self.mtp_drafts else None

    def record(self) -> dict[str, Any]:
        """The figures as JSON values."""
        record: dict[str, Any] = {
            "held_out_nats_per_character": round(self.nats_per_character, 4),
            "held_out_characters": self.characters,
            "held_out_tokens": self.tokens,
        }
        if self.mtp_acceptance is not None:
            record["held_out_mtp_acceptance"] = round(self.mtp_acceptance, 4)
        return record


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    mtp: MtpHead | None,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    length: int,
) -> HeldOut:
    """Score every token of every text once, teacher-forced, in windows of ``length`` that advance by half of it.

    Each text starts with the start-of-file token, which is not scored. A token in the second half of a window has at
    least ``length // 2`` tokens before it; in the first window of a text all of them are scored.
    """
    model.eval()
    result = HeldOut()
    for text in texts:
        ids = torch.tensor([BOS_ID, *tokenizer(text, add_special_tokens=False).input_ids], device=model.device)
        result.characters += len(text)
        result.tokens += len(ids) - 1
        scored = 0
        for start in range(0, len(ids), length // 2):
            window = ids[None, start : start + length + 1]
            fresh = start + window.shape[1] - 1 - scored
            if fresh <= 0:
                break
            _score(result, model, mtp, window, fresh)
            scored += fresh
    return result


def _score(result: HeldOut, model: PreTrainedModel, mtp: MtpHead | None, window: torch.Tensor, fresh: int) -> None:
    """Add the last ``fresh`` targets of a window, int64 [1, T + 1], to the result."""
    hidden = hidden_states(model, window[:, :-1])
    logits = model.lm_head(hidden)[0].float()
    result.nats += cross_entropy(logits[-fresh:], window[0, -fresh:], reduction="sum").item()
    if mtp is not None and window.shape[1] > 2:
        ahead = mtp(model, window[:, 1:-1], hidden[:, :-1])[0]
        agrees = ahead.argmax(-1) == logits[1:].argmax(-1)
        result.mtp_agreements += int(agrees[-fresh:].sum())
        result.mtp_drafts += len(agrees[-fresh:])
