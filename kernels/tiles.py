"""Pieces that the Triton kernels share."""

import triton
import triton.language as tl

__all__ = [
    "INTERPRETED",
    "LEAST_DEPTH",
    "MIN_RECORDS",
    "RECORDS",
    "copy_head",
    "cut_product",
    "due_rows",
    "exact_product",
    "inside",
    "largest_bits",
    "load_vectors",
    "magnitude_bits",
    "piece_of_due",
    "piece_of_program",
    "record_slot",
    "saturated",
    "store_tiles",
    "store_with_copy",
]


MIN_RECORDS = 16  # records are read in blocks of so many
LEAST_DEPTH = 32  # states of a block: matrix products sum over 16 or more, and NVFP4 has two states in a byte
RECORDS = tl.constexpr(MIN_RECORDS)  # the same for kernels; also the fewest rows of a matrix product


@triton.jit
def record_slot(start, age, CAPACITY: tl.constexpr):
    """Slot of the record of an age, the oldest record being in slot ``start``; ``age`` is at most ``CAPACITY``."""
    slot = start + age
    return tl.where(slot >= CAPACITY, slot - CAPACITY, slot)


@triton.jit
def inside(c, WIDTH: tl.constexpr, SPAN: tl.constexpr):
    """Which of the channels ``c`` a head of ``WIDTH`` has; no mask where programs of SPAN channels end as heads do."""
    return (c < WIDTH) | (WIDTH % SPAN == 0)


