"""Triton: states in float16 with stochastic rounding, see `plain_tiles` for what the functions take."""

import triton
import triton.language as tl

from replay_transformers.kernels.formats import float16_sr, plain_tiles
from replay_transformers.kernels.formats.rounding_tiles import round_stochastically, state_bits

__all__ = ["load", "opened", "products", "store", "vectors"]

MANTISSA, SMALLEST = tl.constexpr(float16_sr.MANTISSA), tl.constexpr(float16_sr.SMALLEST)
opened, vectors, products = plain_tiles.opened, plain_tiles.vectors, plain_tiles.products


@triton.jit
def load(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All states of the channels."""
    return plain_tiles.load(values, scales, head_scales, row_head, c, ok, WIDTH, STATES, BLOCK_N, False)


@triton.jit
def store(
    values, scales, head_scales, row_head, c, ok, wide, largest, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write all states of the channels; the same as they are read back."""
    bits = state_bits(row_head, c, tl.arange(0, BLOCK_N), position, key, STATES)
    # beyond the largest, or not finite: left to `saturated`
    rounded = tl.where(tl.abs(wide) < 65504.0, round_stochastically(wide, bits, MANTISSA, SMALLEST), wide)
    return plain_tiles.store(
        values, scales, head_scales, row_head, c, ok, rounded, largest, key, position, WIDTH, STATES, BLOCK_N, False
    )
