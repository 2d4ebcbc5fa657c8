"""transformers' logits processors and stopping criteria for rows of different lengths.

Both see a batch of token ids of one length. What looks at more than the scores or the last token is therefore called
for the rows of one length at a time, as if they were the batch.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from replay_transformers.generation.rows import Rows

__all__ = ["check_processors", "needs_ids", "process", "stops"]

# These look at the scores alone.
SCORES_ONLY = tuple(
    getattr(processors, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(processors, name)
)
# These keep something from step to step, or count on the place of a row in the batch.
NOT_BY_ROWS = tuple(
    getattr(processors, name)
    for name in (
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
    )
    if hasattr(processors, name)
)
TIME = criteria.MaxTimeCriteria


def check_processors(listed: Iterable[object]) -> None:
    """Raise NotImplementedError for a processor that cannot be called for some rows of a batch."""
    for processor in listed:
        if isinstance(processor, NOT_BY_ROWS):
            raise NotImplementedError(
                f"{type(processor).__name__} is not supported where the rows of a batch accept different numbers of "
                "drafted tokens: generate without a drafter"
            )


def needs_ids(listed: Iterable[object]) -> bool:
    """Whether a processor looks at token ids (exact types: a subclass may look at anything)."""
    return any(type(processor) not in SCORES_ONLY for processor in listed)


def process(
    listed: processors.LogitsProcessorList, rows: Rows, drafts: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Scores of the tokens behind the rows and behind every prefix of their drafts.

    Args:
        listed: logits processors.
        rows: the sequences so far.
        drafts: int64 ``[B, K]``.
        logits: float32 ``[B, n, vocabulary]``, behind all prefixes, or behind the ``n`` longest; not changed.

    Returns:
        float32 ``[B, n, vocabulary]``; those of finished rows may be what the logits were.
    """
    if not listed:
        return logits
    batch, places, vocabulary = logits.shape
    if not needs_ids(listed):
        return listed(rows.last(), logits.reshape(-1, vocabulary).clone()).view(logits.shape)
    ids, scores = rows.followed_by(drafts), logits.clone()
    for place in range(places):
        prefix = drafts.shape[1] + 1 - places + place
        for length, members in _by_length(rows, range(batch)).items():
            index = torch.tensor(members, device=ids.device)
            part = listed(ids[index, : length + prefix], logits[index, place].clone())
            if part.shape != (len(members), vocabulary):
                raise ValueError(
                    f"a logits processor returned scores of shape {tuple(part.shape)} for {len(members)} rows: with a "
                    "drafter, processors are called for the rows of one length at a time"
                )
            scores[index, place] = part
    return scores


def stops(
    listed: criteria.StoppingCriteriaList, rows: Rows, tokens: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows end among their new tokens.

    Args:
        listed: stopping criteria.
        rows: the sequences before.
        tokens: int64 ``[B, T]``, of which the first ``counts`` (int64 ``[B]``) go to each row.

    Returns:
        counts up to and with the token that ends a row, int64 ``[B]``; which rows end, bool ``[B]``.
    """
    order = torch.arange(tokens.shape[1], device=tokens.device)
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    others, time_is_up = criteria.StoppingCriteriaList(), False
    for criterion in listed:
        if type(criterion) is criteria.EosTokenCriteria:
            ends |= torch.isin(tokens, criterion.eos_token_id.to(tokens.device))
        elif type(criterion) is criteria.MaxLengthCriteria:
            ends |= rows.lengths[:, None] + order + 1 >= criterion.max_length
        elif type(criterion) is TIME:
            time_is_up |= bool(criterion(tokens, None).all())
        else:
            others.append(criterion)
    if others:
        ends |= _asked(others, rows, tokens, counts)
    ends &= order < counts[:, None]
    first = torch.where(ends, order, tokens.shape[1]).amin(1)
    ended = first < counts
    kept = torch.where(ended, first + 1, counts)
    return kept, ended | time_is_up


def _asked(
    listed: criteria.StoppingCriteriaList, rows: Rows, tokens: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Whether each prefix of the tokens ends its row, by the criteria themselves: bool ``[B, T]``."""
    ids, given = rows.followed_by(tokens), counts.tolist()
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for place in range(tokens.shape[1]):
        asked = [row for row in range(rows.batch) if place < given[row]]
        for length, members in _by_length(rows, asked).items():
            index = torch.tensor(members, device=ids.device)
            ends[index, place] = listed(ids[index, : length + place + 1], None).to(ends.device)
    return ends


def _by_length(rows: Rows, members: Iterable[int]) -> dict[int, list[int]]:
    """The active ones among these rows, by their length."""
    groups: dict[int, list[int]] = defaultdict(list)
    for row in members:
        if rows.host_active[row]:
            groups[rows.host_lengths[row]].append(row)
    return groups
