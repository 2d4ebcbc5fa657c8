"""Triton: states in NVFP4, see `plain_tiles` for what the functions take. `store` needs all channels of a head."""

import triton
import triton.language as tl

from replay_transformers.kernels.formats import nvfp4
from replay_transformers.kernels.formats.fp8_tiles import e4m3_code, e4m3_value, magnitude_bits, power_scale

__all__ = ["dot", "load", "opened", "store"]

BLOCK, HALF = tl.constexpr(nvfp4.BLOCK), tl.constexpr(nvfp4.BLOCK // 2)
CARRY, EXPONENT, SIXTH = tl.constexpr(nvfp4.CARRY), tl.constexpr(nvfp4.EXPONENT), tl.constexpr(nvfp4.SIXTH)
SIGNS = tl.constexpr(-0x7FFF8000)  # the highest bits of both halves of a word
HALF_SCALE = tl.constexpr(2.0**14)  # of e2m1, from its bits in the place of float16's


@triton.jit
def _number(code):
    """e2m1, given as the lower four bits of uint8, over 2^14: float32."""
    wide = code.to(tl.int32)
    half = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32)


@triton.jit
def _code(magnitude, unit):
    """The number of e2m1 that is nearest to ``magnitude / unit``, ties to even codes."""
    code = (magnitude > unit * 0.25).to(tl.int32) + (magnitude >= unit * 0.75).to(tl.int32)
    code += (magnitude > unit * 1.25).to(tl.int32) + (magnitude >= unit * 1.75).to(tl.int32)
    code += (magnitude > unit * 2.5).to(tl.int32) + (magnitude >= unit * 3.5).to(tl.int32)
    code += (magnitude > unit * 5.0).to(tl.int32)
    return tl.where(unit > 0.0, code, 0)


@triton.jit
def load(
    values, scales, head_scales, row_head, c, ok, begin,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """PART states of the channels, from ``begin`` on."""
    blocks: tl.constexpr = (STATES + BLOCK - 1) // BLOCK
    block, i = tl.arange(0, PART // BLOCK) + begin // BLOCK, tl.arange(0, HALF)
    here = ok[:, None] & (block < blocks)[None, :]
    place = row_head * (WIDTH * blocks) + (c[:, None] * blocks + block[None, :])
    packed = tl.load(values + (place * HALF)[:, :, None] + i[None, None, :], mask=here[:, :, None], other=0)
    scale = e4m3_value(tl.load(scales + place, mask=here, other=0)) * HALF_SCALE
    head_scale = tl.load(head_scales + (row_head + 0 * c), mask=ok, other=0.0)
    unit = (scale * head_scale[:, None])[:, :, None]
    both = tl.join(_number(packed & 15) * unit, _number(packed >> 4) * unit)
    return tl.reshape(both, [c.shape[0], PART])


@triton.jit
def store(
    values, scales, head_scales, row_head, c, ok, parts, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write all states of the channels, given in parts; the same as they are read back."""
    blocks: tl.constexpr = (STATES + BLOCK - 1) // BLOCK
    largest = tl.max(tl.max(magnitude_bits(parts[0]), 1), 0)
    for index in tl.static_range(1, len(parts)):
        largest = tl.maximum(largest, tl.max(tl.max(magnitude_bits(parts[index]), 1), 0))
    head_scale, inverse = power_scale(largest, CARRY, EXPONENT)
    tl.store(head_scales + row_head, head_scale)
    stored = ()
    for index in tl.static_range(len(parts)):
        block, i = tl.arange(0, PART // BLOCK) + index * (PART // BLOCK), tl.arange(0, HALF)
        here = ok[:, None] & (block < blocks)[None, :]
        place = row_head * (WIDTH * blocks) + (c[:, None] * blocks + block[None, :])
        wide = tl.reshape(parts[index], [parts[0].shape[0], PART // BLOCK, BLOCK])
        magnitude = tl.where(inverse == 0.0, 0.0, tl.abs(wide))
        scale_code = e4m3_code(tl.max(magnitude, 2) * inverse * SIXTH).to(tl.uint8)
        tl.store(scales + place, scale_code, mask=here)
        unit = (e4m3_value(scale_code) * tl.where(inverse == 0.0, 0.0, head_scale))[:, :, None]
        code = _code(magnitude, unit) | ((wide.to(tl.int32, bitcast=True) >> 28) & 8)
        low, high = tl.split(tl.reshape(code, [parts[0].shape[0], PART // BLOCK, HALF, 2]))
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(values + (place * HALF)[:, :, None] + i[None, None, :], packed, mask=here[:, :, None])
        unit = (e4m3_value(scale_code) * HALF_SCALE * head_scale)[:, :, None]
        stored += (tl.reshape(_number(code) * unit, [parts[0].shape[0], PART]),)  # type: ignore[assignment]
    return stored


@triton.jit
def opened(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All states of the channels, as two words per block, the blocks' scales, and the head's."""
    blocks: tl.constexpr = (STATES + BLOCK - 1) // BLOCK
    block, i = tl.arange(0, BLOCK_N // BLOCK), tl.arange(0, 2)
    here = ok[:, None] & (block < blocks)[None, :]
    place = row_head * (WIDTH * blocks) + (c[:, None] * blocks + block[None, :])
    words = values.to(tl.pointer_type(tl.int32))
    packed = tl.load(words + (place * 2)[:, :, None] + i[None, None, :], mask=here[:, :, None], other=0)
    head_scale = tl.load(head_scales + (row_head + 0 * c), mask=ok, other=0.0)
    return packed, tl.load(scales + place, mask=here, other=0), head_scale


@triton.jit
def _two_halves(words, K: tl.constexpr):
    """Numbers ``K`` and ``K + 4`` (0 to 7) of each word, over 2^14, as the lower and the upper float16 of int32."""
    if K == 0:
        return ((words << 9) & 0x0E000E00) | ((words << 12) & SIGNS)
    elif K == 1:
        return ((words << 5) & 0x0E000E00) | ((words << 8) & SIGNS)
    elif K == 2:
        return ((words << 1) & 0x0E000E00) | ((words << 4) & SIGNS)
    else:
        return ((words >> 3) & 0x0E000E00) | (words & SIGNS)


@triton.jit
def _lower(words):
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def dot(tile, vector, stride, STATES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The states of each channel times a vector: ``[channels]``."""
    n = tl.arange(0, BLOCK_N)
    wide = tl.load(vector + n * stride, mask=n < STATES, other=0.0).to(tl.float32)
    # by place in a word, bits from the lowest: so the threads that have a word have its eight factors
    even, odd = tl.split(tl.reshape(wide, [BLOCK_N // BLOCK, 2, 2, 2, 2]))
    even_0, even_1 = tl.split(even)
    odd_0, odd_1 = tl.split(odd)
    first, fifth = tl.split(even_0)
    third, seventh = tl.split(even_1)
    second, sixth = tl.split(odd_0)
    fourth, eighth = tl.split(odd_1)
    lower, upper = (first, second, third, fourth), (fifth, sixth, seventh, eighth)
    total = tl.zeros([tile[0].shape[0], BLOCK_N // BLOCK, 2], tl.float32)
    for k in tl.static_range(4):
        both = _two_halves(tile[0], k)
        total = tl.fma(_lower(both), tl.broadcast_to(lower[k][None, :, :], total.shape), total)
        total = tl.fma(_lower(both >> 16), tl.broadcast_to(upper[k][None, :, :], total.shape), total)
    return tl.sum(tl.sum(total, 2) * e4m3_value(tile[1]), 1) * (tile[2] * HALF_SCALE)
