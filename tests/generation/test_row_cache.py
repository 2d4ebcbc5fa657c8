"""Attention models on a cache whose rows have their own lengths: the logits of each row alone."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
import transformers

from replay_transformers.generation.row_cache import RowCache
from replay_transformers.generation.rows import Rows
from replay_transformers.patches.row_models import AttentionRows
from replay_transformers.ragged import as_attention_takes_it, visible, width_for, write_behind
from tests.support import models

PADS = [0, 4, 1]
EVERY_ATTENTION = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


@functools.cache
def model_for(implementation: str) -> Any:
    """A small Llama with two query heads per key head."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    return models.make_state_matter(transformers.LlamaForCausalLM(config))


def prompts(pads: list[int]) -> Rows:
    """Rows of seven tokens, padding included."""
    given = models.prompt(len(pads), 7, pads)
    return Rows(given["input_ids"], given["attention_mask"], models.PAD)


def alone(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits ``[T, vocabulary]`` of one row without padding or cache."""
    return models.full_logits(model, torch.tensor([tokens]))[0]


@EVERY_ATTENTION
@pytest.mark.parametrize("pads", [PADS, [0, 0]], ids=str)
@torch.no_grad()
def test_every_row_is_as_if_alone(implementation: str, pads: list[int]) -> None:
    """Rounds of one to five tokens, of which each row keeps some, until the buffers have grown twice."""
    model, rows, choose = model_for(implementation), prompts(pads), random.Random(0)
    target, kept = AttentionRows(model), [rows.ids[row, pad:].tolist() for row, pad in enumerate(pads)]
    logits = target.prefill(rows)
    for row, tokens in enumerate(kept):
        torch.testing.assert_close(logits[row], alone(model, tokens)[-1], rtol=0, atol=1e-4)
    while max(len(tokens) for tokens in kept) < 2 * width_for(1) + 5:
        new = torch.randint(3, models.VOCABULARY, (len(pads), choose.randint(1, 5)))
        logits, count = target.forward(new), new.shape[1]
        rejected = torch.tensor([choose.randint(0, count) for _ in pads])
        for row, tokens in enumerate(kept):
            tokens += new[row].tolist()
            torch.testing.assert_close(logits[row], alone(model, tokens)[-count:], rtol=0, atol=1e-4)
            del tokens[len(tokens) - int(rejected[row]) :]
        longest = max(len(tokens) + pad for tokens, pad in zip(kept, pads, strict=True))
        target.reject(rejected, choose.choice([None, longest]))
    assert len({len(tokens) for tokens in kept}) > 1, "the rows are of different lengths"
    assert target.cache.layers[0].keys.shape[2] == 3 * width_for(1)


@EVERY_ATTENTION
@torch.no_grad()
def test_everything_may_be_rejected(implementation: str) -> None:
    model, rows = model_for(implementation), prompts([0])
    target = AttentionRows(model)
    target.prefill(rows)
    target.reject(torch.tensor([7]))
    logits = target.forward(rows.ids)
    torch.testing.assert_close(logits[0], alone(model, rows.ids[0].tolist()), rtol=0, atol=1e-4)


def test_positions_and_masks() -> None:
    cache = RowCache(1)
    cache.begin(torch.tensor([0, 2]))
    cache.advance(3)
    assert cache.positions().tolist() == [[0, 1, 2], [0, 0, 0]]
    mask = cache.mask("sdpa", torch.float32)
    assert mask is not None
    assert mask[1, 0].tolist() == [[True, False, False], [False, True, False], [False, False, True]]
    cache.reject(torch.tensor([1, 0]))
    cache.advance(2)
    assert cache.positions().tolist() == [[2, 3], [1, 2]]
    mask = cache.mask("eager", torch.float16)
    assert mask is not None
    assert mask.shape == (2, 1, 2, width_for(5))
    assert (mask[0, 0, 0] == 0).nonzero().flatten().tolist() == [0, 1, 2]
    assert (mask[1, 0, 1] == 0).nonzero().flatten().tolist() == [2, 3, 4]
    assert mask.dtype == torch.float16
    cache.begin(torch.tensor([0, 0]))
    cache.advance(3)
    assert cache.mask("sdpa", torch.float32) is None
    assert cache.mask("eager", torch.float32) is not None


def test_writing_and_seeing() -> None:
    held = torch.zeros(2, 1, 4, 1)
    write_behind(held, torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).expand(2, 1, 2, 1), torch.tensor([0, 2]))
    assert held[:, 0, :, 0].tolist() == [[1, 2, 0, 0], [0, 0, 1, 2]]
    hidden = torch.tensor([[True, False, False]])
    assert visible(torch.tensor([1]), 1, 3).tolist() == [[[True, True, False]]]
    assert visible(torch.tensor([1]), 1, 3, hidden).tolist() == [[[False, True, False]]]


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="'sdpa' or 'eager', got 'flash_attention_2'"):
        as_attention_takes_it(torch.ones(1, 1, 1, dtype=torch.bool), "flash_attention_2", torch.float32)
    with pytest.raises(NotImplementedError, match="each row by its own number"):
        RowCache(1).crop(-1)
    config = transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
    with pytest.raises(NotImplementedError, match="MambaForCausalLM cannot draft"):
        AttentionRows(transformers.MambaForCausalLM(config))
