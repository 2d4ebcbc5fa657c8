"""The kernels of the Gated DeltaNet step where the state is more than one tensor of floats, or a copy of it is read.

``gated_delta_stored_fold`` folds the rows that are due into the checkpoint and renews the copy;
``gated_delta_stored_step`` then reads out of any format. The functions of the formats are given to them, see
`formats.plain_tiles`.
"""

import triton
import triton.language as tl

from replay_transformers.kernels.gated_delta.fold import SOLUTION, advanced
from replay_transformers.kernels.gated_delta.read import halves, product
from replay_transformers.kernels.gated_delta.step import deltas_of_records, finish, rows_of_factors
from replay_transformers.kernels.tiles import RECORDS, piece_of_due, rank_of_due, store_tiles

__all__ = ["gated_delta_stored_fold", "gated_delta_stored_step"]


@triton.jit
def gated_delta_stored_step(
    values, scales, head_scales, q, k, v, beta, ring_v, ring_d,
    coefficient, own_coefficient, gain, cursor, y,
    q_row, q_token, q_head, q_state,
    k_row, k_token, k_head, k_state,
    v_row, v_token, v_head, v_channel,
    beta_row, beta_token, beta_head,
    OPENED: tl.constexpr, PRODUCTS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """SKIP: heads whose states count for nothing in this step do not read them."""
    tiles: tl.constexpr = (WIDTH + BLOCK_V - 1) // BLOCK_V
    most: tl.constexpr = RECORDS // 2 if TOKENS > 1 else 1
    first = (tl.program_id(0) % tiles) * BLOCK_V
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    head = ((tl.program_id(0) // tiles) % HEADS).to(tl.int32)
    row = row_head // HEADS
    key_head = head // GROUP
    p, token, age = tl.arange(0, BLOCK_V), tl.arange(0, most), tl.arange(0, AGES)
    p_ok = first + p < WIDTH
    out_ok = (token < TOKENS)[:, None] & p_ok[None, :]
    gains = gain + row_head * (2 * TOKENS)
    ok = p_ok
    if SKIP:
        ok = p_ok & (tl.load(gains + 0 * p) > 0.0)
    tile = OPENED(values, scales, head_scales, row_head, first + p, ok, WIDTH, STATES, BLOCK_K)
    start, past, folded = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 1), tl.load(cursor + row * 3 + 2)
    new_v = v + row * v_row + head * v_head + (token[:, None] * v_token + (first + p)[None, :] * v_channel)
    value = tl.load(new_v, mask=out_ok, other=0.0)

    factors = coefficient + row_head * (2 * TOKENS * BLOCK_R)
    records = ring_d + (row_head * (CAPACITY * WIDTH) + first)
    answer_k, answer_q = tl.zeros([most, BLOCK_V], tl.float32), tl.zeros([most, BLOCK_V], tl.float32)
    for begin in tl.static_range(0, BLOCK_R, AGES):
        d = deltas_of_records(records, start, folded, past, begin + age, p, p_ok, WIDTH, CAPACITY)
        if TOKENS == 1:
            known = tl.sum(d.to(tl.float32) * tl.load(factors + (begin + age))[:, None], 0)
            answer_k += known[None, :]
            known = tl.sum(d.to(tl.float32) * tl.load(factors + (BLOCK_R + begin + age))[:, None], 0)
            answer_q += known[None, :]
        else:
            known_k, known_q = halves(
                product(rows_of_factors(factors + (begin + age)[None, :], BLOCK_R, TOKENS), d, 0.0), BLOCK_V
            )
            answer_k, answer_q = answer_k + known_k, answer_q + known_q
    new_k, new_q = k + row * k_row + key_head * k_head, q + row * q_row + key_head * q_head
    carried = PRODUCTS(tile, new_k, k_token, k_state, STATES, BLOCK_K, TOKENS, most)
    answer_k += tl.trans(carried) * tl.load(gains + token, mask=token < TOKENS, other=0.0)[:, None]
    carried = PRODUCTS(tile, new_q, q_token, q_state, STATES, BLOCK_K, TOKENS, most)
    answer_q += tl.trans(carried) * tl.load(gains + (TOKENS + token), mask=token < TOKENS, other=0.0)[:, None]
    finish(
        answer_k, answer_q, value, beta + row * beta_row + head * beta_head, own_coefficient, ring_v, ring_d, y,
        start, past, row_head, first, beta_token,
        HEADS, WIDTH, CAPACITY, BLOCK_V, TOKENS, BLOCK_T,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "key"])
def gated_delta_stored_fold(
    values, scales, head_scales, copy_values, copy_scales, copy_head_scales,
    ring_k, ring_v, solution, cursor, base, folds, rows, key,
    LOAD: tl.constexpr, STORE: tl.constexpr, STORE_COPY: tl.constexpr,
    TRANSPOSED: tl.constexpr, COPY_TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    TILES: tl.constexpr, LIST: tl.constexpr, SKIP: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """LIST: rows whose pieces a program shares with those beside it; TILES: of BLOCK_V channels, that make a piece."""
    pieces: tl.constexpr = (WIDTH + BLOCK_V * TILES - 1) // (BLOCK_V * TILES)
    p = tl.arange(0, BLOCK_V)
    listed = tl.program_id(1) * LIST + tl.arange(0, LIST)
    rank = rank_of_due(folds, listed, rows)
    for piece in tl.range(tl.program_id(0), tl.max(rank, 0) * (HEADS * pieces), tl.num_programs(0)):
        row, head, first = piece_of_due(piece, rank, listed, HEADS, pieces, BLOCK_V * TILES)
        row_head = row * HEADS + head
        start, count = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 2)
        keys = ring_k + (row * (HEADS // GROUP) + head // GROUP) * (CAPACITY * STATES)
        solved = solution + row_head * (BLOCK_R // RECORDS * SOLUTION)
        records = ring_v + (row_head * (CAPACITY * WIDTH) + first)
        states = ()
        for tile in tl.static_range(TILES):
            c = first + tile * BLOCK_V + p
            c_ok = c < WIDTH
            ok = c_ok
            if SKIP:
                ok = c_ok & (tl.load(solved + (RECORDS * (RECORDS + 1) + 0 * p)) >= 0.0)
            s = LOAD(values, scales, head_scales, row_head, c, ok, WIDTH, STATES, BLOCK_K, TRANSPOSED)
            states += advanced(
                (s,), keys, records + tile * BLOCK_V, solved, start, count, c_ok,
                WIDTH, STATES, CAPACITY, BLOCK_V, BLOCK_K, BLOCK_K,
            )  # fmt: skip
        # a thread must not overwrite what another has yet to read
        tl.debug_barrier()
        position = tl.load(base + row) + count
        states = store_tiles(
            STORE, values, scales, head_scales, row_head, first, states, key, position,
            WIDTH, STATES, BLOCK_K, TRANSPOSED,
        )  # fmt: skip
        if HAS_COPY:
            store_tiles(
                STORE_COPY, copy_values, copy_scales, copy_head_scales, row_head, first, states, key, position,
                WIDTH, STATES, BLOCK_K, COPY_TRANSPOSED,
            )  # fmt: skip
