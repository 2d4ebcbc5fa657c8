"""The kernels of the Gated DeltaNet step where the state is more than one tensor of floats, or a copy of it is read.

``gated_delta_stored_fold`` folds the rows that are due into the checkpoint and renews the copy;
``gated_delta_stored_step`` then reads out of any format. The functions of the formats are given to them, see
`formats.plain_tiles`.
"""

import triton
import triton.language as tl

from replay_transformers.kernels.gated_delta.fold import SOLUTION, advanced
from replay_transformers.kernels.gated_delta.read import halves, product
from replay_transformers.kernels.gated_delta.step import among_tokens, deltas_of_records, finish, rows_of_factors
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
    store_with_copy,
)

__all__ = ["gated_delta_stored_fold", "gated_delta_stored_step"]


@triton.jit
def gated_delta_stored_step(
    values, scales, head_scales, q, k, v, beta, ring_v, ring_d,
    coefficient, own_coefficient, gain, cursor, y,
    q_row, q_token, q_head, q_state,
    k_row, k_token, k_head, k_state,
    v_row, v_token, v_head, v_channel,
    beta_row, beta_token, beta_head,
    OPENED: tl.constexpr, VECTORS: tl.constexpr, PRODUCTS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, SKIP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """TILES: of BLOCK_V channels, that a program goes through; STAGES: of them that are under way at a time.

    SKIP: heads whose states count for nothing in this step do not read them.
    """
    pieces: tl.constexpr = (WIDTH + BLOCK_V * TILES - 1) // (BLOCK_V * TILES)
    most: tl.constexpr = RECORDS // 2 if TOKENS > 1 else 1
    begin, row_head, head, row = piece_of_program(tl.program_id(0), HEADS, pieces, BLOCK_V * TILES)
    key_head = head // GROUP
    p, token, age, which = tl.arange(0, BLOCK_V), tl.arange(0, most), tl.arange(0, BLOCK_R), tl.arange(0, 2)
    token_ok = (token < TOKENS)[:, None]
    if OVERLAPS:
        wait_for_previous()
    start, past, folded = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 1), tl.load(cursor + row * 3 + 2)
    gains = gain + row_head * (2 * TOKENS) + token[:, None]
    gain_k = tl.load(gains, mask=token_ok, other=0.0)
    gain_q = tl.load(gains + TOKENS, mask=token_ok, other=0.0)
    if SKIP:
        counts = tl.load(gain + (row_head * (2 * TOKENS) + 0 * p)) > 0.0
    keys = VECTORS(k + row * k_row + key_head * k_head, k_token, k_state, STATES, BLOCK_K, TOKENS, most)
    queries = VECTORS(q + row * q_row + key_head * q_head, q_token, q_state, STATES, BLOCK_K, TOKENS, most)
    factors = coefficient + row_head * (2 * TOKENS * BLOCK_R)
    if TOKENS == 1:
        factor = tl.load(factors + (which[None, :] * BLOCK_R + age[:, None]))
    else:
        factor = rows_of_factors(factors + age[None, :], BLOCK_R, TOKENS)
    among = among_tokens(
        beta + row * beta_row + head * beta_head, beta_token, own_coefficient, row_head, TOKENS, BLOCK_T, most
    )
    new, records = v + row * v_row + head * v_head, ring_d + row_head * (CAPACITY * WIDTH)
    for first in tl.range(begin, begin + BLOCK_V * TILES, BLOCK_V, num_stages=STAGES):
        c = first + p
        ok = inside(c, WIDTH, BLOCK_V * TILES)
        read_ok = ok
        if SKIP:
            read_ok = ok & counts
        tile = OPENED(values, scales, head_scales, row_head, c, read_ok, WIDTH, STATES, BLOCK_K)
        d = deltas_of_records(records, start, folded, past, age, c, ok, WIDTH, CAPACITY)
        value = tl.load(
            new + (token[:, None] * v_token + c[None, :] * v_channel), mask=token_ok & ok[None, :], other=0.0
        )
        answer_k, answer_q = tl.trans(PRODUCTS(tile, keys)) * gain_k, tl.trans(PRODUCTS(tile, queries)) * gain_q
        if TOKENS == 1:
            known_k, known_q = tl.split(exact_product(tl.trans(d), factor, tl.zeros([BLOCK_V, 2], tl.float32)))
            answer_k, answer_q = answer_k + known_k[None, :], answer_q + known_q[None, :]
        else:
            known_k, known_q = halves(product(factor, d, 0.0), BLOCK_V)
            answer_k, answer_q = answer_k + known_k, answer_q + known_q
        finish(
            answer_k, answer_q, value, among, ring_v, ring_d, y, start, past, row_head, first,
            HEADS, WIDTH, CAPACITY, BLOCK_V, TOKENS,
        )  # fmt: skip


