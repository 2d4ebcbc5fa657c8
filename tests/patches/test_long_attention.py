"""Attention in pieces: PyTorch's results, whatever the pieces are, in decoding and in verification."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import replay_transformers as rt
from replay_transformers.patches import attention
from replay_transformers.patches.long_attention import LEAST_KEYS, LEAST_PIECE, PROGRAMS, attend_in_pieces, pieces_for
from tests.support.models import FAMILIES, greedy_without_cache, prompt

# Outputs near 1, sums of up to 100 products; bfloat16 rounds outputs and probabilities to 2^-9.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}
HEADS = {
    "qwen3_5": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "nemotron_h": {"num_attention_heads": 6, "num_key_value_heads": 2},
}


@pytest.mark.core
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [19, 64, 100])
@pytest.mark.parametrize(("queries", "masked"), [(1, 1), (6, 6), (6, 1)])
@pytest.mark.parametrize("is_bool", [True, False], ids=["bool", "float"])
def test_equals_attention_in_one_piece(
    is_bool: bool, queries: int, masked: int, length: int, pieces: int, dtype: torch.dtype
) -> None:
    """Also where most pieces have no key that is shown."""
    query, key, value = (torch.randn(3, 2, size, 8, dtype=dtype) for size in (queries, length, length))
    keep = torch.rand(3, 1, masked, length) < 0.3
    keep[0], keep[:, :, :, length // 3] = False, True
    mask = keep if is_bool else torch.zeros(keep.shape, dtype=dtype).masked_fill_(~keep, torch.finfo(dtype).min)
    for shared in (False, True):
        mask = mask[:1] if shared else mask
        truth = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
        got = attend_in_pieces(query, key, value, mask, 0.3, pieces)
        assert got.dtype == dtype
        torch.testing.assert_close(got, truth, rtol=0, atol=TOLERANCES[dtype])


def test_a_query_that_sees_nothing_is_finite() -> None:
    query, key, value = torch.randn(3, 1, 2, 30, 8).half()
    hidden = torch.zeros(1, 1, 1, 30, dtype=torch.bool)
    assert attend_in_pieces(query, key, value, hidden, None, 4).isfinite().all()


def test_how_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fill a GPU, none of them short; one where that is not possible."""

    def asked(rows: int, heads: int, length: int, mask: bool = True, device: str = "cuda", **more: Any) -> int:
        with torch._subclasses.FakeTensorMode():
            query = torch.empty(rows, heads, 4, 64, device=device, **more)
            key = torch.empty(rows, heads, length, 64, device=device)
            return pieces_for(query, key, torch.ones(1, 1, 1, length, device=device) if mask else None)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert asked(1, 4, LEAST_KEYS) == LEAST_KEYS // LEAST_PIECE
    assert asked(1, 4, 40 * LEAST_PIECE + 7) == 40
    assert asked(1, 4, 200 * LEAST_PIECE) == PROGRAMS // 4
    assert asked(8, 8, 32768) == PROGRAMS // 64
    assert asked(256, 4, 32768) == asked(1, 4, LEAST_KEYS - 1) == 1
    assert asked(1, 4, 32768, mask=False) == asked(1, 4, 32768, device="cpu") == 1
    assert asked(1, 4, 32768, requires_grad=True) == 1


@pytest.mark.core
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family: str, implementation: str, speculative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = FAMILIES[family](**HEADS[family]), []

    def counted(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> int:
        tokens.append(query.shape[2] * 2 // HEADS[family]["num_attention_heads"])
        return 1 if mask is None else min(3, key.shape[2])

    monkeypatch.setattr(attention, "pieces_for", counted)
    inputs = prompt(3, attention.MAX_TOKENS + 4, [0, 5, 2])
    inputs["input_ids"][:, -6:] = inputs["input_ids"][:, -12:-6]  # something for prompt lookup to find
    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "cache_implementation": implementation}
    if speculative:
        arguments |= {"prompt_lookup_num_tokens": 3, "cache_config": {"draft_length": "fixed"}}
    with rt.enable():
        assert torch.equal(model.generate(**inputs, **arguments), truth)
    assert set(tokens) >= ({4} if speculative else {1})
    assert speculative or len(tokens) == 11
