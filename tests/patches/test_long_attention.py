"""Attention in pieces: PyTorch's results, whatever the pieces are, in decoding and in verification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

import replay_transformers as rt
from replay_transformers.patches import attention, long_attention
from replay_transformers.patches.long_attention import LEAST_KEYS, LEAST_PIECE, PROGRAMS, attend_in_pieces, pieces_for
from tests.patches.test_attention import HEADS
from tests.support.models import FAMILIES, greedy_without_cache, prompt

# Outputs near 1, sums of up to 100 products; bfloat16 rounds outputs and probabilities to 2^-9.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_any_size(dtype: torch.dtype) -> None:
    """A key that is hidden stays hidden beside scores far below it, and with one of its own far above."""
    key, value = torch.zeros(1, 1, 40, 8, dtype=dtype), torch.randn(1, 1, 40, 8, dtype=dtype)
    key[:, :, 3], key[:, :, 30] = -200.0, 200.0
    query, mask = torch.full((1, 1, 1, 8), 100.0, dtype=dtype), torch.zeros(1, 1, 1, 40, dtype=torch.bool)
    mask[..., 3] = True
    got = attend_in_pieces(query, key, value, mask, None, 4)
    torch.testing.assert_close(got[0, 0, 0], value[0, 0, 3], rtol=0, atol=0)


class Gpu:
    """Operands that claim to be on a GPU, and what `pieces_for` says of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        self.of((9, 0))

    def of(self, capability: tuple[int, int]) -> Gpu:
        self.patch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        return self

    def pieces(
        self, rows: int = 1, heads: int = 4, length: int = 32 * LEAST_PIECE, head_dim: int = 64, device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16, value: torch.dtype | None = None, mask: torch.dtype | None = torch.bool,
        **more: Any,
    ) -> int:  # fmt: skip
        with torch._subclasses.FakeTensorMode():
            query = torch.empty(rows, heads, 4, head_dim, device=device, dtype=dtype, **more)
            key = torch.empty(rows, heads, length, head_dim, device=device, dtype=dtype)
            values = torch.empty(rows, heads, length, 64, device=device, dtype=value or dtype)
            shown = None if mask is None else torch.empty(1, 1, 1, length, device=device, dtype=mask)
            return pieces_for(query, key, values, shown)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_as_many_pieces_as_fill_a_gpu_and_none_of_them_short(gpu: Gpu) -> None:
    assert gpu.pieces(1, 4, LEAST_KEYS) == LEAST_KEYS // LEAST_PIECE
    assert gpu.pieces(1, 4, 40 * LEAST_PIECE + 7) == 40
    assert gpu.pieces(1, 4, 200 * LEAST_PIECE) == PROGRAMS // 4
    assert gpu.pieces(8, 8, 32768) == PROGRAMS // 64
    assert gpu.pieces(256, 4, 32768) == gpu.pieces(1, 4, LEAST_KEYS - 1) == 1


def test_what_is_left_to_pytorch(gpu: Gpu) -> None:
    """Where it would cast, or take another kernel."""
    assert gpu.pieces() == gpu.pieces(mask=torch.bfloat16) == gpu.pieces(dtype=torch.float32) == 32
    for unusual in (
        {"mask": None}, {"device": "cpu"}, {"requires_grad": True}, {"dtype": torch.float64}, {"head_dim": 20},
        {"dtype": torch.float32, "value": torch.bfloat16}, {"dtype": torch.float16, "mask": torch.float32},
    ):  # fmt: skip
        assert gpu.pieces(**unusual) == 1, unusual
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert gpu.pieces() == 1
    assert gpu.of((8, 6)).pieces() == 32
    assert gpu.of((7, 5)).pieces() == gpu.of((12, 0)).pieces() == 1


@pytest.mark.core
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family: str, implementation: str, speculative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = FAMILIES[family](**HEADS[family]), []

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> int:
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


@pytest.mark.no_poison
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_whole_and_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own decision, as if the CPU were a GPU and short sequences long."""
    model, inputs, called = FAMILIES[family](**HEADS[family]), prompt(2, 9, [0, 3]), list[str]()

    def as_it_is(graph: torch.fx.GraphModule, _: Any, **options: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    truth = greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 12)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for name, number in (("GPU", "cpu"), ("LEAST_KEYS", 8), ("LEAST_PIECE", 4), ("HEAD_MULTIPLE", 1)):
        monkeypatch.setattr(long_attention, name, number)
    compiled = transformers.CompileConfig(fullgraph=True, backend=as_it_is, mode=None, dynamic=False)
    compiled._compile_all_devices = True
    with rt.enable(), torch._dynamo.config.patch(error_on_recompile=True):
        arguments = {"do_sample": False, "max_new_tokens": 12, "cache_implementation": "replay_static"}
        assert torch.equal(model.generate(**inputs, **arguments, compile_config=compiled), truth)
    assert counters["stats"]["unique_graphs"] == 1
    assert sum("flash_attention_for_cpu" in name for name in called) == 1, "of the one layer with attention"
