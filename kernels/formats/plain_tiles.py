"""Triton: states that are one tensor of floats. What the functions of a format's tiles take is said here for all.

Everything about the states of a head that a program has: ``values, scales, head_scales`` point to the parts of the
whole batch (formats that have fewer are given others in their place), ``row_head`` numbers rows and heads together,
``c`` are the channels and ``ok`` which of them there are (others read as zero). TRANSPOSED: the channels of a state lie
next to each other, not the states of a channel; for this format alone. Values are float32 ``[channels, states]``.
"""

import triton
import triton.language as tl

from replay_transformers.kernels.tiles import exact_product, load_vectors, saturated

__all__ = ["load", "opened", "products", "store", "vectors"]


@triton.jit
def _places(values, row_head, c, n, WIDTH: tl.constexpr, STATES: tl.constexpr, TRANSPOSED: tl.constexpr):
    corner = values + row_head * (WIDTH * STATES)
    if TRANSPOSED:
        return corner + (n[None, :] * WIDTH + c[:, None])
    return corner + (c[:, None] * STATES + n[None, :])


@triton.jit
def load(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All states of the channels."""
    n = tl.arange(0, BLOCK_N)
    place = _places(values, row_head, c, n, WIDTH, STATES, TRANSPOSED)
    return tl.load(place, mask=ok[:, None] & (n < STATES)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store(
    values, scales, head_scales, row_head, c, ok, wide, largest, key, position,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write all states of the channels, ``wide``; the same as they are read back.

    largest: bits of the largest of the whole head, for formats that need it. key, position: of random bits, see
    `rounding.state_bits`.
    """
    n = tl.arange(0, BLOCK_N)
    place = _places(values, row_head, c, n, WIDTH, STATES, TRANSPOSED)
    rounded = saturated(wide, values.dtype.element_ty)
    tl.store(place, rounded, mask=ok[:, None] & (n < STATES)[None, :])
    return rounded.to(tl.float32)


@triton.jit
def opened(
    values, scales, head_scales, row_head, c, ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All states of the channels, under way to where `products` uses them: what that takes as its tile."""
    n = tl.arange(0, BLOCK_N)
    place = _places(values, row_head, c, n, WIDTH, STATES, False)
    return (tl.load(place, mask=ok[:, None] & (n < STATES)[None, :], other=0.0),)


@triton.jit
def vectors(
    place, token_stride, state_stride,
    STATES: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A vector per token, as `products` takes them: a pointer, distances of tokens and of elements."""
    return (load_vectors(place, token_stride, state_stride, 0, STATES, BLOCK_N, 1, TOKENS, BLOCK_T),)


@triton.jit
def products(tile, vectors):
    """The states of each channel times each vector: float32 ``[channels, BLOCK_T]``.

    By matrix units where both have the same 16 bits, products being exact there.
    """
    states, vectors = tile[0], vectors[0]
    if states.dtype == vectors.dtype and states.dtype.primitive_bitwidth == 16:
        return exact_product(states, vectors, tl.zeros([states.shape[0], vectors.shape[1]], tl.float32))
    token = tl.arange(0, vectors.shape[1])[None, :]
    wide, result = states.to(tl.float32), tl.zeros([states.shape[0], vectors.shape[1]], tl.float32)
    for t in tl.static_range(vectors.shape[1]):
        vector = tl.sum(tl.where(token == t, vectors, 0.0).to(tl.float32), 1)
        result = tl.where(token == t, tl.sum(wide * vector[None, :], 1)[:, None], result)
    return result