@triton.jit
def _after_records(
    LOAD, values, scales, head_scales, row_head, c, ok, keys, records, solved, start, count,
    WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    TRANSPOSED: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """All states of the channels ``c``, whose records begin at ``records``, after the ``count`` oldest of them."""
    read_ok = ok
    if SKIP:
        read_ok = ok & (tl.load(solved + (RECORDS * (RECORDS + 1) + 0 * c)) >= 0.0)
    s = LOAD(values, scales, head_scales, row_head, c, read_ok, WIDTH, STATES, BLOCK_K, TRANSPOSED)
    return advanced(
        (s,), keys, records, solved, start, count, tl.arange(0, BLOCK_V), ok,
        WIDTH, STATES, CAPACITY, BLOCK_V, BLOCK_K, BLOCK_R, BLOCK_K,
    )[0]  # fmt: skip


@triton.jit(do_not_specialize=["rows", "key"])
def gated_delta_stored_fold(
    values, scales, head_scales, copy_values, copy_scales, copy_head_scales,
    ring_k, ring_v, solution, cursor, base, folds, rows, key,
    LOAD: tl.constexpr, STORE: tl.constexpr, STORE_COPY: tl.constexpr,
    TRANSPOSED: tl.constexpr, COPY_TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, TWICE: tl.constexpr,
    LIST: tl.constexpr, SKIP: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """LIST: rows whose pieces a program shares with those beside it; TILES: of BLOCK_V channels, that make a piece.

    STAGES: pieces that are under way at a time, tiles if TWICE: then the copy is made of what has been stored.
    """
    pieces: tl.constexpr = (WIDTH + BLOCK_V * TILES - 1) // (BLOCK_V * TILES)
    p = tl.arange(0, BLOCK_V)
    due = due_rows(folds, cursor, rows, tl.program_id(1), LIST)
    end = tl.max(due[1], 0) * (HEADS * pieces)
    for piece in tl.range(tl.program_id(0), end, tl.num_programs(0), num_stages=STAGES):
        row, head, first, start, count = piece_of_due(piece, due, HEADS, pieces, BLOCK_V * TILES)
        row_head = row * HEADS + head
        keys = ring_k + (row * (HEADS // GROUP) + head // GROUP) * (CAPACITY * STATES)
        solved = solution + row_head * (BLOCK_R // RECORDS * SOLUTION)
        records = ring_v + (row_head * (CAPACITY * WIDTH) + first)
        position = tl.load(base + row) + count
        if TWICE:
            largest = 0
            for tile in tl.range(0, TILES, num_stages=STAGES):
                c = first + tile * BLOCK_V + p
                ok = inside(c, WIDTH, BLOCK_V * TILES)
                s = _after_records(
                    LOAD, values, scales, head_scales, row_head, c, ok, keys, records + tile * BLOCK_V, solved,
                    start, count, WIDTH, STATES, CAPACITY, BLOCK_V, BLOCK_K, BLOCK_R, TRANSPOSED, SKIP,
                )  # fmt: skip
                if WARPS > 1:
                    tl.debug_barrier()
                s = STORE(
                    values, scales, head_scales, row_head, c, ok, s, 0, key, position,
                    WIDTH, STATES, BLOCK_K, TRANSPOSED,
                )  # fmt: skip
                largest = tl.maximum(largest, largest_bits(s))
            copy_head(
                LOAD, STORE_COPY, values, scales, head_scales, copy_values, copy_scales, copy_head_scales,
                row_head, first, largest, key, position, TILES, STAGES, BLOCK_V, WIDTH, STATES, BLOCK_K,
                TRANSPOSED, COPY_TRANSPOSED,
            )  # fmt: skip
        else:
            states = ()
            for tile in tl.static_range(TILES):
                c = first + tile * BLOCK_V + p
                ok = inside(c, WIDTH, BLOCK_V * TILES)
                s = _after_records(
                    LOAD, values, scales, head_scales, row_head, c, ok, keys, records + tile * BLOCK_V, solved,
                    start, count, WIDTH, STATES, CAPACITY, BLOCK_V, BLOCK_K, BLOCK_R, TRANSPOSED, SKIP,
                )  # fmt: skip
                states += (s,)  # type: ignore[assignment]
            store_with_copy(
                STORE, STORE_COPY, values, scales, head_scales, copy_values, copy_scales, copy_head_scales,
                row_head, first, states, key, position, BLOCK_V, WIDTH, STATES, BLOCK_K,
                TRANSPOSED, COPY_TRANSPOSED, HAS_COPY, WARPS,
            )  # fmt: skip
