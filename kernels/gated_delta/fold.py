"""The fold of the rows that are due: from the inputs, the checkpoint read once and written once.

The records are folded in blocks of 16. With ``n_j`` the inverse norm of the key ``k_j`` and ``G_j`` the log-decay since
the block's beginning, the corrections of a block solve

    (I + A) d = beta (v - exp(G) n (S^T k)),    A_ij = beta_i exp(G_i - G_j) n_i n_j (k_i . k_j) for j < i

and the state becomes ``exp(G_last) S + sum_j k_j (x) w_j`` with ``w_j = exp(G_last - G_j) n_j d_j``. Since
``w = P (v - exp(G) n (S^T k))`` with a matrix ``P`` that the head's channels share, `solve` finds it once per head,
beside the step or before it; the fold is a launch of its own.

Few rows are due in a step, sometimes none and sometimes all: every program of `fold` reads which, and takes its share
of their tiles. Rows that are not due cost nothing, and those that are due keep the whole GPU busy.
"""

import triton
import triton.language as tl

from replay_transformers.kernels.gated_delta.update import NORM_EPSILON
from replay_transformers.kernels.overlap import wait_for_previous
from replay_transformers.kernels.tiles import (
    MIN_RECORDS,
    RECORDS,
    cut_product,
    due_rows,
    exact_product,
    inside,
    piece_of_due,
    record_slot,
    saturated,
)

__all__ = ["SOLUTION", "advanced", "gated_delta_fold", "solve", "solve_due"]

# floats per block of records: the matrix, gains of the state, its decay
SOLUTION = tl.constexpr(MIN_RECORDS * (MIN_RECORDS + 2))


@triton.jit
def _inverse(a):
    """Of ``I + a``, ``a`` strictly lower triangular, by forward substitution."""
    i, j = tl.arange(0, RECORDS)[:, None], tl.arange(0, RECORDS)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    for done in tl.range(0, RECORDS - 1):
        column = tl.sum(tl.where(j == done, a, 0.0), 1)
        row = tl.sum(tl.where(i == done, inverse, 0.0), 0)
        inverse -= column[:, None] * row[None, :]
    return inverse


