"""Triton: stochastic rounding, bit for bit as in `rounding`."""

import triton
import triton.language as tl

from replay_transformers.kernels.formats import rounding

__all__ = ["round_stochastically", "state_bits"]

ROUNDS = tl.constexpr(rounding.ROUNDS)


@triton.jit
def state_bits(row_head, c, n, position, key, STATES: tl.constexpr):
    """A word, int32 ``[channels, states]``, for channels ``c`` and states ``n`` of a head.

    position: int64, tokens that the row will have folded. key: 64 bits.
    """
    element = (c[:, None] * STATES + n[None, :]).to(tl.uint32)
    zero = element & 0
    place = zero + row_head.to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(key, element, place, zero + low, zero + high, ROUNDS)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def round_stochastically(values, bits, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """Float32 values of so many mantissa bits, up or down with the probability that makes the mean exact."""
    dropped: tl.constexpr = 23 - MANTISSA
    magnitude = tl.abs(values)
    is_small = magnitude < SMALLEST
    raised = tl.where(is_small, magnitude + SMALLEST, magnitude)
    noise = (bits.to(tl.uint32, bitcast=True) >> (32 - dropped)).to(tl.int32)
    word = ((raised.to(tl.int32, bitcast=True) + noise) >> dropped) << dropped
    rounded = word.to(tl.float32, bitcast=True)
    rounded = tl.where(is_small, rounded - SMALLEST, rounded)
    sign = values.to(tl.int32, bitcast=True) & -2147483648
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
