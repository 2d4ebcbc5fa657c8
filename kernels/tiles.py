"""Pieces that the Triton kernels share."""

import triton
import triton.language as tl

__all__ = ["MIN_RECORDS", "UNROLL", "record_slot", "saturated"]


MIN_RECORDS = 16  # records are read in blocks of so many
UNROLL = tl.constexpr(4)  # records folded per round of the loop, so that their loads are under way together


@triton.jit
def record_slot(start, age, CAPACITY: tl.constexpr):
    """Slot of the record of an age, the oldest record being in slot ``start``; ``age`` is at most ``CAPACITY``."""
    slot = start + age
    return tl.where(slot >= CAPACITY, slot - CAPACITY, slot)


@triton.jit
def saturated(values, dtype: tl.constexpr):
    """``values`` in ``dtype``; beyond float16's largest they become the largest, NaN stays NaN."""
    if dtype == tl.float16:
        values = tl.where(values > 65504.0, 65504.0, values)
        values = tl.where(values < -65504.0, -65504.0, values)
    return values.to(dtype)
