"""Triton: states in float16 with stochastic rounding, see `plain_tiles` for what the functions take."""

import triton
import triton.language as tl

from replay_transformers.kernels.formats import float16_sr, plain_tiles
from replay_transformers.kernels.formats.rounding_tiles import round_stochastically, state_bits

__all__ = ["dot", "load", "opened", "store"]

MANTISSA, SMALLEST = tl.constexpr(float16_sr.MANTISSA), tl.constexpr(float16_sr.SMALLEST)
dot = plain_tiles.dot


@triton.jit
def load(
    values, scales, head_scales, row_head, c, ok, begin,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """PART states of the channels, from ``begin`` on."""
    return plain_tiles.load(values, scales, head_scales, row_head, c, ok, begin, WIDTH, STATES, PART, False)


@triton.jit
def store(
    values, scales, head_scales, row_head, c, ok, parts, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write all states of the channels, given in parts; the same as they are read back."""
    rounded = ()
    for index in tl.static_range(len(parts)):
        bits = state_bits(row_head, c, index * PART + tl.arange(0, PART), position, key, STATES)
        # beyond the largest, or not finite: left to `saturated`
        value = round_stochastically(parts[index], bits, MANTISSA, SMALLEST)
        rounded += (tl.where(tl.abs(parts[index]) < 65504.0, value, parts[index]),)  # type: ignore[assignment]
    return plain_tiles.store(
        values, scales, head_scales, row_head, c, ok, rounded, key, position, WIDTH, STATES, PART, False
    )


@triton.jit
def opened(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All states of the channels."""
    return plain_tiles.opened(values, scales, head_scales, row_head, c, ok, WIDTH, STATES, BLOCK_N, False)
