"""Prompts through the kernels of flash-linear-attention and mamba-ssm: what they are given, and what is done with it.

The libraries need a GPU. Here modules of their names stand in for them, whose functions follow the documented
interfaces by way of the references.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from replay_transformers import implementation
from replay_transformers.implementation import Implementations
from replay_transformers.kernels.gated_delta import reach as gated_delta
from replay_transformers.kernels.mamba2 import reach as mamba2
from replay_transformers.kernels.scans import MOST_PROGRAMS
from replay_transformers.kernels.validation import FAR, is_far
from tests.support.operators import EVERY_OPERATOR, GATED_DELTA, GEOMETRIES, MAMBA2, Operator


def _chunk_gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, initial_state: Any, output_final_state: bool, **flags: bool
) -> Any:
    assert flags == {"use_qk_l2norm_in_kernel": True}
    assert output_final_state
    assert q.shape[2] == k.shape[2] == v.shape[2]  # one query head per value head
    assert initial_state.dtype == torch.float32
    return GATED_DELTA.kernel.scan(q, k, v, g, beta, state=initial_state)


def _mamba_chunk_scan_combined(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, **rest: Any) -> Any:
    assert chunk_size > 0
    assert rest.pop("return_final_states")
    state, D = rest.pop("initial_states"), rest.pop("D")
    assert not rest
    assert state.dtype == torch.float32
    return MAMBA2.kernel.scan(x, dt, B, C, A, D, state=state)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for path, name, function in (
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _chunk_gated_delta_rule),
        ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", _mamba_chunk_scan_combined),
    ):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        setattr(sys.modules[path], name, function)
    for operator in ("gated_delta", "mamba2"):
        monkeypatch.delitem(sys.modules, f"replay_transformers.kernels.{operator}.library", raising=False)
    implementation._import_library.cache_clear()
    yield
    implementation._import_library.cache_clear()


@EVERY_OPERATOR
@pytest.mark.parametrize("checkpoint", [torch.float32, torch.bfloat16])
def test_outputs_and_states_are_the_reference(operator: Operator, checkpoint: torch.dtype, libraries: None) -> None:
    library = importlib.import_module(f"replay_transformers.kernels.{operator.name}.library")
    geometry = GEOMETRIES[0]
    tokens, parameters = operator.draw(2, 9, geometry, torch.float32), operator.parameters(geometry, torch.float32)
    states = [torch.randn(2, *operator.state_shape(geometry)).to(checkpoint)]
    states.append(states[0].clone())
    outputs = [
        kernel.update(*tokens.values(), *parameters.values(), state=state)
        for kernel, state in zip((library, operator.kernel), states, strict=True)
    ]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*states)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of each call of a library."""
    made: list[tuple[int, int]] = []

    def counted(function: Any) -> Any:
        def call(first: Any, *rest: Any, **settings: Any) -> Any:
            made.append((first.shape[0], first.shape[1]))
            return function(first, *rest, **settings)

        return call

    monkeypatch.setitem(globals(), "_chunk_gated_delta_rule", counted(_chunk_gated_delta_rule))
    monkeypatch.setitem(globals(), "_mamba_chunk_scan_combined", counted(_mamba_chunk_scan_combined))
    return made


