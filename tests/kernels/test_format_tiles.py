"""Formats of the state in Triton: the bytes that the reference stores, and what it reads from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from replay_transformers.kernels.formats import FORMATS, PlainFormat, StoredState  # noqa: E402
from replay_transformers.kernels.tiles import LEAST_DEPTH, store_tiles  # noqa: E402
from replay_transformers.kernels.validation import power_of_two  # noqa: E402
from tests.support.kernels import DEVICE, INTERPRETED, bits  # noqa: E402

NAMES = [name for name in FORMATS if name != "float64"]
PACKED = [name for name, made in FORMATS.items() if not isinstance(made, PlainFormat)]
KEY = 7 << 32 | 3
SHAPES = [(8, 16), (5, 24), (16, 40)]


@triton.jit
def _encode(
    source, values, scales, head_scales, stored, key, positions,
    STORE: tl.constexpr, LOAD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Encode a head, write down what `store` says is stored, and what `load` reads: ``stored [2, rows, WIDTH, N]``."""
    row_head = tl.program_id(0).to(tl.int64)
    c, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    place = row_head * WIDTH * STATES + c[:, None] * STATES + n[None, :]
    states = ()
    for tile in tl.static_range((WIDTH + BLOCK - 1) // BLOCK):
        ok = (tile * BLOCK + c < WIDTH)[:, None] & (n < STATES)[None, :]
        states += (tl.load(source + tile * BLOCK * STATES + place, mask=ok, other=0.0),)
    position = tl.load(positions + row_head // HEADS)
    kept = store_tiles(
        STORE, values, scales, head_scales, row_head, 0, states, key, position,
        BLOCK, WIDTH, STATES, BLOCK_N, TRANSPOSED,
    )  # fmt: skip
    tl.debug_barrier()
    for tile in tl.static_range((WIDTH + BLOCK - 1) // BLOCK):
        channels = tile * BLOCK + c
        ok = (channels < WIDTH)[:, None] & (n < STATES)[None, :]
        tl.store(stored + tile * BLOCK * STATES + place, kept[tile], mask=ok)
        read = LOAD(
            values, scales, head_scales, row_head, channels, channels < WIDTH, WIDTH, STATES, BLOCK_N, TRANSPOSED
        )
        tl.store(stored + (tl.num_programs(0) * WIDTH + tile * BLOCK) * STATES + place, read, mask=ok)


@triton.jit
def _multiply(
    values, scales, head_scales, vectors, out,
    OPENED: tl.constexpr, VECTORS: tl.constexpr, PRODUCTS: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0).to(tl.int64)
    c, token = tl.arange(0, BLOCK), tl.arange(0, BLOCK_T)
    tile = OPENED(values, scales, head_scales, row_head, c, c < WIDTH, WIDTH, STATES, BLOCK_N)
    result = PRODUCTS(tile, VECTORS(vectors, 2 * STATES, 2, STATES, BLOCK_N, TOKENS, BLOCK_T))
    place = out + (row_head * WIDTH + c[:, None]) * TOKENS + token[None, :]
    tl.store(place, result, mask=(c < WIDTH)[:, None] & (token < TOKENS)[None, :])


def _parts(name: str, rows: int, heads: int, channels: int, states: int, transposed: bool) -> dict[str, torch.Tensor]:
    parts = FORMATS[name].parts(channels, states)
    shapes = {part: ((states, channels) if transposed else shape, dtype) for part, (shape, dtype) in parts.items()}
    return {
        part: torch.zeros(rows, heads, *shape, dtype=dtype, device=DEVICE) for part, (shape, dtype) in shapes.items()
    }


def _pointers(parts: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    values = parts["values"]
    return [values, parts.get("scales", values), parts.get("head_scales", values)]


def _run(name: str, values: torch.Tensor, positions: torch.Tensor, transposed: bool = False) -> Any:
    """Triton's parts of ``[B, H, C, N]``, what `store` returns and what `load` reads."""
    rows, heads, channels, states = values.shape
    parts = _parts(name, rows, heads, channels, states, transposed)
    stored = torch.zeros(2, *values.shape, device=DEVICE)
    block_n, kernels = max(power_of_two(states), LEAST_DEPTH), FORMATS[name].kernels()
    _encode[(rows * heads,)](
        values, *_pointers(parts), stored, KEY, positions,
        STORE=kernels.store, LOAD=kernels.load, HEADS=heads, WIDTH=channels, STATES=states,
        BLOCK=8, BLOCK_N=block_n, TRANSPOSED=transposed,
    )  # fmt: skip
    return parts, *stored


def _values(channels: int, states: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with ties and powers of two among the values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, 2, channels, states, generator=generator)
    values *= torch.logspace(-4, 3, channels, base=2.0)[:, None] * scale
    values[0, 0, 0] = torch.arange(states) * 0.25 - 2
    values[0, 1, 1] = 0
    values[1, 1, 2] = torch.ldexp(torch.tensor(1.25), torch.arange(states) % 30 - 20)
    return values.to(DEVICE)


@pytest.mark.parametrize(("channels", "states"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_the_reference(name: str, channels: int, states: int) -> None:
    positions = torch.tensor([5, (1 << 33) + 9], device=DEVICE)
    values = _values(channels, states)
    parts, stored, read = _run(name, values, positions)
    reference = StoredState(FORMATS[name], _parts(name, *values.shape, False), states, key=KEY)
    reference.write(values, positions)
    for part, want in reference.parts.items():
        if INTERPRETED and name == "bfloat16":  # truncated there
            assert torch.allclose(parts[part].float(), want.float(), rtol=2**-7, atol=0)
        else:
            assert torch.equal(bits(parts[part]), bits(want)), part
    assert torch.equal(stored, read)
    if name != "bfloat16":
        assert torch.equal(read, reference.read())


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-38, 1e30, 5e36], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_zeros_and_extremes(name: str, scale: float) -> None:
    values = _values(8, 16, scale)
    parts, *_ = _run(name, values, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    reference = StoredState(FORMATS[name], _parts(name, *values.shape, False), 16, key=KEY)
    reference.write(values, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert all(torch.equal(bits(parts[part]), bits(want)) for part, want in reference.parts.items())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_what_is_not_finite(name: str, value: float) -> None:
    values = _values(8, 16)
    values[1, 0, 3, 5] = value
    _, stored, read = _run(name, values, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    reference = StoredState(FORMATS[name], _parts(name, *values.shape, False), 16, key=KEY)
    reference.write(values, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    want = reference.read()
    assert torch.equal(read.isnan(), want.isnan())
    assert torch.equal(stored.isnan(), want.isnan())
    assert torch.equal(read.nan_to_num(0), want.nan_to_num(0))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_transposed_state(name: str) -> None:
    values = _values(5, 24)
    parts, stored, read = _run(name, values, torch.zeros(2, dtype=torch.int64, device=DEVICE), transposed=True)
    assert torch.equal(parts["values"].transpose(-1, -2).float(), read)
    assert torch.equal(stored, read)
    assert torch.allclose(read, values, rtol=2**-7)


@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (3, torch.bfloat16), (3, torch.float32)], ids=str)
@pytest.mark.parametrize(("channels", "states"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_products(name: str, channels: int, states: int, tokens: int, dtype: torch.dtype) -> None:
    """Sums of exact products in float32, in another order than the reference's."""
    values, generator = _values(channels, states), torch.Generator().manual_seed(1)
    parts, _, read = _run(name, values, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    vectors = torch.randn(tokens, 2 * states, generator=generator).to(DEVICE, dtype)
    out, kernels = torch.zeros(2, 2, channels, tokens, device=DEVICE), FORMATS[name].kernels()
    _multiply[(4,)](
        *_pointers(parts), vectors, out, OPENED=kernels.opened, VECTORS=kernels.vectors, PRODUCTS=kernels.products,
        WIDTH=channels, STATES=states, BLOCK=max(power_of_two(channels), 16), TOKENS=tokens,
        BLOCK_N=max(power_of_two(states), LEAST_DEPTH), BLOCK_T=power_of_two(tokens),
    )  # fmt: skip
    taken = vectors[:, ::2].double().T
    exact, most = read.double() @ taken, read.double().abs() @ taken.abs()
    assert ((out - exact).abs() <= states * 2**-24 * most).all()
