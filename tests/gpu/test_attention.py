"""Attention of few tokens without expanded keys, on the shapes of real models."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from replay_transformers.patches.attention import REPLAY_FLAG, few_query_attention
from replay_transformers.patches.long_attention import LEAST_KEYS, pieces_for

# Outputs near 1. Both sum in float32 and round what they return, and probabilities in between, to the dtype.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("length", [128, 333, 5000, 8192])  # the longer ones in pieces
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [((16, 4), 256), ((40, 8), 128)], ids=["qwen3_5-4b", "nemotron-4b"])
def test_equals_the_original(
    heads: tuple[int, int], head_dim: int, tokens: int, length: int, dtype: torch.dtype
) -> None:
    module = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], is_causal=True)
    query = torch.randn(4, tokens, heads[0], head_dim, device="cuda", dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, 4, heads[1], length, head_dim, device="cuda", dtype=dtype)
    mask = torch.arange(length, device="cuda") < torch.randint(1, length, (4, 1, tokens, 1), device="cuda")
    with torch.no_grad():
        truth, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=head_dim**-0.5)
        got, _ = few_query_attention(module, query, key, value, mask, scaling=head_dim**-0.5, **{REPLAY_FLAG: True})
    torch.testing.assert_close(got, truth, rtol=0, atol=TOLERANCES[dtype])
    assert (pieces_for(query, key, value, mask) > 1) is (length >= LEAST_KEYS)
