"""Triton: states that are one tensor of floats. What the functions of a format's tiles take is said here for all.

Everything about the states of a head that a program has: ``values, scales, head_scales`` point to the parts of the
whole batch (formats that have fewer are given others in their place), ``row_head`` numbers rows and heads together,
``c`` are the channels and ``ok`` which of them there are (others read as zero). TRANSPOSED: the channels of a state lie
next to each other, not the states of a channel; for this format alone. Values are float32 ``[channels, states]``.
"""

import triton
import triton.language as tl

from replay_transformers.kernels.tiles import saturated

__all__ = ["dot", "load", "opened", "store"]


@triton.jit
def _places(values, row_head, c, n, WIDTH: tl.constexpr, STATES: tl.constexpr, TRANSPOSED: tl.constexpr):
    corner = values + row_head * (WIDTH * STATES)
    if TRANSPOSED:
        return corner + (n[None, :] * WIDTH + c[:, None])
    return corner + (c[:, None] * STATES + n[None, :])


@triton.jit
def load(
    values, scales, head_scales, row_head, c, ok, begin,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """PART states of the channels, from ``begin`` on, a multiple of PART."""
    n = begin + tl.arange(0, PART)
    place = _places(values, row_head, c, n, WIDTH, STATES, TRANSPOSED)
    return tl.load(place, mask=ok[:, None] & (n < STATES)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store(
    values, scales, head_scales, row_head, c, ok, parts, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, PART: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write all states of the channels, given in parts; the same as they are read back.

    key, position: of random bits, see `rounding.state_bits`.
    """
    stored = ()
    for index in tl.static_range(len(parts)):
        n = index * PART + tl.arange(0, PART)
        place = _places(values, row_head, c, n, WIDTH, STATES, TRANSPOSED)
        rounded = saturated(parts[index], values.dtype.element_ty)
        tl.store(place, rounded, mask=ok[:, None] & (n < STATES)[None, :])
        stored += (rounded.to(tl.float32),)  # type: ignore[assignment]
    return stored


@triton.jit
def opened(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All states of the channels, under way to where `dot` uses them: what `dot` takes as its tile."""
    return (load(values, scales, head_scales, row_head, c, ok, 0, WIDTH, STATES, BLOCK_N, TRANSPOSED),)


@triton.jit
def dot(tile, vector, stride, STATES: tl.constexpr, BLOCK_N: tl.constexpr):
    """The states of each channel times a vector (a pointer and the distance of its elements): ``[channels]``."""
    n = tl.arange(0, BLOCK_N)
    other = tl.load(vector + n * stride, mask=n < STATES, other=0.0).to(tl.float32)
    return tl.sum(tile[0] * other[None, :], 1)
