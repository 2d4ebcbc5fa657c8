"""The kernels of the Mamba-2 step where the state is more than one tensor of floats, or a copy of it is read.

``mamba2_stored_fold`` folds the rows that are due into the checkpoint and renews the copy; ``mamba2_stored_step`` then
reads out of any format. The functions of the formats are given to them, see `formats.plain_tiles`.
"""

import triton
import triton.language as tl

from replay_transformers.kernels.mamba2.step import change_of_states
from replay_transformers.kernels.overlap import wait_for_previous
from replay_transformers.kernels.tiles import (
    RECORDS,
    copy_head,
    due_rows,
    exact_product,
    inside,
    largest_bits,
    piece_of_due,
    piece_of_program,
    record_slot,
    store_with_copy,
)

__all__ = ["mamba2_stored_fold", "mamba2_stored_step"]


@triton.jit
def mamba2_stored_step(
    values, scales, head_scales, x, C, ring_x, coefficient, carry, cursor, y,
    x_row, x_token, x_head, x_channel,
    c_row, c_token, c_group, c_state,
    OPENED: tl.constexpr, VECTORS: tl.constexpr, PRODUCTS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, SKIP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """TILES: of BLOCK_P channels, that a program goes through; STAGES: of them that are under way at a time.

    SKIP: heads whose states count for nothing in this step do not read them.
    """
    pieces: tl.constexpr = (WIDTH + BLOCK_P * TILES - 1) // (BLOCK_P * TILES)
    begin, row_head, head, row = piece_of_program(tl.program_id(0), HEADS, pieces, BLOCK_P * TILES)
    p, token, age = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    own_token = tl.arange(0, RECORDS if TOKENS > 1 else 1)
    token_ok, own_ok = (token < TOKENS)[None, :], (own_token < TOKENS)[:, None]
    queries = VECTORS(C + row * c_row + (head // GROUP) * c_group, c_token, c_state, STATES, BLOCK_N, TOKENS, BLOCK_T)
    if OVERLAPS:
        wait_for_previous()
    start, past = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 1)
    gains = tl.load(carry + row_head * TOKENS + token[None, :], mask=token_ok, other=0.0)
    if SKIP:
        counts = tl.load(carry + (row_head * TOKENS + 0 * p)) > 0.0
    factors = coefficient + row_head * (TOKENS * 2 * BLOCK_R) + token[None, :] * (2 * BLOCK_R)
    factor = tl.load(factors + age[:, None], mask=token_ok, other=0.0)
    own_factor = tl.load(factors + (BLOCK_R + own_token)[:, None], mask=own_ok & token_ok, other=0.0)
    slot = record_slot(start, tl.minimum(age, CAPACITY), CAPACITY)[:, None]
    own_slot = record_slot(start, tl.minimum(past + own_token, CAPACITY), CAPACITY)[:, None]
    new, records = x + row * x_row + head * x_head, ring_x + row_head * (CAPACITY * WIDTH)
    out = y + (row * TOKENS * HEADS + head) * WIDTH + token[None, :] * (HEADS * WIDTH)
    nothing = tl.zeros([BLOCK_P, BLOCK_T], tl.float32)
    for first in tl.range(begin, begin + BLOCK_P * TILES, BLOCK_P, num_stages=STAGES):
        c = first + p
        ok = inside(c, WIDTH, BLOCK_P * TILES)
        read_ok = ok
        if SKIP:
            read_ok = ok & counts
        tile = OPENED(values, scales, head_scales, row_head, c, read_ok, WIDTH, STATES, BLOCK_N)
        old = tl.load(records + (slot * WIDTH + c[None, :]), mask=(age < past)[:, None] & ok[None, :], other=0.0)
        own = tl.load(
            new + (own_token[:, None] * x_token + c[None, :] * x_channel), mask=own_ok & ok[None, :], other=0.0
        )
        result = PRODUCTS(tile, queries) * gains + exact_product(tl.trans(old), factor, nothing)
        if TOKENS == 1:
            result += tl.trans(own.to(tl.float32) * own_factor)
        else:
            result += exact_product(tl.trans(own), own_factor, nothing)
        tl.store(out + c[:, None], result.to(y.dtype.element_ty), mask=ok[:, None] & token_ok)
        tl.store(records + (own_slot * WIDTH + c[None, :]), own, mask=own_ok & ok[None, :])


@triton.jit
def _after_records(
    LOAD, values, scales, head_scales, row_head, c, ok, records, keys, weights, start, count,
    WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    LATE: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """All states of the channels ``c``, whose records begin at ``records``, after the ``count`` oldest of them.

    LATE: the states are loaded last, for want of registers while the records are waited for.
    """
    read_ok = ok
    if SKIP:
        read_ok = ok & (tl.load(weights + (BLOCK_R + 0 * c)) > 0.0)
    total = tl.load(weights + BLOCK_R)
    if not LATE:
        s = LOAD(values, scales, head_scales, row_head, c, read_ok, WIDTH, STATES, BLOCK_N, False)
    change = change_of_states(
        records, keys, weights, start, count, ok, 0, WIDTH, STATES, CAPACITY, BLOCK_P, BLOCK_R, AGES, BLOCK_N
    )
    if LATE:
        s = LOAD(values, scales, head_scales, row_head, c, read_ok, WIDTH, STATES, BLOCK_N, False)
    return tl.fma(s, total, change)


@triton.jit(do_not_specialize=["rows", "key"])
def mamba2_stored_fold(
    values, scales, head_scales, copy_values, copy_scales, copy_head_scales,
    ring_x, ring_b, weight, cursor, base, folds, rows, key,
    LOAD: tl.constexpr, STORE: tl.constexpr, STORE_COPY: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, TWICE: tl.constexpr,
    LIST: tl.constexpr, SKIP: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """LIST: rows whose pieces a program shares with those beside it; TILES: of BLOCK_P channels, that make a piece.

    STAGES: pieces that are under way at a time, tiles if TWICE: then the copy is made of what has been stored.
    """
    pieces: tl.constexpr = (WIDTH + BLOCK_P * TILES - 1) // (BLOCK_P * TILES)
    p = tl.arange(0, BLOCK_P)
    due = due_rows(folds, cursor, rows, tl.program_id(1), LIST)
    end = tl.max(due[1], 0) * (HEADS * pieces)
    for piece in tl.range(tl.program_id(0), end, tl.num_programs(0), num_stages=STAGES):
        row, head, first, start, count = piece_of_due(piece, due, HEADS, pieces, BLOCK_P * TILES)
        row_head = row * HEADS + head
        records = ring_x + (row_head * (CAPACITY * WIDTH) + first)
        keys = ring_b + (row * (HEADS // GROUP) + head // GROUP) * (CAPACITY * STATES)
        weights = weight + row_head * (BLOCK_R + 1)
        position = tl.load(base + row) + count
        if TWICE:
            largest = 0
            for tile in tl.range(0, TILES, num_stages=STAGES):
                c = first + tile * BLOCK_P + p
                ok = inside(c, WIDTH, BLOCK_P * TILES)
                s = _after_records(
                    LOAD, values, scales, head_scales, row_head, c, ok, records + tile * BLOCK_P, keys, weights,
                    start, count, WIDTH, STATES, CAPACITY, BLOCK_P, BLOCK_N, BLOCK_R, AGES, False, SKIP,
                )  # fmt: skip
                if WARPS > 1:
                    tl.debug_barrier()
                s = STORE(
                    values, scales, head_scales, row_head, c, ok, s, 0, key, position, WIDTH, STATES, BLOCK_N, False
                )
                largest = tl.maximum(largest, largest_bits(s))
            copy_head(
                LOAD, STORE_COPY, values, scales, head_scales, copy_values, copy_scales, copy_head_scales,
                row_head, first, largest, key, position, TILES, STAGES, BLOCK_P, WIDTH, STATES, BLOCK_N, False, False,
            )  # fmt: skip
        else:
            states = ()
            for tile in tl.static_range(TILES):
                c = first + tile * BLOCK_P + p
                ok = inside(c, WIDTH, BLOCK_P * TILES)
                s = _after_records(
                    LOAD, values, scales, head_scales, row_head, c, ok, records + tile * BLOCK_P, keys, weights,
                    start, count, WIDTH, STATES, CAPACITY, BLOCK_P, BLOCK_N, BLOCK_R, AGES, TILES > 1, SKIP,
                )  # fmt: skip
                states += (s,)  # type: ignore[assignment]
            store_with_copy(
                STORE, STORE_COPY, values, scales, head_scales, copy_values, copy_scales, copy_head_scales,
                row_head, first, states, key, position, BLOCK_P, WIDTH, STATES, BLOCK_N, False, False, HAS_COPY, WARPS,
            )  # fmt: skip
