"""Triton: states in fp8, see `plain_tiles` for what the functions take."""

import torch
import triton
import triton.language as tl

from replay_transformers.kernels.formats import fp8
from replay_transformers.kernels.formats.rounding_tiles import round_stochastically, state_bits

__all__ = ["dot", "e4m3_code", "e4m3_value", "load", "magnitude_bits", "opened", "power_scale", "store", "store_sr"]

CARRY, EXPONENT, LEAST = tl.constexpr(fp8.CARRY), tl.constexpr(fp8.EXPONENT), tl.constexpr(fp8.LEAST)
MANTISSA, SMALLEST = tl.constexpr(fp8.MANTISSA), tl.constexpr(fp8.SMALLEST)
# whether the GPU converts e4m3 by itself
NATIVE = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))


@triton.jit
def magnitude_bits(values):
    """The bits of absolute values: ordered like them, NaN above infinity above all others."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


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
    """e4m3 of float32 values of at most 448, to nearest even, as int32."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below the smallest normal number, multiples of 2^-9: rounded by the adder
    raised = tl.abs(values) * 512.0 + 8388608.0
    small = raised.to(tl.int32, bitcast=True) & 15
    return tl.where(tl.abs(values) < SMALLEST, small, normal) | ((bits >> 24) & 128)


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
    values, scales, head_scales, row_head, c, ok, begin,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """PART states of the channels, from ``begin`` on."""
    n = begin + tl.arange(0, PART)
    place = values + row_head * (WIDTH * STATES) + (c[:, None] * STATES + n[None, :])
    code = tl.load(place, mask=ok[:, None] & (n < STATES)[None, :], other=0)
    scale = tl.load(scales + row_head * WIDTH + c, mask=ok, other=0.0).to(tl.float32)
    return e4m3_value(code) * scale[:, None]


@triton.jit
def _store(
    values, scales, row_head, c, ok, parts, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    largest = tl.max(magnitude_bits(parts[0]), 1)
    for index in tl.static_range(1, len(parts)):
        largest = tl.maximum(largest, tl.max(magnitude_bits(parts[index]), 1))
    scale, inverse = power_scale(largest, CARRY, EXPONENT)
    tl.store(scales + row_head * WIDTH + c, scale.to(tl.bfloat16), mask=ok)
    stored = ()
    for index in tl.static_range(len(parts)):
        n = index * PART + tl.arange(0, PART)
        scaled = tl.where((inverse == 0.0)[:, None], 0.0, parts[index] * inverse[:, None])
        if IS_STOCHASTIC:
            bits = state_bits(row_head, c, n, position, key, STATES)
            scaled = round_stochastically(scaled, bits, MANTISSA, SMALLEST)
        code = e4m3_code(scaled).to(tl.uint8)
        place = values + row_head * (WIDTH * STATES) + (c[:, None] * STATES + n[None, :])
        tl.store(place, code, mask=ok[:, None] & (n < STATES)[None, :])
        stored += (e4m3_value(code) * scale[:, None],)  # type: ignore[assignment]
    return stored


@triton.jit
def store(
    values, scales, head_scales, row_head, c, ok, parts, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write all states of the channels, given in parts; the same as they are read back."""
    return _store(values, scales, row_head, c, ok, parts, key, position, WIDTH, STATES, PART, False)


@triton.jit
def store_sr(
    values, scales, head_scales, row_head, c, ok, parts, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The same with stochastic rounding."""
    return _store(values, scales, row_head, c, ok, parts, key, position, WIDTH, STATES, PART, True)


@triton.jit
def opened(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All states of the channels, and the channels' scales."""
    n = tl.arange(0, BLOCK_N)
    place = values + row_head * (WIDTH * STATES) + (c[:, None] * STATES + n[None, :])
    code = tl.load(place, mask=ok[:, None] & (n < STATES)[None, :], other=0)
    return code, tl.load(scales + row_head * WIDTH + c, mask=ok, other=0.0)


@triton.jit
def dot(tile, vector, stride, STATES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The states of each channel times a vector: ``[channels]``."""
    n = tl.arange(0, BLOCK_N)
    other = tl.load(vector + n * stride, mask=n < STATES, other=0.0).to(tl.float32)
    return tl.sum(e4m3_value(tile[0]) * other[None, :], 1) * tile[1].to(tl.float32)
