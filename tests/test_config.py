"""Settings: every refusal says what it got and what it expected; the ring is as large as it has to be."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_transformers import ReplayConfig
from replay_transformers.cursor import Cursor
from replay_transformers.kernels.formats import CHECKPOINTS, READOUTS

# field, value, what the message must contain: the value and what was expected
WRONG = [
    ("window", 0, ["window", "at least 1", "0"]),
    ("window", -3, ["window", "at least 1", "-3"]),
    ("window", 2.0, ["window", "int", "at least 1", "float", "2.0"]),
    ("window", "16", ["window", "int", "str", "'16'"]),
    ("window", None, ["window", "int", "NoneType"]),
    ("window", True, ["window", "int", "bool", "True"]),
    ("max_draft", -1, ["max_draft", "at least 0", "-1"]),
    ("max_draft", 1.5, ["max_draft", "int", "float", "1.5"]),
    ("max_draft", False, ["max_draft", "int", "bool", "False"]),
    ("checkpoint", None, ["checkpoint", "float32", "None"]),
    ("checkpoint", torch.float32, ["checkpoint", "'float32'", "torch.float32"]),
    ("checkpoint", "FP8", ["checkpoint", "'fp8'", "'FP8'"]),
    ("checkpoint", ["fp8"], ["checkpoint", "'fp8'", "['fp8']"]),
    ("decay_skip", "0", ["decay_skip", "number", "'0'"]),
    ("decay_skip", True, ["decay_skip", "number", "True"]),
    ("decay_skip", -0.1, ["decay_skip", "[0, 1)", "-0.1"]),
    ("decay_skip", 1.0, ["decay_skip", "[0, 1)", "1.0"]),
    ("decay_skip", float("nan"), ["decay_skip", "[0, 1)", "nan"]),
    ("decay_skip", float("inf"), ["decay_skip", "[0, 1)", "inf"]),
    ("decay_skip", None, ["decay_skip", "number", "None"]),
    ("seed", -1, ["seed", "at least 0", "-1"]),
    ("seed", 1.0, ["seed", "int", "float", "1.0"]),
    ("seed", "1", ["seed", "int", "str", "'1'"]),
    ("seed", None, ["seed", "int", "NoneType"]),
    ("seed", True, ["seed", "int", "bool", "True"]),
    ("seed", 2**32, ["seed", "less than 2^32", str(2**32)]),
    ("readout", torch.bfloat16, ["readout", "'bfloat16'", "torch.bfloat16"]),
    ("readout", True, ["readout", "None", "True"]),
    ("impl", "cuda", ["impl", "auto", "reference", "triton", "'cuda'"]),
    ("impl", None, ["impl", "auto", "None"]),
]


@pytest.mark.parametrize(("field", "value", "words"), WRONG, ids=[f"{field}={value!r}" for field, value, _ in WRONG])
def test_wrong_values_are_refused(field: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        ReplayConfig(**{field: value})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"checkpoint": "float64"}, ["checkpoint='float64'", "impl='auto'"]),
        ({"window": 600}, ["512 records", "window=600", "max_draft=8", "609"]),
        ({"max_draft": 200}, ["512 records", "max_draft=200"]),
    ],
    ids=str,
)
def test_what_the_kernels_cannot_do_is_refused_where_they_are_asked_for(
    settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="impl='triton'") as caught:
        ReplayConfig(impl="triton", **settings)
    assert all(word in str(caught.value) for word in words)
    ReplayConfig(**settings)


def test_an_unknown_checkpoint_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'int4'") as caught:
        ReplayConfig(checkpoint="int4")
    assert all(name in str(caught.value) for name in CHECKPOINTS)


@pytest.mark.parametrize("value", ["int4", "fp8_sr", "float64", 8, ""])
def test_an_unknown_readout_names_the_known_ones(value: Any) -> None:
    with pytest.raises(ValueError, match="readout must be None or one of") as caught:
        ReplayConfig(readout=value)
    assert all(name in str(caught.value) for name in (*READOUTS, repr(value)))


def test_what_is_plain() -> None:
    assert all(ReplayConfig(checkpoint=name).is_plain for name in ("float32", "bfloat16", "float16", "float64"))
    others: list[dict[str, Any]] = [{"checkpoint": "fp8"}, {"readout": "bfloat16"}, {"decay_skip": 0.1}]
    assert not any(ReplayConfig(**settings).is_plain for settings in others)


def test_defaults_are_valid_and_exact() -> None:
    config = ReplayConfig()
    assert config.to_dict() == {
        "window": 16,
        "max_draft": 8,
        "checkpoint": "float32",
        "readout": None,
        "decay_skip": 0.0,
        "impl": "auto",
        "draft_length": "adaptive",
        "seed": 0,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 3  # type: ignore[misc]


@given(
    st.integers(1, 64),
    st.integers(0, 64),
    st.sampled_from(CHECKPOINTS),
    st.sampled_from([None, *READOUTS]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["auto", "reference"]),
    st.integers(0, 2**32 - 1),
)
def test_dicts_round_trip(
    window: int, max_draft: int, checkpoint: str, readout: str | None, decay_skip: float, impl: str, seed: int
) -> None:
    config = ReplayConfig(window, max_draft, checkpoint, readout, decay_skip, impl, seed=seed)
    assert ReplayConfig.from_dict(config.to_dict()) == config
    assert hash(ReplayConfig.from_dict(config.to_dict())) == hash(config)


def test_from_dict_takes_a_part_or_nothing() -> None:
    assert ReplayConfig.from_dict(None) == ReplayConfig.from_dict({}) == ReplayConfig()
    assert ReplayConfig.from_dict({"window": 4}) == ReplayConfig(window=4)


@pytest.mark.parametrize("settings", [["window"], 7, "window=3", ReplayConfig()], ids=lambda s: type(s).__name__)
def test_from_dict_refuses_other_types(settings: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a dict with keys out of .*'window'") as caught:
        ReplayConfig.from_dict(settings)
    assert type(settings).__name__ in str(caught.value)


def test_from_dict_refuses_unknown_keys_and_wrong_values() -> None:
    with pytest.raises(ValueError, match=re.escape("['Window', 'draft']")) as caught:
        ReplayConfig.from_dict({"Window": 3, "max_draft": 1, "draft": 2})
    assert all(field.name in str(caught.value) for field in dataclasses.fields(ReplayConfig))
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        ReplayConfig.from_dict({"window": 0})


CONV_KERNEL = 4


class RingOfPositions:
    """One row's rings, simulated slot by slot: every slot knows which position was written into it last."""

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.slots: list[int | None] = [None] * config.capacity
        self.inputs: list[int | None] = [None] * (config.capacity + CONV_KERNEL - 1)  # of the convolution
        self.cursor = Cursor(config)
        self.most = 0  # largest number of slots in use during a forward

    def live(self) -> tuple[int, int]:
        """First live position and the one after the last."""
        if self.cursor.base is None:
            return 0, 0
        base, committed, pending = (int(tensor[0]) for tensor in self.cursor.tensors())
        return base, base + committed + pending

    def forward(self, tokens: int) -> None:
        """Write as `replay_step` does, while everything live at the start can still be read (and folded)."""
        first, end = self.live()
        assert all(self.slots[p % len(self.slots)] == p for p in range(first, end)), "a live record was overwritten"
        context = range(max(0, end - (CONV_KERNEL - 1)), end)
        assert all(self.inputs[p % len(self.inputs)] == p for p in context), "the convolution's context is gone"
        for position in range(end, end + tokens):
            self.inputs[position % len(self.inputs)] = position
        plan = self.cursor.begin(1, tokens, torch.device("cpu"))
        if plan.scanned:  # everything before the kept tokens is folded first
            first = end = end + plan.scanned
        self.most = max(self.most, end + plan.kept - first)
        assert self.most <= len(self.slots), "a forward needs more slots than there are"
        for position in range(end, end + plan.kept):
            self.slots[position % len(self.slots)] = position
        assert all(self.slots[p % len(self.slots)] == p for p in range(first, end)), "a live record was overwritten"
        self.cursor.end()

    def crop(self, rejected: int) -> None:
        """Reject as many of the uncommitted tokens as asked for, and as there are."""
        if self.cursor.pending is not None:
            self.cursor.commit(min(rejected, int(self.cursor.pending[0])))


