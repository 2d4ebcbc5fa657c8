"""Triton: states in fp8, see `plain_tiles` for what the functions take."""

import torch
import triton
import triton.language as tl

from replay_transformers.kernels.formats import fp8, plain_tiles
from replay_transformers.kernels.formats.rounding_tiles import round_stochastically, state_bits
from replay_transformers.kernels.tiles import INTERPRETED, exact_product, magnitude_bits

__all__ = [
    "PTX",
    "e4m3_code",
    "e4m3_value",
    "load",
    "opened",
    "power_scale",
    "products",
    "store",
    "store_sr",
    "vectors",
]

CARRY, EXPONENT, LEAST = tl.constexpr(fp8.CARRY), tl.constexpr(fp8.EXPONENT), tl.constexpr(fp8.LEAST)
MANTISSA, SMALLEST = tl.constexpr(fp8.MANTISSA), tl.constexpr(fp8.SMALLEST)
# whether the GPU converts e4m3 by itself
NATIVE = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))
# whether kernels may have instructions of NVIDIA's GPUs in them
PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)
# two of four bytes of e4m3 to two bfloat16: the bits of a byte fit as they are, at an exponent that is 120 too small
_TWO = """
prmt.b32 two, $2, 0, {bytes};
and.b32 sign, two, 0x80008000;
shr.b32 two, two, 4;
and.b32 two, two, 0x07f007f0;
or.b32 two, two, sign;
fma.rn.bf16x2 {numbers}, two, factor, zero;"""
FOUR = tl.constexpr(
    "{.reg .b32 two, sign, factor, zero; mov.b32 factor, 0x7b807b80; mov.b32 zero, 0x80008000;"
    + _TWO.format(bytes="0x1404", numbers="$0")
    + _TWO.format(bytes="0x3424", numbers="$1")
    + "}"
)
vectors = plain_tiles.vectors


@triton.jit
def power_scale(largest, CARRY: tl.constexpr, EXPONENT: tl.constexpr):
    """`fp8.power_scale` of the bits of the largest value, and its inverse; NaN and 0 where it is not finite."""
    biased = tl.maximum(((largest + CARRY) >> 23) - EXPONENT, LEAST)
    is_finite = largest < 0x7F800000
    scale = (biased << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, 0.0)


@triton.jit
def e4m3_code(values):
    """e4m3 of float32 values of at most 448, to nearest even, as uint8."""
    if NATIVE:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below the smallest normal number, multiples of 2^-9: rounded by the adder
    raised = tl.abs(values) * 512.0 + 8388608.0
    small = raised.to(tl.int32, bitcast=True) & 15
    code = tl.where(tl.abs(values) < SMALLEST, small, normal) | ((bits >> 24) & 128)
    return code.to(tl.uint8)


@triton.jit
def e4m3_value(code):
    """Float32 of e4m3, given as uint8."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.int32)
    half = (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def load(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All states of the channels."""
    code, scale = opened(values, scales, head_scales, row_head, c, ok, WIDTH, STATES, BLOCK_N)
    return e4m3_value(code) * scale.to(tl.float32)[:, None]


@triton.jit
def _store(
    values, scales, row_head, c, ok, wide, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    scale, inverse = power_scale(tl.max(magnitude_bits(wide), 1), CARRY, EXPONENT)
    tl.store(scales + row_head * WIDTH + c, scale.to(tl.bfloat16), mask=ok)
    scaled = tl.where((inverse == 0.0)[:, None], 0.0, wide * inverse[:, None])
    if IS_STOCHASTIC:
        bits = state_bits(row_head, c, n, position, key, STATES)
        scaled = round_stochastically(scaled, bits, MANTISSA, SMALLEST)
    code = e4m3_code(scaled)
    place = values + row_head * (WIDTH * STATES) + (c[:, None] * STATES + n[None, :])
    tl.store(place, code, mask=ok[:, None] & (n < STATES)[None, :])
    return e4m3_value(code) * scale[:, None]


@triton.jit
def store(
    values, scales, head_scales, row_head, c, ok, wide, largest, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write all states of the channels; the same as they are read back."""
    return _store(values, scales, row_head, c, ok, wide, key, position, WIDTH, STATES, BLOCK_N, False)


@triton.jit
def store_sr(
    values, scales, head_scales, row_head, c, ok, wide, largest, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The same with stochastic rounding."""
    return _store(values, scales, row_head, c, ok, wide, key, position, WIDTH, STATES, BLOCK_N, True)


@triton.jit
def opened(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All states of the channels, and the channels' scales."""
    n = tl.arange(0, BLOCK_N)
    place = values + row_head * (WIDTH * STATES) + (c[:, None] * STATES + n[None, :])
    code = tl.load(place, mask=ok[:, None] & (n < STATES)[None, :], other=0)
    return code, tl.load(scales + row_head * WIDTH + c, mask=ok, other=0.0)


@triton.jit
def _narrow(code):
    """bfloat16 of e4m3, given as uint8: exact."""
    if PTX:
        return tl.inline_asm_elementwise(FOUR, "=&r,=&r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    return e4m3_value(code).to(tl.bfloat16)


@triton.jit
def products(tile, vectors):
    """The states of each channel times each vector, on matrix units."""
    result = tl.zeros([tile[0].shape[0], vectors[0].shape[1]], tl.float32)
    return exact_product(_narrow(tile[0]), vectors[0], result) * tile[1].to(tl.float32)[:, None]
