"""The kernels of the Mamba-2 replay step; `triton` says what each of them does."""

import triton
import triton.language as tl

from replay_transformers.kernels.overlap import launch_next, wait_for_previous
from replay_transformers.kernels.tiles import RECORDS, exact_product, inside, piece_of_program, record_slot, saturated

__all__ = ["change_of_states", "mamba2_prepare", "mamba2_step", "of_records"]


@triton.jit
def mamba2_prepare(
    dt, B, C, A, D,
    ring_b, ring_dt,
    base, committed, pending, folds,
    cursor, coefficient, carry, weight,
    dt_row, dt_token, dt_head,
    b_row, b_token, b_group, b_state,
    c_row, c_token, c_group, c_state, least_log,
    HEADS: tl.constexpr, GROUP: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, HAS_D: tl.constexpr, FOLD: tl.constexpr,
    FOLD_FIRST: tl.constexpr, SKIP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """SHARE: heads per program, all of one group; BLOCK_R: at least the records of any row.

    FOLD_FIRST: rows that are due are folded before they are read. SKIP: states that are scaled by less than the
    exponential of ``least_log`` count for nothing. OVERLAPS: the step kernel begins meanwhile.
    """
    if OVERLAPS:
        launch_next()
    shares: tl.constexpr = HEADS // SHARE
    row = (tl.program_id(0) // shares).to(tl.int64)
    share = tl.program_id(0) % shares
    group = share * SHARE // GROUP
    start = (tl.load(base + row) % CAPACITY).to(tl.int32)
    past = (tl.load(committed + row) + tl.load(pending + row)).to(tl.int32)
    count = 0
    if FOLD:
        count = tl.load(folds + row).to(tl.int32)

    # all loads come before the first store, which they might alias as far as the compiler knows
    age, token = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    n, h = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_H)
    live, n_ok, token_ok, h_ok = age < past, n < STATES, token < TOKENS, h < SHARE
    slot, own_slot = record_slot(start, age, CAPACITY), record_slot(start, past + token, CAPACITY)
    key_ring = ring_b + (row * (HEADS // GROUP) + group) * (CAPACITY * STATES)
    head = share * SHARE + h
    corner = row * HEADS + share * SHARE
    times = ring_dt + corner * CAPACITY + h[:, None] * CAPACITY
    own_n_ok, own_h_ok = token_ok[:, None] & n_ok[None, :], h_ok[:, None] & token_ok[None, :]
    keys = tl.load(key_ring + (slot[:, None] * STATES + n[None, :]), mask=live[:, None] & n_ok[None, :], other=0.0)
    step = tl.load(times + slot[None, :], mask=h_ok[:, None] & live[None, :], other=0.0)
    later_slot, later_live = record_slot(start, age + 1, CAPACITY), age + 1 < past
    later = tl.load(times + later_slot[None, :], mask=h_ok[:, None] & later_live[None, :], other=0.0)
    rate = tl.load(A + head, mask=h_ok, other=0.0).to(tl.float32)
    skip = tl.zeros([BLOCK_H], tl.float32)
    if HAS_D:
        skip = tl.load(D + head, mask=h_ok, other=0.0).to(tl.float32)
    new_b, new_c = B + row * b_row + group * b_group, C + row * c_row + group * c_group
    own_b = tl.load(new_b + (token[:, None] * b_token + n[None, :] * b_state), mask=own_n_ok, other=0.0)
    own_c = tl.load(new_c + (token[:, None] * c_token + n[None, :] * c_state), mask=own_n_ok, other=0.0)
    own_step = tl.load(
        dt + row * dt_row + (head[:, None] * dt_head + token[None, :] * dt_token), mask=own_h_ok, other=0.0
    )

    # logs by age [heads, ages]; `later` is shifted by one age, so that its sums from the right leave out the own log
    later *= rate[:, None]
    after = tl.cumsum(later, 1, reverse=True)
    read = live
    if FOLD_FIRST:
        read = live & (age >= count)
    total = tl.sum(tl.where(read[None, :], step, 0.0) * rate[:, None], 1)
    own_log = own_step * rate[:, None]
    decayed = tl.where(read[None, :], tl.exp(after) * step, 0.0)
    queries = tl.trans(own_c)
    scores = exact_product(keys, queries, tl.zeros([BLOCK_R, BLOCK_T], tl.float32))
    own_scores = exact_product(own_b, queries, tl.zeros([BLOCK_T, BLOCK_T], tl.float32))
    # logs of the step's own tokens up to t, and of those after s up to t [heads, s]
    since, between = tl.zeros([BLOCK_H], tl.float32), tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
    out = coefficient + (corner + h)[:, None] * (TOKENS * 2 * BLOCK_R)
    forgotten = total + tl.sum(tl.where((token == 0)[None, :], own_log, 0.0), 1) < least_log
    for t in tl.static_range(TOKENS):
        is_t = (token == t)[None, :]
        log = tl.sum(tl.where(is_t, own_log, 0.0), 1)
        since += log
        carried = tl.exp(total + since)
        if SKIP:
            carried = tl.where(forgotten, 0.0, carried)
        tl.store(carry + corner * TOKENS + (h * TOKENS + t), carried, mask=h_ok)
        score = tl.sum(tl.where(is_t, scores, 0.0), 1)
        value = decayed * tl.exp(since)[:, None] * score[None, :]  # two decays: neither exceeds 1
        tl.store(out + (t * 2 * BLOCK_R + age)[None, :], value, mask=h_ok[:, None])
        between = tl.where((token < t)[None, :], between + log[:, None], 0.0)
        score = tl.sum(tl.where(is_t, own_scores, 0.0), 1)
        value = tl.where((token <= t)[None, :], tl.exp(between) * own_step * score[None, :], 0.0)
        value += tl.where(is_t, skip[:, None], 0.0)
        tl.store(out + ((t * 2 + 1) * BLOCK_R + token)[None, :], value, mask=h_ok[:, None])

    # append
    tl.store(times + own_slot[None, :], own_step, mask=own_h_ok)
    if share * SHARE % GROUP == 0:
        tl.store(key_ring + (own_slot[:, None] * STATES + n[None, :]), own_b, mask=own_n_ok)
    if share == 0:
        tl.store(cursor + row * 3, start)
        tl.store(cursor + row * 3 + 1, past)
        tl.store(cursor + row * 3 + 2, count)
    if FOLD:
        if count > 0:
            folded = (age < count)[None, :]
            rest = tl.cumsum(tl.where((age + 1 < count)[None, :], later, 0.0), 1, reverse=True)
            weights = weight + corner * (BLOCK_R + 1) + h * (BLOCK_R + 1)
            tl.store(weights[:, None] + age[None, :], tl.where(folded, tl.exp(rest) * step, 0.0), mask=h_ok[:, None])
            total = tl.sum(tl.where(folded, step * rate[:, None], 0.0), 1)
            if SKIP:
                total = tl.where(total < least_log, float("-inf"), total)
            tl.store(weights + BLOCK_R, tl.exp(total), mask=h_ok)


@triton.jit
def of_records(
    x, records, coefficient, start, past, p_ok, x_token, x_channel,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """What the records and the step's own tokens contribute, ``[BLOCK_P, BLOCK_T]``; appends the latter."""
    p, token = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_T)
    if TOKENS == 1:
        result = tl.zeros([BLOCK_P], tl.float32)
        for begin in tl.static_range(0, BLOCK_R, AGES):
            age = begin + tl.arange(0, AGES)
            slot = record_slot(start, tl.minimum(age, CAPACITY), CAPACITY)
            ok = (age < past)[:, None] & p_ok[None, :]
            old = tl.load(records + (slot[:, None] * WIDTH + p[None, :]), mask=ok, other=0.0)
            result += tl.sum(old.to(tl.float32) * tl.load(coefficient + age)[:, None], 0)
        own = tl.load(x + p * x_channel, mask=p_ok, other=0.0)
        tl.store(records + record_slot(start, past, CAPACITY) * WIDTH + p, own, mask=p_ok)
        return (result + own.to(tl.float32) * tl.load(coefficient + BLOCK_R))[:, None]
    # one product: BLOCK_R ages, then the tokens
    k = tl.arange(0, 2 * BLOCK_R)
    is_own, s = k >= BLOCK_R, k - BLOCK_R
    factor = tl.load(
        coefficient + (token[:, None] * (2 * BLOCK_R) + k[None, :]),
        mask=(token < TOKENS)[:, None] & (s < TOKENS)[None, :], other=0.0,
    )  # fmt: skip
    slot = record_slot(start, tl.minimum(tl.where(is_own, past + s, k), CAPACITY), CAPACITY)
    place = records + (slot[:, None] * WIDTH + p[None, :])
    own_ok = (is_own & (s < TOKENS))[:, None] & p_ok[None, :]
    old_ok = (k < tl.minimum(past, BLOCK_R))[:, None] & p_ok[None, :]
    old = tl.load(place, mask=old_ok, other=0.0)
    own = tl.load(x + (s[:, None] * x_token + p[None, :] * x_channel), mask=own_ok, other=0.0)
    values = tl.where(is_own[:, None], own, old)
    result = exact_product(factor, values, tl.zeros([BLOCK_T, BLOCK_P], tl.float32))
    tl.store(place, own, mask=own_ok)
    return tl.trans(result)


@triton.jit
def change_of_states(
    records, keys, weights, start, count, p_ok, begin,
    WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """What the ``count`` oldest records add to PART states from ``begin`` on, ``[BLOCK_P, PART]``."""
    p, n = tl.arange(0, BLOCK_P), begin + tl.arange(0, PART)
    is_upright: tl.constexpr = BLOCK_P >= RECORDS  # rows enough for a matrix product
    change = tl.zeros([BLOCK_P, PART] if is_upright else [PART, BLOCK_P], tl.float32)
    for first in tl.static_range(0, BLOCK_R, AGES):
        age = first + tl.arange(0, AGES)
        slot = record_slot(start, tl.minimum(age, CAPACITY), CAPACITY)[:, None]
        folded = (age < count)[:, None]
        old = tl.load(records + (slot * WIDTH + p[None, :]), mask=folded & p_ok[None, :], other=0.0)
        key = tl.load(keys + (slot * STATES + n[None, :]), mask=folded & (n < STATES)[None, :], other=0.0)
        weighted = old.to(tl.float32) * tl.load(weights + age)[:, None]
        if is_upright:
            change = exact_product(tl.trans(weighted), key, change)
        else:
            change = exact_product(tl.trans(key), weighted, change)
    if is_upright:
        return change
    else:
        return tl.trans(change)


@triton.jit
def _fold(
    block, records, keys, weights, start, count, p_ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Fold the ``count`` oldest records into the block: ``PART`` states at a time, for want of registers."""
    p = tl.arange(0, BLOCK_P)
    total = tl.load(weights + BLOCK_R)
    for begin in tl.static_range(0, BLOCK_N, PART):
        n = begin + tl.arange(0, PART)
        change = change_of_states(
            records, keys, weights, start, count, p_ok, begin, WIDTH, STATES, CAPACITY, BLOCK_P, BLOCK_R, AGES, PART
        )
        place = block + (p[:, None] * STATES + n[None, :])
        ok = p_ok[:, None] & (n < STATES)[None, :]
        s = tl.load(place, mask=ok, other=0.0).to(tl.float32)
        tl.store(place, saturated(s * total + change, block.dtype.element_ty), mask=ok)


@triton.jit
def mamba2_step(
    state, x, C, ring_x, ring_b, coefficient, carry, weight, cursor, y,
    x_row, x_token, x_head, x_channel,
    c_row, c_token, c_group, c_state,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    COLUMNS: tl.constexpr, PART: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, FOLD: tl.constexpr,
    SKIP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """COLUMNS: of the state, that different threads read: sums over states are sums in each thread first.

    SKIP: heads whose states count for nothing in this step do not read them. OVERLAPS: it begins while the kernel
    before it ends.
    """
    tiles: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    first, row_head, head, row = piece_of_program(tl.program_id(0), HEADS, tiles, BLOCK_P)
    group = head // GROUP

    # addresses: int64 for the corner of a block, int32 inside it
    p, token = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    p_ok, n_ok = inside(first + p, WIDTH, BLOCK_P), (n < STATES)[None, :, :]
    block = state + (row_head * WIDTH + first) * STATES
    query, gains = C + row * c_row + group * c_group, carry + row_head * TOKENS
    if OVERLAPS:
        wait_for_previous()
    read_ok = p_ok
    if SKIP:
        read_ok = p_ok & (tl.load(gains + 0 * p) > 0.0)
    # the state last: Triton then leaves it in the threads that read it, and moves the queries there
    queries, scales = (), ()
    for t in tl.static_range(TOKENS):
        place = query + (t * c_token + n[None, :, :] * c_state)
        queries += (tl.load(place, mask=n_ok, other=0.0),)  # type: ignore[assignment]
        scales += (tl.load(gains + t),)  # type: ignore[assignment]
    start, past = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 1)
    s = tl.load(block + (p[:, None, None] * STATES + n[None, :, :]), mask=read_ok[:, None, None] & n_ok, other=0.0)
    # nothing that waits for another load is put before the last one of the state
    tl.debug_barrier()
    s = s.to(tl.float32)
    records = ring_x + row_head * (CAPACITY * WIDTH) + first
    known = of_records(
        x + row * x_row + head * x_head + first * x_channel, records, coefficient + row_head * (TOKENS * 2 * BLOCK_R),
        start, past, p_ok, x_token, x_channel, WIDTH, CAPACITY, BLOCK_P, BLOCK_R, AGES, TOKENS, BLOCK_T,
    )  # fmt: skip
    result = tl.zeros([BLOCK_P, BLOCK_T], tl.float32)
    for t in tl.static_range(TOKENS):
        carried = scales[t] * tl.sum(tl.sum(s * queries[t].to(tl.float32), 1), 1)
        result = tl.where((token == t)[None, :], carried[:, None], result)
    out = y + (row * TOKENS * HEADS + head) * WIDTH + first + (token[None, :] * (HEADS * WIDTH) + p[:, None])
    tl.store(out, (result + known).to(y.dtype.element_ty), mask=p_ok[:, None] & (token < TOKENS)[None, :])

    if FOLD:
        count = tl.load(cursor + row * 3 + 2)
        if count > 0:
            # a thread must not overwrite what another has yet to read
            tl.debug_barrier()
            keys = ring_b + (row * (HEADS // GROUP) + group) * (CAPACITY * STATES)
            _fold(
                block, records, keys, weight + row_head * (BLOCK_R + 1), start, count, p_ok,
                WIDTH, STATES, CAPACITY, BLOCK_P, BLOCK_N, BLOCK_R, AGES, PART,
            )  # fmt: skip
