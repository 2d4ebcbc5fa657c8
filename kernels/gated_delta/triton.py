"""Triton kernels of the Gated DeltaNet replay step.

Two launches per layer and step. With the records ``j`` and the step's own tokens ``s``,

    d_t = beta_t (v_t - gain_kt (S0^T k_t) - sum_j w_tj d_j - sum_{s < t} w_ts d_s)
    y_t = gain_qt (S0^T q_t) + sum_j u_tj d_j + sum_{s <= t} u_ts d_s

- ``_prepare``, one program per row and value heads of one key head, reduces what the heads share (keys, queries,
  decays) to the gains, which take in the norms of ``k`` and ``q``, and the coefficients ``w`` and ``u``, and appends
  the new records. It does not touch the state.
- ``_step``, one program per row, value head and block of the head's channels, reads its block of the checkpoint once
  and appends the new ``d``. In rows that are due it folds the records into the block as well, by the recurrence, from
  the inputs alone, and writes it back; the output of such a row is read from the checkpoint before the fold, where the
  same formula holds.

Everything is computed in float32, without matrix units: the step is bound by memory.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from replay_transformers.kernels.gated_delta.update import NORM_EPSILON, update
from replay_transformers.kernels.launch import choose, on_their_device
from replay_transformers.kernels.parts import run_in_parts
from replay_transformers.kernels.tiles import MIN_RECORDS, UNROLL, record_slot, saturated
from replay_transformers.kernels.validation import (
    POINTERS,
    check_groups,
    check_operands,
    heads_per_program,
    power_of_two,
)

__all__ = ["replay_step", "update"]


@triton.jit
def _prepare(
    q, k, v, g, beta,
    ring_k, ring_v, ring_g, ring_beta,
    base, committed, pending, folds,
    cursor, coefficient, own_coefficient, gain, key_norm,
    q_row, q_token, q_head, q_state,
    k_row, k_token, k_head, k_state,
    v_row, v_token, v_head, v_channel,
    g_row, g_token, g_head,
    beta_row, beta_token, beta_head,
    query_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """SHARE: value heads per program, all of one key head; BLOCK_R: at least the records of any row."""
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
    age, token = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    i, p, h = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_H)
    live, k_ok, p_ok, token_ok, h_ok = age < past, i < STATES, p < WIDTH, token < TOKENS, h < SHARE
    slot, own_slot = record_slot(start, age, CAPACITY), record_slot(start, past + token, CAPACITY)
    key_row = row * (HEADS // GROUP) + key_head
    key_ring = ring_k + key_row * (CAPACITY * STATES)
    head = share * SHARE + h
    corner = row * HEADS + share * SHARE
    decays = ring_g + corner * CAPACITY + h[:, None] * CAPACITY
    own_k_ok, own_h_ok = token_ok[:, None] & k_ok[None, :], h_ok[:, None] & token_ok[None, :]
    own_p_ok = own_h_ok[:, :, None] & p_ok[None, None, :]
    keys = tl.load(key_ring + (slot[:, None] * STATES + i[None, :]), mask=live[:, None] & k_ok[None, :], other=0.0)
    log = tl.load(decays + slot[None, :], mask=h_ok[:, None] & live[None, :], other=0.0)
    later_slot, later_live = record_slot(start, age + 1, CAPACITY), age + 1 < past
    later = tl.load(decays + later_slot[None, :], mask=h_ok[:, None] & later_live[None, :], other=0.0)
    new_k, new_q = k + row * k_row + key_head * k_head, q + row * q_row + key_head * q_head
    own_k = tl.load(new_k + (token[:, None] * k_token + i[None, :] * k_state), mask=own_k_ok, other=0.0)
    own_q = tl.load(new_q + (token[:, None] * q_token + i[None, :] * q_state), mask=own_k_ok, other=0.0)
    own_log = tl.load(g + row * g_row + (head[:, None] * g_head + token[None, :] * g_token), mask=own_h_ok, other=0.0)
    own_beta = tl.load(
        beta + row * beta_row + (head[:, None] * beta_head + token[None, :] * beta_token), mask=own_h_ok, other=0.0
    )
    own_v = tl.load(
        v + row * v_row
        + (head[:, None, None] * v_head + token[None, :, None] * v_token + p[None, None, :] * v_channel),
        mask=own_p_ok, other=0.0,
    )  # fmt: skip

    # log-decays by age [heads, ages]; `later` is shifted by one age, so that its sums from the right leave out the own
    keys = keys.to(tl.float32)
    norm = tl.rsqrt(tl.sum(keys * keys, 1) + NORM_EPSILON)
    wide_k, wide_q = own_k.to(tl.float32), own_q.to(tl.float32)
    own_norm = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + NORM_EPSILON)
    after = tl.cumsum(later, 1, reverse=True)
    total = tl.sum(log, 1)
    out = coefficient + corner * (2 * TOKENS * BLOCK_R) + (h[:, None] * (2 * TOKENS * BLOCK_R) + age[None, :])
    own_out = own_coefficient + corner * (2 * TOKENS * BLOCK_T) + (h[:, None] * (2 * TOKENS * BLOCK_T) + token[None, :])
    for t in tl.static_range(TOKENS):
        key = tl.sum(tl.where((token == t)[:, None], wide_k, 0.0), 0)
        query = tl.sum(tl.where((token == t)[:, None], wide_q, 0.0), 0)
        norm_k = tl.rsqrt(tl.sum(key * key, 0) + NORM_EPSILON)
        norm_q = tl.rsqrt(tl.sum(query * query, 0) + NORM_EPSILON) * query_scale
        since = tl.sum(tl.where((token <= t)[None, :], own_log, 0.0), 1)
        decay = tl.where(live[None, :], tl.exp(after + since[:, None]) * norm[None, :], 0.0)
        score_k, score_q = tl.sum(keys * key[None, :], 1) * norm_k, tl.sum(keys * query[None, :], 1) * norm_q
        tl.store(out + 2 * t * BLOCK_R, decay * score_k[None, :], mask=h_ok[:, None])
        tl.store(out + (2 * t + 1) * BLOCK_R, decay * score_q[None, :], mask=h_ok[:, None])
        gains = gain + corner * (2 * TOKENS) + (h * (2 * TOKENS) + t)
        tl.store(gains, tl.exp(total + since) * norm_k, mask=h_ok)
        tl.store(gains + TOKENS, tl.exp(total + since) * norm_q, mask=h_ok)
        # the step's own tokens s <= t: logs of the tokens after s, up to t
        between = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
        if TOKENS > 1:
            inside = (token[None, :] > token[:, None]) & (token <= t)[None, :]
            between = tl.sum(tl.where(inside[None, :, :], own_log[:, None, :], 0.0), 2)
        decay = tl.where((token <= t)[None, :], tl.exp(between) * own_norm[None, :], 0.0)
        own_score_k = tl.where(token < t, tl.sum(wide_k * key[None, :], 1) * norm_k, 0.0)
        own_score_q = tl.sum(wide_k * query[None, :], 1) * norm_q
        tl.store(own_out + 2 * t * BLOCK_T, decay * own_score_k[None, :], mask=h_ok[:, None])
        tl.store(own_out + (2 * t + 1) * BLOCK_T, decay * own_score_q[None, :], mask=h_ok[:, None])

    # append
    tl.store(decays + own_slot[None, :], own_log, mask=own_h_ok)
    tl.store(ring_beta + corner * CAPACITY + (h[:, None] * CAPACITY + own_slot[None, :]), own_beta, mask=own_h_ok)
    place = corner * (CAPACITY * WIDTH) + (h[:, None, None] * (CAPACITY * WIDTH) + own_slot[None, :, None] * WIDTH)
    tl.store(ring_v + place + p[None, None, :], own_v, mask=own_p_ok)
    if share * SHARE % GROUP == 0:
        tl.store(key_ring + (own_slot[:, None] * STATES + i[None, :]), own_k, mask=own_k_ok)
        if FOLD:
            if count > 0:
                tl.store(key_norm + key_row * BLOCK_R + age, norm)
    if share == 0:
        tl.store(cursor + row * 3, start)
        tl.store(cursor + row * 3 + 1, past)
        tl.store(cursor + row * 3 + 2, count)


@triton.jit
def _step(
    state, q, k, v, beta, ring_k, ring_v, ring_g, ring_beta, ring_d,
    coefficient, own_coefficient, gain, key_norm, cursor, y,
    q_row, q_token, q_head, q_state,
    k_row, k_token, k_head, k_state,
    v_row, v_token, v_head, v_channel,
    beta_row, beta_token, beta_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (WIDTH + BLOCK_V - 1) // BLOCK_V
    first = (tl.program_id(0) % tiles) * BLOCK_V
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    head = ((tl.program_id(0) // tiles) % HEADS).to(tl.int32)
    row = row_head // HEADS
    key_head = head // GROUP

    # addresses: int64 for the corner of a block, int32 inside it
    i, p, token, age = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_T), tl.arange(0, AGES)
    p_ok, k_ok, token_ok = first + p < WIDTH, i < STATES, token < TOKENS
    out_ok = token_ok[:, None] & p_ok[None, :]
    block = state + (row_head * (STATES * WIDTH) + first) + (i[:, None] * WIDTH + p[None, :])
    block_ok = k_ok[:, None] & p_ok[None, :]
    s = tl.load(block, mask=block_ok, other=0.0).to(tl.float32)
    corner = row_head * (CAPACITY * WIDTH) + first
    # what the state should answer to the keys, and what is known of the answers to the queries
    wanted = tl.load(
        v + row * v_row + head * v_head + (token[:, None] * v_token + (first + p)[None, :] * v_channel),
        mask=out_ok, other=0.0,
    ).to(tl.float32)  # fmt: skip
    answer = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    rate = tl.load(beta + row * beta_row + head * beta_head + token * beta_token, mask=token_ok, other=0.0)
    rate = rate.to(tl.float32)
    start, past = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 1)
    gains = gain + row_head * (2 * TOKENS) + token
    gain_k, gain_q = tl.load(gains, mask=token_ok, other=0.0), tl.load(gains + TOKENS, mask=token_ok, other=0.0)
    factors = coefficient + row_head * (2 * TOKENS * BLOCK_R) + age
    for begin in tl.static_range(0, BLOCK_R, AGES):
        slot = record_slot(start, tl.minimum(begin + age, CAPACITY), CAPACITY)
        live = begin + age < past
        d = tl.load(
            ring_d + corner + (slot[:, None] * WIDTH + p[None, :]), mask=live[:, None] & p_ok[None, :], other=0.0
        ).to(tl.float32)
        for t in tl.static_range(TOKENS):
            known_k = tl.sum(d * tl.load(factors + (2 * t * BLOCK_R + begin))[:, None], 0)
            known_q = tl.sum(d * tl.load(factors + ((2 * t + 1) * BLOCK_R + begin))[:, None], 0)
            wanted -= tl.where((token == t)[:, None], known_k[None, :], 0.0)
            answer += tl.where((token == t)[:, None], known_q[None, :], 0.0)
    for t in tl.static_range(TOKENS):
        key = tl.load(k + row * k_row + key_head * k_head + (t * k_token + i * k_state), mask=k_ok, other=0.0)
        query = tl.load(q + row * q_row + key_head * q_head + (t * q_token + i * q_state), mask=k_ok, other=0.0)
        carried_k = tl.sum(s * key.to(tl.float32)[:, None], 0)
        carried_q = tl.sum(s * query.to(tl.float32)[:, None], 0)
        wanted -= tl.where((token == t)[:, None], carried_k[None, :] * gain_k[:, None], 0.0)
        answer += tl.where((token == t)[:, None], carried_q[None, :] * gain_q[:, None], 0.0)
    # forward substitution among the step's own tokens
    weights = own_coefficient + row_head * (2 * TOKENS * BLOCK_T) + token * (2 * BLOCK_T)
    deltas = rate[:, None] * wanted
    for t in tl.static_range(TOKENS):
        delta = tl.sum(tl.where((token == t)[:, None], deltas, 0.0), 0)
        if t + 1 < TOKENS:
            deltas -= (tl.load(weights + t, mask=token_ok, other=0.0) * rate)[:, None] * delta[None, :]
        answer += tl.load(weights + BLOCK_T + t, mask=token_ok, other=0.0)[:, None] * delta[None, :]
    out = y + (row * TOKENS * HEADS + head) * WIDTH + first + (token[:, None] * (HEADS * WIDTH) + p[None, :])
    tl.store(out, answer.to(y.dtype.element_ty), mask=out_ok)
    own_slot = record_slot(start, past + token, CAPACITY)
    place = ring_d + corner + (own_slot[:, None] * WIDTH + p[None, :])
    tl.store(place, deltas.to(ring_d.dtype.element_ty), mask=out_ok)

    if FOLD:
        count = tl.load(cursor + row * 3 + 2)
        if count > 0:
            key_row = row * (HEADS // GROUP) + key_head
            keys = ring_k + key_row * (CAPACITY * STATES)
            norms = key_norm + key_row * BLOCK_R
            for j in tl.range(0, count, loop_unroll_factor=UNROLL):
                record_at = record_slot(start, j, CAPACITY)
                old_key = tl.load(keys + record_at * STATES + i, mask=k_ok, other=0.0).to(tl.float32)
                old_key *= tl.load(norms + j)
                old_value = tl.load(ring_v + corner + record_at * WIDTH + p, mask=p_ok, other=0.0).to(tl.float32)
                old_rate = tl.load(ring_beta + row_head * CAPACITY + record_at).to(tl.float32)
                decay = tl.exp(tl.load(ring_g + row_head * CAPACITY + record_at))
                old_delta = old_rate * (old_value - tl.sum(s * old_key[:, None], 0) * decay)
                s = s * decay + old_key[:, None] * old_delta[None, :]
            tl.store(block, saturated(s, state.dtype.element_ty), mask=block_ok)


@on_their_device
def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    ring_d: torch.Tensor,
    base: torch.Tensor,
    committed: torch.Tensor,
    pending: torch.Tensor,
    folds: torch.Tensor | None,
    max_records: int,
) -> torch.Tensor:
    rows, tokens, key_heads, states = q.shape
    heads, width = v.shape[2:]
    group, fold, device = heads // key_heads, folds is not None, q.device
    block_r, block_t = power_of_two(max(max_records, MIN_RECORDS)), power_of_two(tokens)
    chosen = choose("gated_delta", device, rows * heads, tokens, width, states)
    share, block_v = heads_per_program(chosen.share, group), min(chosen.block, power_of_two(width))

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    cursor = torch.empty(rows, 3, dtype=torch.int32, device=device)
    coefficient, own = scratch(rows, heads, tokens, 2, block_r), scratch(rows, heads, tokens, 2, block_t)
    gain, norm = scratch(rows, heads, 2, tokens), scratch(rows, key_heads, block_r) if fold else scratch(1)
    y = torch.empty(rows, tokens, heads, width, dtype=q.dtype, device=device)
    sizes = {
        "HEADS": heads, "GROUP": group, "WIDTH": width, "STATES": states, "CAPACITY": ring_k.shape[2],
        "BLOCK_K": power_of_two(states), "BLOCK_R": block_r, "TOKENS": tokens, "BLOCK_T": block_t, "FOLD": fold,
    }  # fmt: skip
    _prepare[(rows * (heads // share),)](
        q, k, v, g, beta, ring_k, ring_v, ring_g, ring_beta, base, committed, pending, folds,
        cursor, coefficient, own, gain, norm,
        *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(), states**-0.5,
        SHARE=share, BLOCK_H=power_of_two(share), BLOCK_V=power_of_two(width), **sizes, num_warps=chosen.share_warps,
    )  # fmt: skip
    _step[(rows * heads * triton.cdiv(width, block_v),)](
        state, q, k, v, beta, ring_k, ring_v, ring_g, ring_beta, ring_d, coefficient, own, gain, norm, cursor, y,
        *q.stride(), *k.stride(), *v.stride(), *beta.stride(),
        BLOCK_V=block_v, AGES=MIN_RECORDS, **sizes, num_warps=chosen.warps,
    )  # fmt: skip
    return y


_operator = torch.library.custom_op(
    "replay_transformers::gated_delta_step",
    _launch,
    mutates_args=("state", "ring_k", "ring_v", "ring_g", "ring_beta", "ring_d"),
)


@_operator.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: object) -> torch.Tensor:
    return q.new_empty(v.shape)


def replay_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    ring_d: torch.Tensor,
    base: torch.Tensor,
    committed: torch.Tensor,
    pending: torch.Tensor,
    folds: torch.Tensor | None,
    max_records: int | None = None,
) -> torch.Tensor:
    """The same as `replay_transformers.kernels.gated_delta.reference.replay_step`, on a GPU.

    Tensors may be float32, bfloat16 or float16; ``state``, the rings and tensors of one dimension must be contiguous,
    the others may have any strides. Without gradients. Inside compiled graphs it is the operator
    ``replay_transformers::gated_delta_step``.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit; nothing is changed then.
    """
    rows, tokens, key_heads, states = q.shape
    heads, width = v.shape[2:]
    capacity = ring_k.shape[2]
    rings = {"ring_k": ring_k, "ring_v": ring_v, "ring_g": ring_g, "ring_beta": ring_beta, "ring_d": ring_d}
    if not torch.compiler.is_compiling():
        check_groups(heads, key_heads)
        expected = {
            "q": (q, (rows, tokens, key_heads, states)), "k": (k, (rows, tokens, key_heads, states)),
            "v": (v, (rows, tokens, heads, width)), "g": (g, (rows, tokens, heads)),
            "beta": (beta, (rows, tokens, heads)), "state": (state, (rows, heads, states, width)),
            "ring_k": (ring_k, (rows, key_heads, capacity, states)), "ring_v": (ring_v, (rows, heads, capacity, width)),
            "ring_g": (ring_g, (rows, heads, capacity)), "ring_beta": (ring_beta, (rows, heads, capacity)),
            "ring_d": (ring_d, (rows, heads, capacity, width)),
            "base": (base, (rows,)), "committed": (committed, (rows,)), "pending": (pending, (rows,)),
        }  # fmt: skip
        if folds is not None:
            expected["folds"] = (folds, (rows,))
        check_operands(expected, ("state", *rings), POINTERS)
    run: Callable[..., torch.Tensor] = _operator if torch.compiler.is_compiling() else _launch
    cursor = (base, committed, pending, folds)
    return run_in_parts(run, (q, k, v, g, beta), (state, *rings.values()), cursor, capacity, max_records)
