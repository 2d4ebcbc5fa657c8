"""Pieces that the Triton kernels share."""

import triton
import triton.language as tl

__all__ = [
    "MIN_RECORDS",
    "RECORDS",
    "cut_product",
    "exact_product",
    "piece_of_due",
    "rank_of_due",
    "record_slot",
    "saturated",
]


MIN_RECORDS = 16  # records are read in blocks of so many
RECORDS = tl.constexpr(MIN_RECORDS)  # the same for kernels; also the fewest rows of a matrix product


@triton.jit
def record_slot(start, age, CAPACITY: tl.constexpr):
    """Slot of the record of an age, the oldest record being in slot ``start``; ``age`` is at most ``CAPACITY``."""
    slot = start + age
    return tl.where(slot >= CAPACITY, slot - CAPACITY, slot)


@triton.jit
def rank_of_due(folds, listed, rows):
    """1, 2, 3 and so on for those of the ``listed`` rows that are due, 0 for the others."""
    due = tl.load(folds + listed, mask=listed < rows, other=0) > 0
    return tl.where(due, tl.cumsum(due.to(tl.int32), 0), 0)


@triton.jit
def piece_of_due(piece, rank, listed, HEADS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Row (int64), head and first channel of a piece of the states of the rows that are due, TILES blocks per head."""
    row = tl.sum(tl.where(rank == piece // (HEADS * TILES) + 1, listed, 0), 0).to(tl.int64)
    return row, piece // TILES % HEADS, piece % TILES * BLOCK


@triton.jit
def saturated(values, dtype: tl.constexpr):
    """``values`` in ``dtype``; beyond float16's largest they become the largest, NaN stays NaN."""
    if dtype == tl.float16:
        values = tl.where(values > 65504.0, 65504.0, values)
        values = tl.where(values < -65504.0, -65504.0, values)
    return values.to(dtype)


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

    Matrix units multiply bfloat16 or float16 exactly; float32 beside bfloat16 is split into three of them.
    """
    if a.dtype == tl.float32:
        if b.dtype == tl.bfloat16:
            high, middle, low = _split(a)
            return _narrow_product(high, b, _narrow_product(middle, b, _narrow_product(low, b, added)))
    elif a.dtype == b.dtype:
        return _narrow_product(a, b, added)
    elif a.dtype == tl.bfloat16 and b.dtype == tl.float32:
        high, middle, low = _split(b)
        return _narrow_product(a, high, _narrow_product(a, middle, _narrow_product(a, low, added)))
    return tl.dot(a.to(tl.float32), b.to(tl.float32), added, input_precision="ieee")


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