@settings(max_examples=200)
@given(
    st.integers(1, 20),
    st.integers(0, 10),
    st.lists(
        st.one_of(st.integers(1, 30), st.tuples(st.just("crop"), st.integers(0, 10)), st.just("record")), max_size=40
    ),
)
def test_no_live_record_is_ever_overwritten(window: int, max_draft: int, actions: list[Any]) -> None:
    """Any order of forwards of any length, before and after recording starts, and verdicts."""
    ring = RingOfPositions(ReplayConfig(window=window, max_draft=max_draft))
    for action in actions:
        if action == "record":
            ring.cursor.recording = True
        elif isinstance(action, tuple):
            ring.crop(action[1])
        else:
            ring.forward(action)


@pytest.mark.parametrize(("window", "max_draft"), [(16, 8), (16, 0), (1, 0), (3, 4), (17, 8), (40, 8)])
def test_the_capacity_is_needed(window: int, max_draft: int) -> None:
    """No slot fewer would do: some sequence uses them all at once."""
    ring = RingOfPositions(ReplayConfig(window=window, max_draft=max_draft))
    ring.cursor.recording = True
    for _ in range(window):  # a full window of committed records, then a longest step
        ring.forward(1)
        ring.crop(0)
    ring.forward(max_draft + 1)
    full_window = ring.most
    for _ in range(3):  # a longest step on top of a longest step and what it left undecided
        ring.forward(max_draft + 1)
    assert max(full_window, ring.most) == ring.config.capacity
