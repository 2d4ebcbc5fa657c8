"""The kernels of the Mamba-2 step where the state is more than one tensor of floats, or a copy of it is read.

``mamba2_stored_fold`` folds the rows that are due into the checkpoint and renews the copy; ``mamba2_stored_step`` then
reads out of any format. The functions of the formats are given to them, see `formats.plain_tiles`.
"""

import triton
import triton.language as tl

from replay_transformers.kernels.mamba2.step import change_of_states, of_records
from replay_transformers.kernels.tiles import piece_of_due, rank_of_due, store_tiles

__all__ = ["mamba2_stored_fold", "mamba2_stored_step"]


@triton.jit
def mamba2_stored_step(
    values, scales, head_scales, x, C, ring_x, coefficient, carry, cursor, y,
    x_row, x_token, x_head, x_channel,
    c_row, c_token, c_group, c_state,
    OPENED: tl.constexpr, PRODUCTS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """SKIP: heads whose states count for nothing in this step do not read them."""
    tiles: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    first = (tl.program_id(0) % tiles) * BLOCK_P
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    head = ((tl.program_id(0) // tiles) % HEADS).to(tl.int32)
    row = row_head // HEADS
    p, token = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_T)
    p_ok = (first + p < WIDTH) | (WIDTH % BLOCK_P == 0)
    ok = p_ok
    if SKIP:
        ok = p_ok & (tl.load(carry + (row_head * TOKENS + 0 * p)) > 0.0)
    tile = OPENED(values, scales, head_scales, row_head, first + p, ok, WIDTH, STATES, BLOCK_N)
    start, past = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 1)
    result = of_records(
        x + row * x_row + head * x_head + first * x_channel, ring_x + row_head * (CAPACITY * WIDTH) + first,
        coefficient + row_head * (TOKENS * 2 * BLOCK_R), start, past, p_ok, x_token, x_channel,
        WIDTH, CAPACITY, BLOCK_P, BLOCK_R, AGES, TOKENS, BLOCK_T,
    )  # fmt: skip
    queries = C + row * c_row + (head // GROUP) * c_group
    gains = tl.load(carry + row_head * TOKENS + token, mask=token < TOKENS, other=0.0)
    result += PRODUCTS(tile, queries, c_token, c_state, STATES, BLOCK_N, TOKENS, BLOCK_T) * gains[None, :]
    out = y + (row * TOKENS * HEADS + head) * WIDTH + first + (token[None, :] * (HEADS * WIDTH) + p[:, None])
    tl.store(out, result.to(y.dtype.element_ty), mask=p_ok[:, None] & (token < TOKENS)[None, :])


@triton.jit(do_not_specialize=["rows", "key"])
def mamba2_stored_fold(
    values, scales, head_scales, copy_values, copy_scales, copy_head_scales,
    ring_x, ring_b, weight, cursor, base, folds, rows, key,
    LOAD: tl.constexpr, STORE: tl.constexpr, STORE_COPY: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    TILES: tl.constexpr, LIST: tl.constexpr, SKIP: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """LIST: rows whose pieces a program shares with those beside it; TILES: of BLOCK_P channels, that make a piece."""
    pieces: tl.constexpr = (WIDTH + BLOCK_P * TILES - 1) // (BLOCK_P * TILES)
    p = tl.arange(0, BLOCK_P)
    listed = tl.program_id(1) * LIST + tl.arange(0, LIST)
    rank = rank_of_due(folds, listed, rows)
    for piece in tl.range(tl.program_id(0), tl.max(rank, 0) * (HEADS * pieces), tl.num_programs(0)):
        row, head, first = piece_of_due(piece, rank, listed, HEADS, pieces, BLOCK_P * TILES)
        row_head = row * HEADS + head
        start, count = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 2)
        records = ring_x + (row_head * (CAPACITY * WIDTH) + first)
        keys = ring_b + (row * (HEADS // GROUP) + head // GROUP) * (CAPACITY * STATES)
        weights = weight + row_head * (BLOCK_R + 1)
        total = tl.load(weights + BLOCK_R)
        states = ()
        for tile in tl.static_range(TILES):
            c = first + tile * BLOCK_P + p
            c_ok = c < WIDTH
            ok = c_ok
            if SKIP:
                ok = c_ok & (tl.load(weights + (BLOCK_R + 0 * p)) > 0.0)
            change = change_of_states(
                records + tile * BLOCK_P, keys, weights, start, count, c_ok, 0,
                WIDTH, STATES, CAPACITY, BLOCK_P, BLOCK_R, AGES, BLOCK_N,
            )  # fmt: skip
            s = LOAD(values, scales, head_scales, row_head, c, ok, WIDTH, STATES, BLOCK_N, False)
            states += (s * total + change,)  # type: ignore[assignment]
        # a thread must not overwrite what another has yet to read
        tl.debug_barrier()
        position = tl.load(base + row) + count
        states = store_tiles(
            STORE, values, scales, head_scales, row_head, first, states, key, position, WIDTH, STATES, BLOCK_N, False
        )
        if HAS_COPY:
            store_tiles(
                STORE_COPY, copy_values, copy_scales, copy_head_scales, row_head, first, states, key, position,
                WIDTH, STATES, BLOCK_N, False,
            )  # fmt: skip