@EVERY_OPERATOR
@pytest.mark.parametrize("checkpoint", [torch.float32, torch.bfloat16])
def test_what_is_too_much_at_once_goes_in_pieces(
    operator: Operator, checkpoint: torch.dtype, calls: list, libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a library could take two rows of four tokens: the same, states not rounded between."""
    library = importlib.import_module(f"replay_transformers.kernels.{operator.name}.library")
    geometry, rows = GEOMETRIES[0], 5
    monkeypatch.setattr(library, "reach", lambda *_: (2, 4))
    tokens, parameters = operator.draw(rows, 9, geometry, torch.float32), operator.parameters(geometry, torch.float32)
    states = [torch.randn(rows, *operator.state_shape(geometry)).to(checkpoint)]
    states.append(states[0].clone())
    output = library.update(*tokens.values(), *parameters.values(), state=states[0])
    want = operator.kernel.update(*tokens.values(), *parameters.values(), state=states[1])
    torch.testing.assert_close(output, want)
    torch.testing.assert_close(*states)
    assert calls == [(count, length) for count in (2, 2, 1) for length in (4, 4, 1)]


HEADS, WIDTH, GROUPS, STATES = 96, 80, 8, 128  # Nemotron-3-Nano-4B's


def operands_of(rows: int, tokens: int, projected: int | None) -> list[torch.Tensor]:
    """x, dt, B, C without memory, contiguous or parts of a projection to so many channels."""
    shapes = ((HEADS, WIDTH), (HEADS,), (GROUPS, STATES), (GROUPS, STATES))
    if projected is None:
        return [torch.empty(rows, tokens, *shape, device="meta") for shape in shapes]
    whole = torch.empty(rows, tokens, projected, device="meta")
    return [whole[..., : math.prod(shape)].unflatten(-1, shape) for shape in shapes]


@pytest.mark.parametrize(
    ("rows", "tokens", "projected", "want"),
    [
        (1248, 64, 17504, (1916, 64)),  # rows are 64 * 17,504 elements apart
        (4000, 64, None, (2184, 64)),  # 2,184 * 96 * 80 * 128 elements of states
        (8, 32768, 17504, (3, 32768)),
        (2, 2**20, None, (1, 2184 * 128)),
        (2, 2**20, 17504, (1, 958 * 128)),
        (70000, 1, None, (2184, 1)),
    ],
)
def test_how_much_mamba_ssm_can_take(rows: int, tokens: int, projected: int | None, want: tuple[int, int]) -> None:
    """Nothing is 2^31 elements from its beginning, but with a row or a token more it is."""
    operands = operands_of(rows, tokens, projected)
    got_rows, got_tokens = got = mamba2.reach(*operands)
    assert got == want

    def fits(rows: int, tokens: int) -> bool:
        chunks = -(-tokens // mamba2.CHUNK)
        if rows * chunks * HEADS * WIDTH * STATES > FAR or max(rows, GROUPS) * chunks > MOST_PROGRAMS:
            return False
        return not is_far(*operands_of(rows, tokens, projected))

    assert fits(got_rows, got_tokens)
    assert not fits(got_rows + 1, got_tokens)
    assert got_tokens == tokens or not fits(1, got_tokens + mamba2.CHUNK)


@pytest.mark.parametrize(
    ("rows", "tokens", "want"),
    [
        (4000, 64, (2047, 64)),  # 65,535 programs of 32 heads
        (16, 32768, (8, 32768)),  # 8 * 512 * 32 * 128 * 128 elements of states
        (2, 2**20, (1, 4096 * 64)),
    ],
)
def test_how_much_flash_linear_attention_can_take(rows: int, tokens: int, want: tuple[int, int]) -> None:
    """Qwen3.5-4B's shapes."""
    q, v = (torch.empty(rows, tokens, heads, 128, device="meta") for heads in (16, 32))
    assert gated_delta.reach(q, q, v) == want


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1), (1, 0, 2)], ids=str)
def test_any_layout_is_within_reach(axes: tuple[int, int, int]) -> None:
    """[rows, tokens, channels] transposed: what the scan makes is the limit then, and nothing is cut up needlessly."""
    sizes = 8, 4096, HEADS * WIDTH
    whole = torch.empty([sizes[axis] for axis in axes], device="meta")
    x = whole.permute([axes.index(axis) for axis in range(3)]).unflatten(-1, (HEADS, WIDTH))
    _, *others = operands_of(8, 4096, None)
    assert mamba2.reach(x, *others) == (68, 4096)
    assert mamba2.reach(x[:, :0], *(other[:, :0] for other in others))[0] >= 1


@EVERY_OPERATOR
def test_when_a_library_is_used(operator: Operator, libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = Implementations(operator.name, "auto")
    assert chosen.library is not None
    on_a_gpu, narrow = torch.zeros(1, device="meta"), torch.zeros(1, dtype=torch.bfloat16)
    monkeypatch.setattr(implementation, "GPU", "meta")
    assert chosen.choose_scan(on_a_gpu, narrow) is chosen.library
    assert chosen.choose_scan(torch.zeros(1), narrow) is chosen.reference
    assert chosen.choose_scan(on_a_gpu, torch.zeros(1)) is chosen.reference
    assert chosen.choose_scan(on_a_gpu, narrow.clone().requires_grad_()) is chosen.reference
    for impl in ("reference", "triton"):
        assert Implementations(operator.name, impl).library is None


def test_a_broken_library_is_said_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, libraries: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(implementation, "_said", set())
    delattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule")
    for _ in range(2):
        assert Implementations("gated_delta", "auto").library is None
    assert len(caplog.messages) == 1
    assert "fla is installed and cannot be imported" in caplog.messages[0]
