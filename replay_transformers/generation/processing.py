"""transformers' logits processors and stopping criteria for rows of different lengths.

Both see a batch of token ids of one length. Those that look at scores alone, or at the last token, are called once.
Others are called once per length that occurs: transformers' own with the rows of that length, and those that nothing
is known about with the whole batch, since they may count on a row's place in it. Rows of other lengths are then cut, or
padded on the left, to that length, and what is said of them is left out. No row is shown a token behind a draft that a
processor forbids.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from replay_transformers.generation.rows import Rows

__all__ = ["check_processors", "end_on_the_device", "needs_ids", "process", "stops"]


def _known(*names: str) -> tuple[type, ...]:
    """The classes of that name which this version of transformers has."""
    return tuple(getattr(processors, name) for name in names if hasattr(processors, name))


SCORES_ONLY = _known(
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor",
    "LogitNormalization", "SuppressTokensLogitsProcessor",
)  # fmt: skip
# the same for a row whatever the others are
ROW_BY_ROW = SCORES_ONLY + _known(
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor", "WatermarkLogitsProcessor", "PrefixConstrainedLogitsProcessor",
)  # fmt: skip
# these keep something from step to step
STEP_BY_STEP = _known("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
PER_ROW = "prompt_ignore_length"  # what a processor may hold one number per row of


def check_processors(listed: Iterable[object]) -> None:
    """Raise NotImplementedError for a processor that must see every step of every row exactly once."""
    for processor in listed:
        if isinstance(processor, STEP_BY_STEP):
            raise NotImplementedError(
                f"{type(processor).__name__} is not supported with a drafter, which has tokens judged that may be "
                "rejected: generate without one"
            )


def needs_ids(listed: Iterable[object]) -> bool:
    """Whether a processor looks at token ids (exact types: a subclass may look at anything)."""
    return any(type(processor) not in SCORES_ONLY for processor in listed)


def process(
    listed: processors.LogitsProcessorList,
    rows: Rows,
    drafts: torch.Tensor,
    logits: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of the tokens behind the rows and behind every prefix of their drafts.

    Args:
        listed: logits processors.
        rows: the sequences so far.
        drafts: int64 ``[B, K]``.
        logits: float32 ``[B, n, vocabulary]``, behind all prefixes, or behind the ``n`` longest; not changed.
        counts: int64 ``[B]``, how many of the drafts a row has; None: all.

    Returns:
        float32 ``[B, n, vocabulary]``; what the logits were for finished rows, behind tokens that are no drafts of the
        row, and behind a draft that the processors forbid.
    """
    if not listed:
        return logits
    run: Any = listed  # annotated with types that tensors do not have
    places, vocabulary = logits.shape[1:]
    if not needs_ids(listed):
        return run(rows.last(), logits.reshape(-1, vocabulary).clone()).view(logits.shape)
    ids, scores = rows.followed_by(drafts), logits.clone()
    is_known = all(type(processor) in ROW_BY_ROW for processor in listed)
    given = [drafts.shape[1]] * rows.batch if counts is None else counts.tolist()
    asked = list(range(rows.batch))
    for place in range(places):
        prefix = drafts.shape[1] + 1 - places + place
        asked = [row for row in asked if prefix <= given[row]]
        for length, members in _by_length(rows, asked).items():
            if is_known:
                run, shown, values = _narrowed(listed, members), ids[members, : length + prefix], logits[members, place]
            else:
                shown, values = _whole_batch(rows, ids, members, length + prefix), logits[:, place]
            part = run(shown, values.clone())
            if part.shape != values.shape:
                raise ValueError(
                    f"a logits processor returned scores of shape {tuple(part.shape)} for {len(values)} rows and a "
                    f"vocabulary of {vocabulary}"
                )
            scores[members, place] = part if is_known else part[members]
        if prefix < drafts.shape[1] and asked:
            forbidden = scores[asked, place].gather(1, drafts[asked, prefix, None]).squeeze(1) == -torch.inf
            asked = [row for row, out in zip(asked, forbidden.tolist(), strict=True) if not out]
    return scores


def _whole_batch(rows: Rows, ids: torch.Tensor, members: Sequence[int], length: int) -> torch.Tensor:
    """Token ids ``[B, length]``: of the members as they are, of others their own tokens, cut or padded on the left."""
    shown = ids[:, :length].clone()
    for row in set(range(rows.batch)) - set(members):
        own = rows.host_lengths[row]
        if own < length:
            shown[row] = rows.pad
            shown[row, length - own :] = ids[row, :own]
    return shown


def _of_members(allowed: Callable[..., Any], members: Sequence[int]) -> Callable[[int, torch.Tensor], Any]:
    """A function of a row's place in the batch, for rows that have other places."""
    return lambda row, ids: allowed(members[row], ids)


def _narrowed(listed: processors.LogitsProcessorList, members: Sequence[int]) -> processors.LogitsProcessorList:
    """The same processors for some rows only."""
    narrowed = processors.LogitsProcessorList()
    for processor in listed:
        held: Any = getattr(processor, PER_ROW, None)
        if isinstance(held, torch.Tensor) and len(held) > 1:
            processor = copy.copy(processor)
            setattr(processor, PER_ROW, held[list(members)])
        elif type(processor) is processors.PrefixConstrainedLogitsProcessor:
            processor = copy.copy(processor)
            processor._prefix_allowed_tokens_fn = _of_members(processor._prefix_allowed_tokens_fn, members)
        narrowed.append(processor)
    return narrowed


def end_on_the_device(listed: criteria.StoppingCriteriaList) -> bool:
    """Whether `stops` finds out where rows end without waiting for a GPU."""
    return all(type(criterion) in (criteria.EosTokenCriteria, criteria.MaxLengthCriteria) for criterion in listed)


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
        elif type(criterion) is criteria.MaxTimeCriteria:
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
    is_known = all(type(criterion) is criteria.StopStringCriteria for criterion in listed)
    for place in range(tokens.shape[1]):
        for length, members in _by_length(rows, [row for row in range(rows.batch) if place < given[row]]).items():
            end = length + place + 1
            shown = ids[members, :end] if is_known else _whole_batch(rows, ids, members, end)
            answer = torch.as_tensor(listed(shown, None), device=ends.device)
            ends[members, place] = answer if is_known or answer.ndim == 0 else answer[members]
    return ends


def _by_length(rows: Rows, members: Iterable[int]) -> dict[int, list[int]]:
    """The active ones among these rows, by their length."""
    groups: dict[int, list[int]] = defaultdict(list)
    for row in members:
        if rows.host_active[row]:
            groups[rows.host_lengths[row]].append(row)
    return groups
