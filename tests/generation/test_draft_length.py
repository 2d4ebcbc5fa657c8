"""How long drafts are: a simulated machine on which a round with K drafts takes a known time."""

from __future__ import annotations

import itertools
import random

import pytest

from replay_transformers.generation.draft_length import DraftLength

MOST = 8


def simulate(
    length: DraftLength, likely: float, rounds: int, slope: float = 0.05, proposing: float = 1.0, seed: int = 0
) -> tuple[float, list[int]]:
    """Tokens per second, and the lengths that were chosen, of four rows whose drafts are right with a probability."""
    chance, tokens, seconds, chosen = random.Random(seed), 0, 0.0, []
    for _ in range(rounds):
        drafted, accepted, rejected, with_draft = length.choose(), 0, 0, 0
        for _ in range(4):
            if not drafted or chance.random() > proposing:
                continue
            with_draft += 1
            right = 0
            while right < drafted and chance.random() < likely:
                right += 1
            accepted += right
            rejected += right < drafted
        took = 1 + slope * drafted
        length.observe(drafted, 4, with_draft, accepted, rejected, took)
        tokens, seconds = tokens + 4 + accepted, seconds + took
        chosen.append(drafted)
    return tokens / seconds, chosen


def test_drafts_that_are_right_grow_to_the_longest() -> None:
    _, chosen = simulate(DraftLength(MOST), likely=0.98, rounds=60)
    assert chosen[0] == 4, "the first drafts are not the longest there may be"
    assert chosen[-10:] == [MOST] * 10


def test_drafts_that_are_wrong_stop_and_are_tried_again_ever_less_often() -> None:
    speed, chosen = simulate(DraftLength(MOST), likely=0.0, rounds=600)
    tried = [place for place, drafted in enumerate(chosen) if drafted]
    assert tried[0] == 0
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried) if later - earlier > 1]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 200
    assert speed > 0.97 * 4, "hardly slower than plain decoding"


def test_drafting_recovers() -> None:
    length = DraftLength(MOST)
    simulate(length, likely=0.0, rounds=200)
    _, chosen = simulate(length, likely=0.9, rounds=300)
    assert sum(drafted > 0 for drafted in chosen[-100:]) > 95


@pytest.mark.parametrize("likely", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("slope", [0.02, 0.2, 0.6])
def test_close_to_the_best_fixed_length(likely: float, slope: float) -> None:
    """Within a tenth of the best length that could have been known before, on cheap and on dear verification."""
    best = max(
        sum(likely**place for place in range(drafted + 1)) * 4 / (1 + slope * drafted) for drafted in range(MOST + 1)
    )
    speed, _ = simulate(DraftLength(MOST), likely, rounds=1000, slope=slope)
    assert speed > 0.9 * best


def test_rows_that_propose_nothing_count() -> None:
    """Right drafts in one row out of twenty do not pay for a verification that takes as long again."""
    speed, chosen = simulate(DraftLength(4), likely=0.9, rounds=400, slope=0.25, proposing=0.05)
    assert sum(drafted == 0 for drafted in chosen) > 300
    assert speed > 0.95 * 4


def test_only_the_given_lengths() -> None:
    for likely in (0.0, 0.5, 0.95):
        _, chosen = simulate(DraftLength(MOST, levels=[0, 4, MOST]), likely, rounds=200)
        assert set(chosen) <= {0, 4, MOST}


@pytest.mark.parametrize(("mode", "expected"), [("fixed", MOST), ("off", 0)])
def test_what_is_not_adaptive(mode: str, expected: int) -> None:
    _, chosen = simulate(DraftLength(MOST, mode), likely=0.0, rounds=50)
    assert chosen == [expected] * 50


def test_the_first_round_of_a_length_is_not_timed() -> None:
    """It may have compiled a graph."""
    length = DraftLength(MOST)
    length.observe(4, 4, 4, 12, 1, seconds=30.0)
    assert length.seconds == {}
    length.observe(4, 4, 4, 12, 1, seconds=0.1)
    assert length.seconds == {4: 0.1}


def test_rounds_that_may_compile_are_not_timed() -> None:
    length = DraftLength(4, unsteady=3)
    for seconds in (60.0, 5.0, 5.0):
        length.observe(4, 1, 1, 2, 1, seconds)
        assert not length.seconds
    length.observe(4, 1, 1, 2, 1, 0.01)
    assert length.seconds == {4: 0.01}
    length.observe(0, 1, 0, 0, 0, 60.0)
    assert length.seconds == {4: 0.01}, "each length has its own"
