"""Triton: states in NVFP4, see `plain_tiles` for what the functions take."""

import triton
import triton.language as tl

from replay_transformers.kernels.formats import nvfp4
from replay_transformers.kernels.formats.fp8_tiles import PTX, e4m3_code, e4m3_value, power_scale
from replay_transformers.kernels.tiles import exact_product, load_vectors

__all__ = ["load", "opened", "products", "store", "vectors"]

BLOCK, HALF = tl.constexpr(nvfp4.BLOCK), tl.constexpr(nvfp4.BLOCK // 2)
CARRY, EXPONENT, SIXTH = tl.constexpr(nvfp4.CARRY), tl.constexpr(nvfp4.EXPONENT), tl.constexpr(nvfp4.SIXTH)
HALF_SCALE = tl.constexpr(2.0**14)  # of e2m1, from its bits in the place of float16's
# of e2m1, from its bits in the place of bfloat16's, in two factors: one that a block's scale still fits beside
NARROW_SCALE, REST_SCALE = tl.constexpr(2.0**118), tl.constexpr(2.0**8)
# two of four bytes and the scales of their blocks to two lower and two upper numbers, bfloat16, times the scales
_TWO = """
prmt.b32 two, $4, 0, {bytes};
shl.b32 sign, two, 4;
and.b32 sign, sign, 0x80008000;
shr.b32 {lower}, two, 2;
and.b32 {lower}, {lower}, 0x01c001c0;
or.b32 {lower}, {lower}, sign;
fma.rn.bf16x2 {lower}, {lower}, {scales}, zero;
and.b32 sign, two, 0x80008000;
shr.b32 two, two, 6;
and.b32 two, two, 0x01c001c0;
or.b32 two, two, sign;
fma.rn.bf16x2 {upper}, two, {scales}, zero;"""
EIGHT = tl.constexpr(
    "{.reg .b32 two, sign, zero; mov.b32 zero, 0x80008000;"
    + _TWO.format(bytes="0x1404", lower="$0", upper="$2", scales="$5")
    + _TWO.format(bytes="0x3424", lower="$1", upper="$3", scales="$6")
    + "}"
)


@triton.jit
def _number(code):
    """e2m1, given as the lower four bits of uint8, over 2^14: float32."""
    wide = code.to(tl.int32)
    half = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32)


@triton.jit
def _code(magnitude, unit):
    """The number of e2m1 that is nearest to ``magnitude / unit``, ties to even codes."""
    upper = magnitude >= unit * 1.75
    second = magnitude >= tl.where(upper, unit * 3.5, unit * 0.75)
    middle = tl.where(upper, tl.where(second, unit * 5.0, unit * 2.5), tl.where(second, unit * 1.25, unit * 0.25))
    code = tl.where(upper, 4, 0) | tl.where(second, 2, 0) | (magnitude > middle).to(tl.int32)
    return tl.where(unit > 0.0, code, 0)


@triton.jit
def load(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All states of the channels."""
    packed, scale, head_scale = opened(values, scales, head_scales, row_head, c, ok, WIDTH, STATES, BLOCK_N)
    both = tl.join(_number(packed & 15), _number(packed >> 4))
    blocks = tl.reshape(both, [c.shape[0], BLOCK_N // BLOCK, BLOCK])
    unit = e4m3_value(scale) * HALF_SCALE * head_scale[:, None]
    return tl.reshape(blocks * unit[:, :, None], [c.shape[0], BLOCK_N])


@triton.jit
def store(
    values, scales, head_scales, row_head, c, ok, wide, largest, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write all states of the channels; the same as they are read back."""
    blocks: tl.constexpr = (STATES + BLOCK - 1) // BLOCK
    count: tl.constexpr = BLOCK_N // BLOCK
    head_scale, inverse = power_scale(largest, CARRY, EXPONENT)
    tl.store(head_scales + row_head, head_scale)
    block, i = tl.arange(0, count), tl.arange(0, HALF)
    here = ok[:, None] & (block < blocks)[None, :]
    place = row_head * (WIDTH * blocks) + (c[:, None] * blocks + block[None, :])
    wide = tl.reshape(wide, [c.shape[0], count, BLOCK])
    magnitude = tl.where(inverse == 0.0, 0.0, tl.abs(wide))
    scale = e4m3_code(tl.max(magnitude, 2) * inverse * SIXTH)
    tl.store(scales + place, scale, mask=here)
    unit = (e4m3_value(scale) * tl.where(inverse == 0.0, 0.0, head_scale))[:, :, None]
    code = _code(magnitude, unit) | ((wide.to(tl.int32, bitcast=True) >> 28) & 8)
    low, high = tl.split(tl.reshape(code, [c.shape[0], count, HALF, 2]))
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(values + (place * HALF)[:, :, None] + i[None, None, :], packed, mask=here[:, :, None])
    unit = (e4m3_value(scale) * HALF_SCALE * head_scale)[:, :, None]
    return tl.reshape(_number(code) * unit, [c.shape[0], BLOCK_N])


@triton.jit
def opened(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All states of the channels, two in a byte, the blocks' scales, and the head's."""
    blocks: tl.constexpr = (STATES + BLOCK - 1) // BLOCK
    block, i = tl.arange(0, BLOCK_N // BLOCK), tl.arange(0, BLOCK_N // 2)
    corner, channel = row_head * (WIDTH * blocks), c[:, None] * blocks
    here, inside = ok[:, None] & (block < blocks)[None, :], ok[:, None] & (i < blocks * HALF)[None, :]
    packed = tl.load(values + corner * HALF + (channel * HALF + i[None, :]), mask=inside, other=0)
    scale = tl.load(scales + corner + (channel + block[None, :]), mask=here, other=0)
    return packed, scale, tl.load(head_scales + (row_head + 0 * c), mask=ok, other=0.0)


@triton.jit
def _narrow(packed, unit):
    """The lower and the upper of the two numbers in each byte, times ``unit`` and REST_SCALE: bfloat16, exact."""
    if PTX:
        return tl.inline_asm_elementwise(
            EIGHT, "=&r,=&r,=&r,=&r,r,r,r", [packed, unit], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    wide = unit.to(tl.float32) * (HALF_SCALE / NARROW_SCALE / REST_SCALE)
    return (_number(packed & 15) * wide).to(tl.bfloat16), (_number(packed >> 4) * wide).to(tl.bfloat16)


@triton.jit
def vectors(
    place, token_stride, state_stride,
    STATES: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A vector per token: its even elements, then its odd ones."""
    half: tl.constexpr = BLOCK_N // 2
    even = load_vectors(place, token_stride, state_stride, 0, STATES, half, 2, TOKENS, BLOCK_T)
    return even, load_vectors(place, token_stride, state_stride, 1, STATES, half, 2, TOKENS, BLOCK_T)


@triton.jit
def products(tile, vectors):
    """The states of each channel times each vector, on matrix units."""
    channels: tl.constexpr = tile[0].shape[0]
    half: tl.constexpr = tile[0].shape[1]
    unit = (e4m3_value(tile[1]) * NARROW_SCALE).to(tl.bfloat16)
    unit = tl.reshape(tl.broadcast_to(unit[:, :, None], [channels, half // HALF, HALF]), [channels, half])
    lower, upper = _narrow(tile[0], unit)
    result = exact_product(lower, vectors[0], tl.zeros([channels, vectors[0].shape[1]], tl.float32))
    return exact_product(upper, vectors[1], result) * (tile[2] * REST_SCALE)[:, None]