@triton.jit
def solve(
    keys, logs, rates, solution, start, count, forgotten,
    STATES: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What `gated_delta_fold` needs to know about the ``count`` oldest records of a head.

    forgotten: whether the state counts for nothing: its gains are 0 then, and the decay that stands for it is -1.
    """
    age, k = tl.arange(0, RECORDS), tl.arange(0, BLOCK_K)
    i, j = age[:, None], age[None, :]
    for first in tl.range(0, count, RECORDS, num_stages=1):
        live = first + age < count
        slot = record_slot(start, tl.minimum(first + age, CAPACITY), CAPACITY)
        next_slot = record_slot(start, tl.minimum(first + age + 1, CAPACITY), CAPACITY)
        key_ok = live[:, None] & (k < STATES)[None, :]
        key = tl.load(keys + (slot[:, None] * STATES + k[None, :]), mask=key_ok, other=0.0)
        log = tl.load(logs + slot, mask=live, other=0.0)
        later = tl.load(logs + next_slot, mask=(first + age + 1 < count) & (age + 1 < RECORDS), other=0.0)
        rate = tl.load(rates + slot, mask=live, other=0.0).to(tl.float32)
        scores = exact_product(key, tl.trans(key), tl.zeros([RECORDS, RECORDS], tl.float32))
        # inverse norms by row and by column, and sums of the logs in (j, i] and after j
        own = tl.where(i == j, scores, 0.0)
        norm_i, norm_j = tl.rsqrt(tl.sum(own, 1) + NORM_EPSILON), tl.rsqrt(tl.sum(own, 0) + NORM_EPSILON)
        between = tl.cumsum(tl.where(i > j, log[:, None], 0.0), 0)
        system = (rate * norm_i)[:, None] * tl.exp(between) * (scores * norm_j[None, :])
        after = tl.exp(tl.cumsum(later, 0, reverse=True)) * norm_i
        matrix = after[:, None] * _inverse(tl.where(i > j, system, 0.0)) * rate[None, :]
        place = solution + first // RECORDS * SOLUTION
        tl.store(place + (i * RECORDS + j), matrix)
        gone = forgotten & (first == 0)
        tl.store(place + (RECORDS * RECORDS + age), tl.where(gone, 0.0, tl.exp(tl.cumsum(log, 0)) * norm_i))
        tl.store(place + RECORDS * (RECORDS + 1), tl.where(gone, -1.0, tl.exp(tl.sum(log, 0))))


@triton.jit
def solve_due(
    ring_k, ring_g, ring_beta, solution, cursor, folds, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PROGRAMS: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """`solve` for all heads of the rows that are due, by the first PROGRAMS programs."""
    lists = (rows + LIST - 1) // LIST
    for place in tl.range(0, lists, num_stages=1):
        due = due_rows(folds, cursor, rows, place, LIST)
        end = tl.max(due[1], 0) * HEADS
        for piece in tl.range(tl.program_id(0), end, PROGRAMS, num_stages=1):
            row, head, _, start, count = piece_of_due(piece, due, HEADS, 1, 1)
            row_head = row * HEADS + head
            solve(
                ring_k + (row * (HEADS // GROUP) + head // GROUP) * (CAPACITY * STATES),
                ring_g + row_head * CAPACITY, ring_beta + row_head * CAPACITY,
                solution + row_head * (BLOCK_R // RECORDS * SOLUTION), start, count, count < 0,
                STATES, CAPACITY, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _places(block, begin, first, WIDTH: tl.constexpr, STATES: tl.constexpr, BLOCK_V: tl.constexpr, PART: tl.constexpr):
    """Where PART states of the channels of ``block`` lie, and which of them there are, ``[4, 8, w, PART / 8, 2, 2]``.

    The dimensions are those in which matrix units keep rows and columns of a product: four threads with two states
    each, eight with two channels each, the groups of 16 channels. A load in this order needs no exchange among threads.
    """
    quad, lane, pair = tl.arange(0, 4), tl.arange(0, 8), tl.arange(0, 2)
    group, step = tl.arange(0, BLOCK_V // RECORDS), tl.arange(0, PART // 8)
    i = begin + (quad[:, None, None] * 2 + step[None, :, None] * 8 + pair[None, None, :])
    c = lane[:, None, None] * 2 + group[None, :, None] * RECORDS + pair[None, None, :]
    i, c = i[:, None, None, :, :, None], c[None, :, :, None, None, :]
    return block + (i * WIDTH + c), (i < STATES) & inside(first + c, WIDTH, BLOCK_V)


@triton.jit
def _tile(
    block, keys, values, solution, start, count, first,
    WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PART: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Fold the ``count`` oldest records into ``block``, ``[STATES, BLOCK_V]``, which begins with the channel ``first``.

    It stays in registers, in parts of PART states and transposed: so it enters products as it leaves them. With
    OVERLAPS the step may still run while it is read.
    """
    m = tl.arange(0, BLOCK_V)
    c = m // RECORDS * RECORDS + m % 8 * 2 + m // 8 % 2  # as the rows of a product are numbered
    parts = ()
    for begin in tl.static_range(0, BLOCK_K, PART):
        place, ok = _places(block, begin, first, WIDTH, STATES, BLOCK_V, PART)
        part = tl.permute(tl.load(place, mask=ok, other=0.0).to(tl.float32), (2, 5, 1, 3, 0, 4))
        parts += (tl.reshape(part, [BLOCK_V, PART]),)  # type: ignore[assignment]
    if OVERLAPS:
        wait_for_previous()
    c_ok = inside(first + c, WIDTH, BLOCK_V)
    parts = advanced(
        parts, keys, values, solution, start, count, c, c_ok, WIDTH, STATES, CAPACITY, BLOCK_V, BLOCK_K, BLOCK_R, PART
    )
    for begin in tl.static_range(0, BLOCK_K, PART):
        place, ok = _places(block, begin, first, WIDTH, STATES, BLOCK_V, PART)
        part = tl.reshape(parts[begin // PART], [BLOCK_V // RECORDS, 2, 8, PART // 8, 4, 2])
        part = tl.permute(part, (4, 2, 0, 3, 5, 1))
        tl.store(place, saturated(part, block.dtype.element_ty), mask=ok)


@triton.jit
def advanced(
    parts, keys, values, solution, start, count, c, c_ok,
    WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """States of the channels ``c`` of a block, ``[BLOCK_V, PART]`` in parts, after the ``count`` oldest records."""
    age, n = tl.arange(0, RECORDS), tl.arange(0, PART)
    for first in tl.static_range(0, BLOCK_R, RECORDS):  # without a loop the next tile can be under way meanwhile
        live, is_block = first + age < count, first + 0 * age < count
        slot = record_slot(start, tl.minimum(first + age, CAPACITY), CAPACITY)
        value = tl.load(values + (slot[None, :] * WIDTH + c[:, None]), mask=live[None, :] & c_ok[:, None], other=0.0)
        place = solution + first // RECORDS * SOLUTION
        matrix = tl.load(place + (age[:, None] * RECORDS + age[None, :]), mask=is_block[:, None], other=0.0)
        gain = tl.load(place + (RECORDS * RECORDS + age), mask=is_block, other=0.0)
        decay = tl.where(first < count, tl.load(place + RECORDS * (RECORDS + 1)), 1.0)
        records, answers = (), tl.zeros([BLOCK_V, RECORDS], tl.float32)
        for begin in tl.static_range(0, BLOCK_K, PART):
            key_ok = live[:, None] & (begin + n < STATES)[None, :]
            records += (tl.load(keys + (slot[:, None] * STATES + (begin + n)[None, :]), mask=key_ok, other=0.0),)  # type: ignore[assignment]
            # added, here and below, after the product: matrix units truncate where they accumulate
            answers += cut_product(
                parts[begin // PART], tl.trans(records[begin // PART]), tl.zeros([BLOCK_V, RECORDS], tl.float32)
            )
        wanted = value.to(tl.float32) - answers * gain[None, :]
        weighted = cut_product(wanted, tl.trans(matrix), tl.zeros([BLOCK_V, RECORDS], tl.float32))
        changed = ()
        for begin in tl.static_range(0, BLOCK_K, PART):
            change = cut_product(weighted, records[begin // PART], tl.zeros([BLOCK_V, PART], tl.float32))
            changed += (tl.fma(parts[begin // PART], decay, change),)  # type: ignore[assignment]
        parts = changed
    return parts


@triton.jit(do_not_specialize=["rows"])
def gated_delta_fold(
    state, ring_k, ring_v, solution, cursor, folds, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
    LIST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """LIST: rows whose tiles a program shares with those beside it; PART: rows of a tile that enter one product.

    STAGES: tiles that are under way at a time. OVERLAPS: it begins while the step ends. The step has let it begin when
    what came before the step had ended: which rows are due and where, and their states, are known then.
    """
    tiles: tl.constexpr = (WIDTH + BLOCK_V - 1) // BLOCK_V
    due = due_rows(folds, cursor, rows, tl.program_id(1), LIST)
    end = tl.max(due[1], 0) * (HEADS * tiles)
    for piece in tl.range(tl.program_id(0), end, tl.num_programs(0), num_stages=STAGES):
        row, head, first, start, count = piece_of_due(piece, due, HEADS, tiles, BLOCK_V)
        row_head = row * HEADS + head
        keys = ring_k + (row * (HEADS // GROUP) + head // GROUP) * (CAPACITY * STATES)
        block, values = state + (row_head * (STATES * WIDTH) + first), ring_v + (row_head * (CAPACITY * WIDTH) + first)
        _tile(
            block, keys, values, solution + row_head * (BLOCK_R // RECORDS * SOLUTION), start, count, first,
            WIDTH, STATES, CAPACITY, BLOCK_V, BLOCK_K, BLOCK_R, PART, OVERLAPS,
        )  # fmt: skip
    if OVERLAPS:
        wait_for_previous()  # also without a tile: what comes next waits for this kernel only
