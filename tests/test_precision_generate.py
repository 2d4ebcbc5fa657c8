"""`generate` with narrow states and separate copies: padding, beams, sampling, drafts, chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replay_transformers.kernels.formats import FORMATS, PlainFormat, StoredState
from tests.support import models
from tests.support.cached import assert_states, model_for
from tests.support.generation import returned_cache
from tests.support.models import prompt
from tests.support.precision import (
    EVERY,
    EVERY_FAMILY,
    MAX_DRAFT,
    SEPARATE,
    SOME,
    WINDOW,
    assert_copies_are_fresh,
    label,
    new,
)
from tests.support.speculation import speculate
from tests.test_assisted import mostly_right, tiny

pytestmark = pytest.mark.usefixtures("enabled")

STEPS = 14


def generation(implementation: str = "replay", steps: int = STEPS, **settings: Any) -> dict[str, Any]:
    """Greedy, unless told otherwise."""
    config = {"window": WINDOW, "max_draft": MAX_DRAFT, "draft_length": "fixed"} | settings
    return {
        "max_new_tokens": steps,
        "do_sample": False,
        "cache_implementation": implementation,
        "cache_config": config,
        "return_dict_in_generate": True,
    }


@EVERY
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@EVERY_FAMILY
def test_padded_batches_get_the_tokens_of_a_cache_fed_by_hand(
    family: str, implementation: str, settings: dict[str, Any]
) -> None:
    """And the cache that comes back stores its states as asked for."""
    model, inputs = model_for(family), prompt(3, 7, [0, 3, 1])
    output = model.generate(**inputs, **generation(implementation, **settings))
    cache, tokens, mask = new(model, **settings), inputs["input_ids"], inputs["attention_mask"]
    new_tokens = tokens
    for _ in range(STEPS):
        logits = models.cached_forward(model, cache, new_tokens, mask)
        assert logits.isfinite().all()
        new_tokens = logits[:, -1].argmax(-1, keepdim=True)
        tokens, mask = torch.cat([tokens, new_tokens], dim=1), torch.cat([mask, torch.ones_like(new_tokens)], dim=1)
    assert torch.equal(output.sequences, tokens)
    for layer in returned_cache(output).replay_layers:
        for kind, state in (("checkpoint", layer.checkpoint), ("readout", layer.readout)):
            name = getattr(layer.config, kind)
            assert (state is None) == (name is None)
            form = FORMATS.get(name)
            if isinstance(form, PlainFormat):
                assert state.dtype == form.dtype
            elif form is not None:
                assert isinstance(state, StoredState)
                assert state.format.name == name
    if "readout" in settings:
        assert_copies_are_fresh(returned_cache(output))


def modes(family: str) -> dict[str, dict[str, Any]]:
    """Ways to generate."""
    return {
        "greedy": {},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "sampling": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5, "top_k": 20},
        "prompt-lookup": {"prompt_lookup_num_tokens": 4},
        "assistant": {"assistant_model": mostly_right(family)},
        "chunks": {"prefill_chunk_size": 3},
    }


def generated(
    family: str, mode: str, implementation: str = "replay", dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    model, arguments = tiny(family), generation(implementation, **settings) | modes(family)[mode]
    torch.manual_seed(1)  # building a model the first time draws as well
    try:
        return model.to(dtype).generate(**prompt(2, 9, [0, 4]), **arguments)
    finally:
        model.to(torch.float32)


@pytest.mark.parametrize("mode", ["greedy", "beams", "sampling", "prompt-lookup", "assistant", "chunks"])
@EVERY_FAMILY
def test_a_float32_copy_gives_the_tokens_of_none(family: str, mode: str) -> None:
    """In every mode of generation, and the tokens of decoding without a copy or an assistant where it is greedy."""
    plain = generated(family, mode)
    copied = generated(family, mode, readout="float32")
    assert torch.equal(copied.sequences, plain.sequences)
    assert_copies_are_fresh(returned_cache(copied))
    if mode in ("prompt-lookup", "assistant", "chunks"):
        assert torch.equal(copied.sequences, generated(family, "greedy").sequences)


@SOME
@pytest.mark.parametrize("mode", ["beams", "sampling"])
@EVERY_FAMILY
def test_rows_that_are_reordered_or_repeated(family: str, mode: str, settings: dict[str, Any]) -> None:
    """Growing caches, whose rows become new tensors, and fixed ones, whose rows are moved in place, agree.

    In float64, where the two do not differ enough to round a state to different sides.
    """
    growing, fixed = (
        generated(family, mode, implementation, torch.float64, **settings)
        for implementation in ("replay", "replay_static")
    )
    assert torch.equal(growing.sequences, fixed.sequences)
    assert growing.sequences.shape[0] == 4


@pytest.mark.parametrize("settings", [*SEPARATE, {"checkpoint": "fp8_sr", "readout": "nvfp4"}], ids=label)
@pytest.mark.parametrize("drafter", ["prompt-lookup", "assistant"])
@EVERY_FAMILY
def test_assisted_generation_leaves_the_state_of_what_was_accepted(
    family: str, drafter: str, settings: dict[str, Any]
) -> None:
    """Where the checkpoint is exact, the first layer's state does not depend on what was read, nor on rejected drafts.

    Tokens need not be those of plain decoding: a copy is refreshed at other tokens there. The checkpoint that is
    rounded by chance is off by what three roundings in a hundred may come to.
    """
    model, inputs = tiny(family), prompt(1, 9)
    if drafter == "prompt-lookup":  # in which something can be found
        inputs = {name: tensor.repeat(1, 3) for name, tensor in inputs.items()}
    arguments = generation(steps=24, **settings) | modes(family)[drafter]
    arguments.pop("return_dict_in_generate")
    rounds = speculate(model, inputs, **arguments)
    rounds.check(accepting=int(drafter == "assistant"))
    cache, fresh = rounds.cache, new(model)
    assert_copies_are_fresh(cache)
    models.cached_forward(model, fresh, rounds.sequences[:, :-1])
    if "checkpoint" not in settings:
        assert_states(cache.state(0), fresh.state(0))
    else:
        error = (cache.state(0) - fresh.state(0)).norm() / fresh.state(0).norm()
        assert 1e-3 < error < 0.2


@pytest.mark.parametrize("settings", [SEPARATE[3], SEPARATE[4]], ids=label)
@EVERY_FAMILY
def test_assisted_generation_of_a_padded_batch(family: str, settings: dict[str, Any]) -> None:
    """Rows accept different numbers of drafts and flush at different times; their states are those of their tokens."""
    model, inputs = tiny(family), prompt(3, 9, [0, 4, 2])
    output = model.generate(**inputs, **generation(**settings), assistant_model=mostly_right(family))
    cache, fresh = returned_cache(output), new(model)
    seen = output.sequences[:, : int(cache.get_seq_length())]
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, seen.shape[1] - 9, dtype=torch.long)], dim=1)
    models.cached_forward(model, fresh, seen, mask)
    assert_states(cache.state(0), fresh.state(0))
    assert_copies_are_fresh(cache)
