"""Watching the rounds of a call: what is counted, and that nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from replay_transformers.generation.loop import Loop
from replay_transformers.generation.watch import Rounds, watched


def test_finished_rows_and_the_prompts_do_not_count() -> None:
    def choice(drafts: list[int], accepted: list[int], active: list[bool]) -> tuple[torch.Tensor, ...]:
        return torch.tensor(drafts), torch.tensor(accepted), torch.tensor(active)

    rounds = Rounds(
        [
            choice([0, 0], [0, 0], [True, True]),
            choice([3, 2], [1, 2], [True, True]),
            choice([3, 0], [3, 0], [True, False]),
        ]
    )  # type: ignore[list-item]
    assert (rounds.forwards, rounds.turns, rounds.drafted, rounds.accepted) == (2, 3, 8, 6)
    assert (Rounds().forwards, Rounds().turns, Rounds().drafted) == (0, 0, 0)


def test_the_loop_is_as_before_also_after_an_error() -> None:
    original = Loop.choose

    def fail() -> None:
        with watched():
            assert Loop.choose is not original
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert Loop.choose is original
