"""The kernels of the Gated DeltaNet replay step but for the fold; `triton` says what each of them does."""

import triton
import triton.language as tl

from replay_transformers.kernels.gated_delta.fold import SOLUTION, solve, solve_due
from replay_transformers.kernels.gated_delta.read import (
    answers_to_many,
    answers_to_one,
    halves,
    product,
    read_chunk,
)
from replay_transformers.kernels.gated_delta.update import NORM_EPSILON
from replay_transformers.kernels.overlap import launch_next, wait_for_previous
from replay_transformers.kernels.tiles import RECORDS, exact_product, piece_of_program, record_slot

__all__ = [
    "among_tokens",
    "deltas_of_records",
    "finish",
    "gated_delta_prepare",
    "gated_delta_step",
    "rows_of_factors",
]


@triton.jit
def gated_delta_prepare(
    q, k, g, beta,
    ring_k, ring_g, ring_beta,
    base, committed, pending, folds,
    cursor, coefficient, own_coefficient, gain, solution,
    q_row, q_token, q_head, q_state,
    k_row, k_token, k_head, k_state,
    g_row, g_token, g_head,
    beta_row, beta_token, beta_head,
    query_scale, least_log,
    HEADS: tl.constexpr, GROUP: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, FOLD: tl.constexpr,
    FOLD_FIRST: tl.constexpr, SOLVES: tl.constexpr, SKIP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """SHARE: value heads per program, all of one key head; BLOCK_R: at least the records of any row.

    FOLD_FIRST: rows that are due are folded before they are read. SOLVES: what their fold needs is solved for here.
    SKIP: states that are scaled by less than the exponential of ``least_log`` count for nothing. OVERLAPS: the step
    kernel begins meanwhile.
    """
    if OVERLAPS:
        launch_next()
    shares: tl.constexpr = HEADS // SHARE
    row = (tl.program_id(0) // shares).to(tl.int64)
    share = tl.program_id(0) % shares
    key_head = share * SHARE // GROUP
    start = (tl.load(base + row) % CAPACITY).to(tl.int32)
    past = (tl.load(committed + row) + tl.load(pending + row)).to(tl.int32)
    count = 0
    if FOLD:
        count = tl.load(folds + row).to(tl.int32)

    # all loads come before the first store, which they might alias as far as the compiler knows
    age, c, i = tl.arange(0, BLOCK_R), tl.arange(0, 2 * BLOCK_T), tl.arange(0, BLOCK_K)
    token, is_key = c // 2, c % 2 == 0  # of each token a key, then a query
    live, k_ok, token_ok = age < past, i < STATES, token < TOKENS
    slot, own_slot = record_slot(start, age, CAPACITY), record_slot(start, past + token, CAPACITY)
    later_slot, later_live = record_slot(start, age + 1, CAPACITY), age + 1 < past
    key_ring = ring_k + (row * (HEADS // GROUP) + key_head) * (CAPACITY * STATES)
    new_k, new_q = k + row * k_row + key_head * k_head, q + row * q_row + key_head * q_head
    own_ok = (is_key & token_ok)[:, None] & k_ok[None, :]
    query_ok = (~is_key & token_ok)[:, None] & k_ok[None, :]
    keys = tl.load(key_ring + (slot[:, None] * STATES + i[None, :]), mask=live[:, None] & k_ok[None, :], other=0.0)
    own_k = tl.load(new_k + (token[:, None] * k_token + i[None, :] * k_state), mask=own_ok, other=0.0)
    own_q = tl.load(new_q + (token[:, None] * q_token + i[None, :] * q_state), mask=query_ok, other=0.0)
    logs, later_logs, own_logs, own_rates = (), (), (), ()
    for h in tl.static_range(SHARE):
        head = share * SHARE + h
        log_ring = ring_g + (row * HEADS + head) * CAPACITY
        logs += (tl.load(log_ring + slot, mask=live, other=0.0),)  # type: ignore[assignment]
        later_logs += (tl.load(log_ring + later_slot, mask=later_live, other=0.0),)  # type: ignore[assignment]
        for t in tl.static_range(TOKENS):
            own_logs += (tl.load(g + row * g_row + head * g_head + t * g_token),)  # type: ignore[assignment]
            own_rates += (tl.load(beta + row * beta_row + head * beta_head + t * beta_token),)  # type: ignore[assignment]

    # keys and queries of the step against the keys of records and of the step
    vectors = tl.where(is_key[:, None], own_k, own_q)
    scores = exact_product(vectors, tl.trans(keys), tl.zeros([2 * BLOCK_T, BLOCK_R], tl.float32))
    own_scores = exact_product(vectors, tl.trans(vectors), tl.zeros([2 * BLOCK_T, 2 * BLOCK_T], tl.float32))
    wide = keys.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPSILON)
    squares = tl.where(c[:, None] == c[None, :], own_scores, 0.0)
    norm_c = tl.rsqrt(tl.sum(squares, 1) + NORM_EPSILON) * tl.where(is_key, 1.0, query_scale)
    read = live
    if FOLD_FIRST:
        read = live & (age >= count)
    scores *= norm_c[:, None] * tl.where(read, norm, 0.0)[None, :]
    own_scores *= norm_c[:, None] * tl.rsqrt(tl.sum(squares, 0) + NORM_EPSILON)[None, :]
    # a key is answered by the tokens before it, a query by its own token as well
    before = (token[None, :] < token[:, None]) | ((token[None, :] == token[:, None]) & ~is_key[:, None])
    own_scores = tl.where(before, own_scores, 0.0)

    for h in tl.static_range(SHARE):
        corner = row * HEADS + share * SHARE + h
        since, between = tl.zeros([2 * BLOCK_T], tl.float32), tl.zeros([2 * BLOCK_T, 2 * BLOCK_T], tl.float32)
        for t in tl.static_range(TOKENS):
            log = own_logs[h * TOKENS + t]  # type: ignore[var-annotated]
            since += tl.where(token >= t, log, 0.0)
            if TOKENS > 1:
                between += tl.where((token[:, None] >= t) & (token[None, :] < t), log, 0.0)
            tl.store(ring_g + corner * CAPACITY + record_slot(start, past + t, CAPACITY), log)
            tl.store(ring_beta + corner * CAPACITY + record_slot(start, past + t, CAPACITY), own_rates[h * TOKENS + t])
        # two decays: neither exceeds 1; `later` is shifted by one age, so that its sums leave out the own log
        since = tl.exp(since)
        after = tl.where(read, tl.exp(tl.cumsum(later_logs[h], 0, reverse=True)), 0.0)
        out = coefficient + corner * (2 * TOKENS * BLOCK_R) + (c[:, None] * BLOCK_R + age[None, :])
        tl.store(out, scores * since[:, None] * after[None, :], mask=token_ok[:, None])
        out = own_coefficient + corner * (2 * TOKENS * BLOCK_T) + (c[:, None] * BLOCK_T + token[None, :])
        tl.store(out, own_scores * tl.exp(between), mask=token_ok[:, None] & is_key[None, :])
        gains = gain + corner * (2 * TOKENS) + tl.where(is_key, token, TOKENS + token)
        total = tl.sum(tl.where(read, logs[h], 0.0), 0)
        carried = tl.exp(total) * since * norm_c
        if SKIP:
            carried = tl.where(total + own_logs[h * TOKENS] < least_log, 0.0, carried)
        tl.store(gains, carried, mask=token_ok)

    if share * SHARE % GROUP == 0:
        tl.store(key_ring + (own_slot[:, None] * STATES + i[None, :]), own_k, mask=own_ok)
    if share == 0:
        tl.store(cursor + row * 3, start)
        tl.store(cursor + row * 3 + 1, past)
        tl.store(cursor + row * 3 + 2, count)
    if SOLVES:
        for h in tl.range(0, tl.where(count > 0, SHARE, 0), num_stages=1):
            corner = row * HEADS + share * SHARE + h
            forgotten = count < 0
            if SKIP:
                folded = tl.load(ring_g + corner * CAPACITY + slot, mask=age < count, other=0.0)
                forgotten = tl.sum(folded, 0) < least_log
            solve(
                key_ring, ring_g + corner * CAPACITY, ring_beta + corner * CAPACITY,
                solution + corner * (BLOCK_R // RECORDS * SOLUTION), start, count, forgotten,
                STATES, CAPACITY, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _cursor_of(cursor, row, FOLD_FIRST: tl.constexpr):
    """Slot of the oldest record, how many there are, and how many of them have been folded."""
    folded = 0
    if FOLD_FIRST:
        folded = tl.load(cursor + row * 3 + 2)
    return tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 1), folded


@triton.jit(do_not_specialize=["rows"])
def gated_delta_step(
    state, q, k, v, beta, ring_v, ring_d,
    coefficient, own_coefficient, gain, cursor, y,
    q_row, q_token, q_head, q_state,
    k_row, k_token, k_head, k_state,
    v_row, v_token, v_head, v_channel,
    beta_row, beta_token, beta_head,
    ring_k, ring_g, ring_beta, solution, folds, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, FOLD_FIRST: tl.constexpr, SKIP: tl.constexpr, OVERLAPS: tl.constexpr,
    SOLVERS: tl.constexpr, LIST: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """ROWS, CHUNK, STAGES: how the state is read, see `read`; AGES: records that are read at a time.

    FOLD_FIRST: rows that are due have been folded. SKIP: heads whose states count for nothing in this step do not read
    them. OVERLAPS: it begins while the kernel before it ends. SOLVERS: so many programs more, the first ones, solve for
    what the fold of the rows that are due needs, while the others wait for memory. LEADS: the fold behind it begins
    while it ends.
    """
    program = tl.program_id(0) - SOLVERS
    if SOLVERS > 0:
        if program < 0:
            if OVERLAPS:
                wait_for_previous()
            solve_due(
                ring_k, ring_g, ring_beta, solution, cursor, folds, rows,
                HEADS, GROUP, STATES, CAPACITY, BLOCK_K, BLOCK_R, SOLVERS, LIST,
            )  # fmt: skip
            return
    tiles: tl.constexpr = (WIDTH + BLOCK_V - 1) // BLOCK_V
    most: tl.constexpr = RECORDS // 2 if TOKENS > 1 else 1
    first, row_head, head, row = piece_of_program(program, HEADS, tiles, BLOCK_V)
    key_head = head // GROUP

    # addresses: int64 for the corner of a block, int32 inside it
    p, token, age = tl.arange(0, BLOCK_V), tl.arange(0, most), tl.arange(0, AGES)
    p_ok, token_ok = first + p < WIDTH, token < TOKENS
    out_ok = token_ok[:, None] & p_ok[None, :]
    block = state + (row_head * (STATES * WIDTH) + first)
    records = row_head * (CAPACITY * WIDTH) + first
    new_k, new_q = k + row * k_row + key_head * k_head, q + row * q_row + key_head * q_head
    new_v = v + row * v_row + head * v_head + (token[:, None] * v_token + (first + p)[None, :] * v_channel)
    factors = coefficient + row_head * (2 * TOKENS * BLOCK_R)
    gains = gain + row_head * (2 * TOKENS) + token
    read_ok = p_ok
    if SKIP:
        if OVERLAPS:
            wait_for_previous()
        read_ok = p_ok & (tl.load(gain + (row_head * (2 * TOKENS) + 0 * p)) > 0.0)

    # what checkpoint and records answer to the keys and to the queries
    if TOKENS == 1:
        # of the state as much as registers hold is under way before anything waits for the cursor
        chunk = read_chunk(block, new_k, new_q, k_state, q_state, 0, read_ok, WIDTH, STATES, BLOCK_V, ROWS)
        value = tl.load(new_v, mask=out_ok, other=0.0)
        if OVERLAPS:
            wait_for_previous()
        if LEADS:
            launch_next()
        start, past, folded = _cursor_of(cursor, row, FOLD_FIRST)
        d = deltas_of_records(ring_d + records, start, folded, past, age, p, p_ok, WIDTH, CAPACITY)
        known_k = tl.sum(d.to(tl.float32) * tl.load(factors + age)[:, None], 0)
        known_q = tl.sum(d.to(tl.float32) * tl.load(factors + (BLOCK_R + age))[:, None], 0)
        carried_k, carried_q = answers_to_one(
            chunk, block, new_k, new_q, k_state, q_state, read_ok, WIDTH, STATES, BLOCK_V, BLOCK_K, ROWS
        )
        for begin in tl.static_range(AGES, BLOCK_R, AGES):
            d = deltas_of_records(ring_d + records, start, folded, past, begin + age, p, p_ok, WIDTH, CAPACITY)
            known_k += tl.sum(d.to(tl.float32) * tl.load(factors + (begin + age))[:, None], 0)
            known_q += tl.sum(d.to(tl.float32) * tl.load(factors + (BLOCK_R + begin + age))[:, None], 0)
        answer_k = (tl.load(gain + row_head * 2) * carried_k + known_k)[None, :]
        answer_q = (tl.load(gain + row_head * 2 + 1) * carried_q + known_q)[None, :]
    else:
        value = tl.load(new_v, mask=out_ok, other=0.0)
        carried_k, carried_q = answers_to_many(
            block, new_k, new_q, k_token, k_state, q_token, q_state, read_ok,
            WIDTH, STATES, BLOCK_V, BLOCK_K, TOKENS, CHUNK, STAGES,
        )  # fmt: skip
        if OVERLAPS:
            wait_for_previous()
        if LEADS:
            launch_next()
        start, past, folded = _cursor_of(cursor, row, FOLD_FIRST)
        answer_k = tl.load(gains, mask=token_ok, other=0.0)[:, None] * carried_k
        answer_q = tl.load(gains + TOKENS, mask=token_ok, other=0.0)[:, None] * carried_q
        for begin in tl.static_range(0, BLOCK_R, AGES):
            d = deltas_of_records(ring_d + records, start, folded, past, begin + age, p, p_ok, WIDTH, CAPACITY)
            known_k, known_q = halves(
                product(rows_of_factors(factors + (begin + age)[None, :], BLOCK_R, TOKENS), d, 0.0), BLOCK_V
            )
            answer_k, answer_q = answer_k + known_k, answer_q + known_q
    among = among_tokens(
        beta + row * beta_row + head * beta_head, beta_token, own_coefficient, row_head, TOKENS, BLOCK_T, most
    )
    finish(
        answer_k, answer_q, value, among, ring_v, ring_d, y, start, past, row_head, first,
        HEADS, WIDTH, CAPACITY, BLOCK_V, TOKENS,
    )  # fmt: skip


@triton.jit
def among_tokens(
    beta, beta_token, own_coefficient, row_head, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, MOST: tl.constexpr
):
    """What `finish` takes: rates of the step's tokens ``[MOST]``, and of each token what keys and queries get of it."""
    token = tl.arange(0, MOST)
    token_ok = token < TOKENS
    among = (tl.load(beta + token * beta_token, mask=token_ok, other=0.0).to(tl.float32),)
    weights = own_coefficient + row_head * (2 * TOKENS * BLOCK_T) + token * (2 * BLOCK_T)
    for t in tl.static_range(TOKENS):
        among += (tl.load(weights + t, mask=token_ok, other=0.0),)  # type: ignore[assignment]
        among += (tl.load(weights + BLOCK_T + t, mask=token_ok, other=0.0),)  # type: ignore[assignment]
    return among


@triton.jit
def finish(
    answer_k, answer_q, value, among, ring_v, ring_d, y, start, past, row_head, first,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """From what the past answers ``[tokens or 8, BLOCK_V]`` to outputs and records, by forward substitution."""
    p, token = tl.arange(0, BLOCK_V), tl.arange(0, answer_k.shape[0])
    p_ok, token_ok = first + p < WIDTH, token < TOKENS
    out_ok = token_ok[:, None] & p_ok[None, :]
    rate = among[0]
    deltas = rate[:, None] * (value.to(tl.float32) - answer_k)
    for t in tl.static_range(TOKENS):
        delta = tl.sum(tl.where((token == t)[:, None], deltas, 0.0), 0)
        if t + 1 < TOKENS:
            deltas -= (among[1 + 2 * t] * rate)[:, None] * delta[None, :]
        answer_q += among[2 + 2 * t][:, None] * delta[None, :]
    row, head = row_head // HEADS, row_head % HEADS
    out = y + (row * TOKENS * HEADS + head) * WIDTH + first + (token[:, None] * (HEADS * WIDTH) + p[None, :])
    tl.store(out, answer_q.to(y.dtype.element_ty), mask=out_ok)
    place = row_head * (CAPACITY * WIDTH) + first
    place += record_slot(start, past + token, CAPACITY)[:, None] * WIDTH + p[None, :]
    tl.store(ring_v + place, value, mask=out_ok)
    tl.store(ring_d + place, deltas.to(ring_d.dtype.element_ty), mask=out_ok)


@triton.jit
def deltas_of_records(records, start, folded, past, age, p, p_ok, WIDTH: tl.constexpr, CAPACITY: tl.constexpr):
    """``d`` of the records of some ages, zeros where there are none or they are folded."""
    slot = record_slot(start, tl.minimum(age, CAPACITY), CAPACITY)
    ok = ((age >= folded) & (age < past))[:, None] & p_ok[None, :]
    return tl.load(records + (slot[:, None] * WIDTH + p[None, :]), mask=ok, other=0.0)


@triton.jit
def rows_of_factors(place, BLOCK_R: tl.constexpr, TOKENS: tl.constexpr):
    """Coefficients of some records, as rows of a matrix product: the keys' in the upper half, the queries' below."""
    half: tl.constexpr = RECORDS // 2
    m = tl.arange(0, RECORDS)
    token = m % half
    return tl.load(place + ((2 * token + m // half) * BLOCK_R)[:, None], mask=(token < TOKENS)[:, None], other=0.0)
