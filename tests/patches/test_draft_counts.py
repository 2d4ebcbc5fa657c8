"""How many tokens a call drafts: numbers that are none, refused before anything changes; and which of two drafters."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from replay_transformers.generation.drafters.assistant import Assistant
from replay_transformers.generation.drafters.mtp import MultiTokenPrediction
from replay_transformers.generation.drafters.prompt_lookup import PromptLookup
from tests.patches.test_assisted import refused, turn
from tests.support.batches import observed
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import prompt
from tests.support.mtp import HAS_MTP
from tests.support.speculation import never_unsure, perturbed
from tests.test_assisted import EVERY_FAMILY, early_exiting, sample, tiny

pytestmark = pytest.mark.usefixtures("enabled")

LOOKUP = "prompt_lookup_num_tokens"
ASKED = "num_assistant_tokens"
OF_THE_ASSISTANT = "num_assistant_tokens of the assistant's generation_config"
NEEDS_MTP = pytest.mark.skipif(not HAS_MTP, reason="transformers has no use_mtp that serves Qwen3.5 before 5.23")
ONE_AND_TWO = pytest.mark.parametrize("rows", [1, 2])


def assert_refused(model: Any, rows: int, name: str, value: Any, **choice: Any) -> None:
    """In a first turn and in a second one: an error with the name and the value; then the cache goes on."""
    for is_second in (False, True):
        arguments = turn(model, rows, is_second)
        message = re.escape(f"{name} must be a whole number of at least 1, got {value!r}: ")
        with refused(model, arguments[CACHE_ARGUMENT], ValueError, f"^{message}"):
            model.generate(**arguments, **choice)
        expected = model.generate(**arguments | {CACHE_ARGUMENT: None})
        assert torch.equal(model.generate(**arguments, prompt_lookup_num_tokens=3), expected)


@pytest.mark.core
@pytest.mark.parametrize(
    ("rows", "value"),
    [(2, 0), *((1, value) for value in (0, -2, 5.5, 3.0, True, float("nan"), float("inf")))],
    ids=repr,
)
@EVERY_FAMILY
def test_numbers_for_prompt_lookup(family: str, value: Any, rows: int) -> None:
    assert_refused(tiny(family), rows, LOOKUP, value, prompt_lookup_num_tokens=value)


@NEEDS_MTP
@ONE_AND_TWO
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_for_multi_token_prediction(value: int, rows: int) -> None:
    assert_refused(sample("qwen3_5"), rows, ASKED, value, use_mtp=True, num_assistant_tokens=value)


@pytest.mark.core
@ONE_AND_TWO
@pytest.mark.parametrize("value", [0, -3, 2.5])
@EVERY_FAMILY
def test_numbers_of_an_assistants_own(family: str, value: Any, rows: int) -> None:
    assistant = never_unsure(perturbed(tiny(family), 0.0), tokens=value)
    assert_refused(tiny(family), rows, OF_THE_ASSISTANT, value, assistant_model=assistant)


def test_numbers_of_an_early_exit() -> None:
    """The target is its own assistant then."""
    model = copy.deepcopy(early_exiting())
    model.generation_config.num_assistant_tokens = 0
    assert_refused(model, 1, OF_THE_ASSISTANT, 0, assistant_early_exit=3)


@pytest.mark.core
@ONE_AND_TWO
@EVERY_FAMILY
def test_whole_floats(family: str, rows: int) -> None:
    """transformers' own schedules make them of an assistant's."""
    model, inputs = tiny(family), prompt(rows, 9)
    arguments = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "replay"}
    expected = model.generate(**inputs, **arguments)
    assistant = never_unsure(perturbed(model, 0.0), tokens=3.0)
    with observed(model) as rounds:
        output = model.generate(**inputs, **arguments, assistant_model=assistant)
    assert torch.equal(output, expected)
    assert rounds.drafter.most == 3
    assert type(rounds.drafter.most) is int


def several_drafters() -> dict[str, tuple[list[str], type]]:
    """Names of the arguments in a call, that of the one that drafts first, and what it is built as."""
    return {
        "lookup, assistant": ([LOOKUP, "assistant_model"], PromptLookup),
        "lookup, MTP": ([LOOKUP, "use_mtp"], PromptLookup),
        "MTP, assistant": (["use_mtp", "assistant_model"], MultiTokenPrediction),
        "all three": ([LOOKUP, "use_mtp", "assistant_model"], PromptLookup),
        "lookup": ([LOOKUP], PromptLookup),
        "assistant": (["assistant_model"], Assistant),
    }


@ONE_AND_TWO
@pytest.mark.parametrize(("names", "built"), several_drafters().values(), ids=several_drafters())
def test_one_of_several_drafters(names: list[str], built: type, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the one that drafts and those that do not, and says nothing of a single one."""
    if "use_mtp" in names and not HAS_MTP:
        pytest.skip("transformers has no use_mtp that serves Qwen3.5 before 5.23")
    model, inputs = sample("qwen3_5"), prompt(rows, 9)
    arguments = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "replay"}
    drafters = {LOOKUP: 3, "use_mtp": True, "assistant_model": sample("qwen3_5_draft")}
    expected = model.generate(**inputs, **arguments)
    caplog.clear()
    with observed(model) as rounds:
        output = model.generate(**inputs, **arguments, **{name: drafters[name] for name in names})
    assert torch.equal(output, expected)
    assert type(rounds.drafter) is built
    taken, *others = names
    said = [one for one in caplog.records if one.name.startswith("replay_transformers")]
    assert [one.levelname for one in said] == ["WARNING"] * bool(others)
    assert all(f": {taken} drafts, without {' and '.join(others)}" in one.getMessage() for one in said)


def test_an_early_exit_before_prompt_lookup(caplog: pytest.LogCaptureFixture) -> None:
    """The first layers draft."""
    model, inputs, depths = early_exiting(), prompt(1, 9), set[int]()
    arguments = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "replay", LOOKUP: 3}
    expected = model.generate(**inputs, **arguments)
    hook = model.register_forward_pre_hook(lambda module, args: depths.add(module.config.num_hidden_layers))
    output = model.generate(**inputs, **arguments, assistant_early_exit=3)
    hook.remove()
    assert torch.equal(output, expected)
    assert depths == {3, 4}
    assert f"assistant_early_exit drafts, without {LOOKUP}" in caplog.text