@triton.jit
def piece_of_program(program, HEADS: tl.constexpr, PIECES: tl.constexpr, SPAN: tl.constexpr):
    """First channel, row times heads plus head (int64), head and row of a program, where PIECES of SPAN channels make
    a head."""
    row_head = (program // PIECES).to(tl.int64)
    head = ((program // PIECES) % HEADS).to(tl.int32)
    return (program % PIECES) * SPAN, row_head, head, row_head // HEADS


@triton.jit
def due_rows(folds, cursor, rows, place, LIST: tl.constexpr):
    """The LIST rows of this place among lists: which they are, 1, 2, 3 and so on for those that are due, 0 for the
    others, the slot of the oldest record of each, and how many of its records are folded."""
    listed = place * LIST + tl.arange(0, LIST)
    ok = listed < rows
    due = tl.load(folds + listed, mask=ok, other=0) > 0
    starts = tl.load(cursor + listed * 3, mask=ok, other=0)
    counts = tl.load(cursor + listed * 3 + 2, mask=ok, other=0)
    return listed, tl.where(due, tl.cumsum(due.to(tl.int32), 0), 0), starts, counts


@triton.jit
def piece_of_due(piece, due, HEADS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Of a piece of the states of the rows that are due, TILES blocks per head: row (int64), head, first channel, and
    the row's oldest slot and count as in `due_rows`."""
    listed, rank, starts, counts = due
    mine = rank == piece // (HEADS * TILES) + 1
    row = tl.sum(tl.where(mine, listed, 0), 0).to(tl.int64)
    start, count = tl.sum(tl.where(mine, starts, 0), 0), tl.sum(tl.where(mine, counts, 0), 0)
    return row, piece // TILES % HEADS, piece % TILES * BLOCK, start, count


@triton.jit
def saturated(values, dtype: tl.constexpr):
    """``values`` in ``dtype``; beyond float16's largest they become the largest, what is not finite stays so."""
    if dtype == tl.float16:
        magnitude = tl.abs(values)
        beyond = (magnitude > 65504.0) & (magnitude < float("inf"))
        values = tl.where(beyond, tl.where(values > 0.0, 65504.0, -65504.0), values)
    return values.to(dtype)


@triton.jit
def magnitude_bits(values):
    """The bits of absolute values: ordered like them, NaN above infinity above all others."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_bits(values):
    """Of all values ``[channels, states]``."""
    return tl.max(tl.max(magnitude_bits(values), 1), 0)


@triton.jit
def store_tiles(
    STORE: tl.constexpr, values, scales, head_scales, row_head, first, states, key, position,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write the states of channels from ``first`` on, tile after tile, by a format's ``store``; what it returns."""
    largest = largest_bits(states[0])
    for tile in tl.static_range(1, len(states)):
        largest = tl.maximum(largest, largest_bits(states[tile]))
    stored = ()
    for tile in tl.static_range(len(states)):
        c = first + tile * BLOCK + tl.arange(0, BLOCK)
        ok = inside(c, WIDTH, BLOCK * len(states))
        written = STORE(
            values, scales, head_scales, row_head, c, ok, states[tile], largest, key, position,
            WIDTH, STATES, BLOCK_N, TRANSPOSED,
        )  # fmt: skip
        stored += (written,)  # type: ignore[assignment]
    return stored


@triton.jit
def store_with_copy(
    STORE: tl.constexpr, STORE_COPY: tl.constexpr,
    values, scales, head_scales, copy_values, copy_scales, copy_head_scales, row_head, first, states, key, position,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr, COPY_TRANSPOSED: tl.constexpr, HAS_COPY: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write a fold's states of channels from ``first`` on, tile after tile; the copy is made of what was stored."""
    if WARPS > 1:
        # a warp must not overwrite what another has yet to read; else the next piece can be under way by now
        tl.debug_barrier()
    states = store_tiles(
        STORE, values, scales, head_scales, row_head, first, states, key, position,
        BLOCK, WIDTH, STATES, BLOCK_N, TRANSPOSED,
    )  # fmt: skip
    if HAS_COPY:
        store_tiles(
            STORE_COPY, copy_values, copy_scales, copy_head_scales, row_head, first, states, key, position,
            BLOCK, WIDTH, STATES, BLOCK_N, COPY_TRANSPOSED,
        )  # fmt: skip


@triton.jit
def copy_head(
    LOAD: tl.constexpr, STORE_COPY: tl.constexpr,
    values, scales, head_scales, copy_values, copy_scales, copy_head_scales, row_head, first, largest, key, position,
    TILES: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr, COPY_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Make the copy of a head that this program has just stored; ``largest``: see `largest_bits`, of all of it."""
    tl.debug_barrier()
    for tile in tl.range(0, TILES, num_stages=STAGES):
        c = first + tile * BLOCK + tl.arange(0, BLOCK)
        ok = inside(c, WIDTH, BLOCK * TILES)
        states = LOAD(values, scales, head_scales, row_head, c, ok, WIDTH, STATES, BLOCK_N, TRANSPOSED)
        STORE_COPY(
            copy_values, copy_scales, copy_head_scales, row_head, c, ok, states, largest, key, position,
            WIDTH, STATES, BLOCK_N, COPY_TRANSPOSED,
        )  # fmt: skip


# the interpreter keeps bfloat16 values as their bits and would multiply those
INTERPRETED = tl.constexpr(not isinstance(record_slot, triton.JITFunction))


@triton.jit
def _split(wide):
    """Three bfloat16 tensors whose sum is the float32 tensor ``wide``."""
    high = wide.to(tl.bfloat16)
    rest = wide - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _narrow_product(a, b, added):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, added)


@triton.jit
def exact_product(a, b, added):
    """``added + a @ b``, products exact, sums in float32.

    Matrix units multiply bfloat16 or float16 exactly; another type beside bfloat16 is split into three of them.
    """
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return _narrow_product(a, b, added)
    elif b.dtype == tl.bfloat16:
        high, middle, low = _split(a.to(tl.float32))
        return _narrow_product(high, b, _narrow_product(middle, b, _narrow_product(low, b, added)))
    elif a.dtype == tl.bfloat16:
        high, middle, low = _split(b.to(tl.float32))
        return _narrow_product(a, high, _narrow_product(a, middle, _narrow_product(a, low, added)))
    return tl.dot(a.to(tl.float32), b.to(tl.float32), added, input_precision="ieee")


@triton.jit
def load_vectors(
    place, token_stride, state_stride, begin,
    STATES: tl.constexpr, COUNT: tl.constexpr, EVERY: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A vector per token: COUNT of its elements, from ``begin`` on, EVERY apart, ``[COUNT, BLOCK_T]``."""
    n, token = begin + EVERY * tl.arange(0, COUNT), tl.arange(0, BLOCK_T)
    ok = (n < STATES)[:, None] & (token < TOKENS)[None, :]
    return tl.load(place + (n[:, None] * state_stride + token[None, :] * token_stride), mask=ok, other=0.0)


@triton.jit
def _leading(wide):
    """Float32 without the lower half of its bits; and the same as bfloat16."""
    bits = wide.to(tl.int32, bitcast=True)
    return (bits & -65536).to(tl.float32, bitcast=True), (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def cut(wide):
    """Three bfloat16 tensors whose sum is the float32 tensor ``wide``: digits cut off, no conversions."""
    value, high = _leading(wide)
    rest = wide - value
    value, middle = _leading(rest)
    value, low = _leading(rest - value)
    return high, middle, low


@triton.jit
def cut_product(a, b, added):
    """``added + a @ b`` for a float32 ``a``: products exact, sums in float32.

    Where ``a`` is made of products itself, its parts enter the matrix units as they lie in the threads.
    """
    if b.dtype != tl.bfloat16:
        high, middle, low = cut(b.to(tl.float32))
        return cut_product(a, high, cut_product(a, middle, cut_product(a, low, added)))
    else:
        high, middle, low = cut(a)
        return _narrow_product(high, b, _narrow_product(middle, b, _narrow_product(low, b, added)))
