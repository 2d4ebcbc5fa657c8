"""Triton kernels of the Mamba-2 replay step.

Two launches per layer and step. With the records ``j`` and the step's own tokens ``s``,

    y_t = carry_t (S0 C_t) + sum_j w_tj x_j + sum_{s <= t} w_ts x_s + D x_t

- ``_prepare``, one program per row and heads of one group, reduces what the heads share (B, C, time steps) to ``carry``
  and the coefficients ``w``, and appends the new records. It does not touch the state.
- ``_step``, one program per row, head and block of the head's channels, reads its block of the checkpoint once. In
  rows that are due it folds the records into the block as well, one after the other, and writes it back; the output of
  such a row is read from the checkpoint before the fold, where the same formula holds.

Everything is computed in float32, without matrix units: the step is bound by memory.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from replay_transformers.kernels.launch import choose, on_their_device
from replay_transformers.kernels.mamba2.update import update
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
    x, dt, B, C, A, D,
    ring_x, ring_b, ring_dt,
    base, committed, pending, folds,
    cursor, coefficient, own_coefficient, carry, weight,
    x_row, x_token, x_head, x_channel,
    dt_row, dt_token, dt_head,
    b_row, b_token, b_group, b_state,
    c_row, c_token, c_group, c_state,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, HAS_D: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """SHARE: heads per program, all of one group; BLOCK_R: at least the records of any row."""
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
    n, p, h = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_H)
    live, n_ok, p_ok, token_ok, h_ok = age < past, n < STATES, p < WIDTH, token < TOKENS, h < SHARE
    slot, own_slot = record_slot(start, age, CAPACITY), record_slot(start, past + token, CAPACITY)
    group_row = row * (HEADS // GROUP) + group
    key_ring = ring_b + group_row * (CAPACITY * STATES)
    head = share * SHARE + h
    corner = row * HEADS + share * SHARE
    times = ring_dt + corner * CAPACITY + h[:, None] * CAPACITY
    own_n_ok, own_h_ok = token_ok[:, None] & n_ok[None, :], h_ok[:, None] & token_ok[None, :]
    own_p_ok = own_h_ok[:, :, None] & p_ok[None, None, :]
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
    own_x = tl.load(
        x + row * x_row
        + (head[:, None, None] * x_head + token[None, :, None] * x_token + p[None, None, :] * x_channel),
        mask=own_p_ok, other=0.0,
    )  # fmt: skip

    # logs by age [heads, ages]; `later` is shifted by one age, so that its sums from the right leave out the own log
    later *= rate[:, None]
    after = tl.cumsum(later, 1, reverse=True)
    total = tl.sum(step * rate[:, None], 1)
    own_log = own_step * rate[:, None]
    keys, wide_b = keys.to(tl.float32), own_b.to(tl.float32)
    out = coefficient + corner * (TOKENS * BLOCK_R) + (h[:, None] * (TOKENS * BLOCK_R) + age[None, :])
    own_out = own_coefficient + corner * (TOKENS * BLOCK_T) + (h[:, None] * (TOKENS * BLOCK_T) + token[None, :])
    for t in tl.static_range(TOKENS):
        query = tl.sum(tl.where((token == t)[:, None], own_c.to(tl.float32), 0.0), 0)
        since = tl.sum(tl.where((token <= t)[None, :], own_log, 0.0), 1)
        value = tl.exp(after + since[:, None]) * step * tl.sum(keys * query[None, :], 1)[None, :]
        tl.store(out + t * BLOCK_R, tl.where(live[None, :], value, 0.0), mask=h_ok[:, None])
        tl.store(carry + corner * TOKENS + (h * TOKENS + t), tl.exp(total + since), mask=h_ok)
        # the step's own tokens s <= t: logs of the tokens after s, up to t
        between = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
        if TOKENS > 1:
            inside = (token[None, :] > token[:, None]) & (token <= t)[None, :]
            between = tl.sum(tl.where(inside[None, :, :], own_log[:, None, :], 0.0), 2)
        value = tl.exp(between) * own_step * tl.sum(wide_b * query[None, :], 1)[None, :]
        value = tl.where((token <= t)[None, :], value, 0.0) + tl.where((token == t)[None, :], skip[:, None], 0.0)
        tl.store(own_out + t * BLOCK_T, value, mask=h_ok[:, None])

    # append
    records = ring_x + corner * (CAPACITY * WIDTH) + (h[:, None, None] * (CAPACITY * WIDTH) + p[None, None, :])
    tl.store(times + own_slot[None, :], own_step, mask=own_h_ok)
    tl.store(records + own_slot[None, :, None] * WIDTH, own_x, mask=own_p_ok)
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
            total = tl.exp(tl.sum(tl.where(folded, step * rate[:, None], 0.0), 1))
            tl.store(weights + BLOCK_R, total, mask=h_ok)


@triton.jit
def _step(
    state, x, C, ring_x, ring_b, coefficient, own_coefficient, carry, weight, cursor, y,
    x_row, x_token, x_head, x_channel,
    c_row, c_token, c_group, c_state,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, AGES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    first = (tl.program_id(0) % tiles) * BLOCK_P
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    head = ((tl.program_id(0) // tiles) % HEADS).to(tl.int32)
    row = row_head // HEADS
    group = head // GROUP

    # addresses: int64 for the corner of a block, int32 inside it
    p, n, token, age = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T), tl.arange(0, AGES)
    p_ok, n_ok = first + p < WIDTH, n < STATES
    out_ok = (token < TOKENS)[:, None] & p_ok[None, :]
    block = state + (row_head * WIDTH + first) * STATES + (p[:, None] * STATES + n[None, :])
    block_ok = p_ok[:, None] & n_ok[None, :]
    s = tl.load(block, mask=block_ok, other=0.0).to(tl.float32)
    own = tl.load(
        x + row * x_row + head * x_head + (token[:, None] * x_token + (first + p)[None, :] * x_channel),
        mask=out_ok, other=0.0,
    ).to(tl.float32)  # fmt: skip
    start, past = tl.load(cursor + row * 3), tl.load(cursor + row * 3 + 1)
    scale = tl.load(carry + row_head * TOKENS + token, mask=token < TOKENS, other=0.0)
    records = ring_x + row_head * (CAPACITY * WIDTH) + first
    result = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    for begin in tl.static_range(0, BLOCK_R, AGES):
        slot = record_slot(start, tl.minimum(begin + age, CAPACITY), CAPACITY)
        live = begin + age < past
        record = tl.load(
            records + (slot[:, None] * WIDTH + p[None, :]), mask=live[:, None] & p_ok[None, :], other=0.0
        ).to(tl.float32)
        for t in tl.static_range(TOKENS):
            factor = tl.load(coefficient + (row_head * TOKENS + t) * BLOCK_R + begin + age)
            known = tl.sum(record * factor[:, None], 0)
            result += tl.where((token == t)[:, None], known[None, :], 0.0)
    for t in tl.static_range(TOKENS):
        query = tl.load(C + row * c_row + group * c_group + (t * c_token + n * c_state), mask=n_ok, other=0.0)
        carried = tl.sum(s * query.to(tl.float32)[None, :], 1)
        factor = tl.load(own_coefficient + (row_head * TOKENS + t) * BLOCK_T + token)
        known = tl.sum(own * factor[:, None], 0)
        result += tl.where((token == t)[:, None], carried[None, :] * scale[:, None] + known[None, :], 0.0)
    out = y + (row * TOKENS * HEADS + head) * WIDTH + first + (token[:, None] * (HEADS * WIDTH) + p[None, :])
    tl.store(out, result.to(y.dtype.element_ty), mask=out_ok)

    if FOLD:
        count = tl.load(cursor + row * 3 + 2)
        if count > 0:
            weights = weight + row_head * (BLOCK_R + 1)
            keys = ring_b + (row * (HEADS // GROUP) + group) * (CAPACITY * STATES)
            s *= tl.load(weights + BLOCK_R)
            for j in tl.range(0, count, loop_unroll_factor=UNROLL):
                record_at = record_slot(start, j, CAPACITY)
                folded = tl.load(records + record_at * WIDTH + p, mask=p_ok, other=0.0).to(tl.float32)
                key = tl.load(keys + record_at * STATES + n, mask=n_ok, other=0.0).to(tl.float32)
                s += (folded * tl.load(weights + j))[:, None] * key[None, :]
            tl.store(block, saturated(s, state.dtype.element_ty), mask=block_ok)


@on_their_device
def _launch(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_b: torch.Tensor,
    ring_dt: torch.Tensor,
    base: torch.Tensor,
    committed: torch.Tensor,
    pending: torch.Tensor,
    folds: torch.Tensor | None,
    max_records: int,
) -> torch.Tensor:
    rows, tokens, heads, width = x.shape
    groups, states = B.shape[2:]
    group, fold, device = heads // groups, folds is not None, x.device
    block_r = power_of_two(max(max_records, MIN_RECORDS))
    chosen = choose("mamba2", device, rows * heads, tokens, width, states)
    share = heads_per_program(chosen.share, group)
    block_p, block_t = min(chosen.block, power_of_two(width)), power_of_two(tokens)

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    cursor = torch.empty(rows, 3, dtype=torch.int32, device=device)
    coefficient, own = scratch(rows, heads, tokens, block_r), scratch(rows, heads, tokens, block_t)
    carry, weight = scratch(rows, heads, tokens), scratch(rows, heads, block_r + 1) if fold else scratch(1)
    y = torch.empty(rows, tokens, heads, width, dtype=x.dtype, device=device)
    sizes = {
        "HEADS": heads, "GROUP": group, "WIDTH": width, "STATES": states, "CAPACITY": ring_x.shape[2],
        "BLOCK_N": power_of_two(states), "BLOCK_R": block_r, "TOKENS": tokens, "BLOCK_T": block_t, "FOLD": fold,
    }  # fmt: skip
    _prepare[(rows * (heads // share),)](
        x, dt, B, C, A, D, ring_x, ring_b, ring_dt, base, committed, pending, folds,
        cursor, coefficient, own, carry, weight, *x.stride(), *dt.stride(), *B.stride(), *C.stride(),
        SHARE=share, BLOCK_H=power_of_two(share), BLOCK_P=power_of_two(width), HAS_D=D is not None,
        **sizes, num_warps=chosen.share_warps,
    )  # fmt: skip
    _step[(rows * heads * triton.cdiv(width, block_p),)](
        state, x, C, ring_x, ring_b, coefficient, own, carry, weight, cursor, y, *x.stride(), *C.stride(),
        BLOCK_P=block_p, AGES=MIN_RECORDS, **sizes, num_warps=chosen.warps,
    )  # fmt: skip
    return y


_operator = torch.library.custom_op(
    "replay_transformers::mamba2_step", _launch, mutates_args=("state", "ring_x", "ring_b", "ring_dt")
)


@_operator.register_fake
def _(x: torch.Tensor, *operands: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def replay_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    *,
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_b: torch.Tensor,
    ring_dt: torch.Tensor,
    base: torch.Tensor,
    committed: torch.Tensor,
    pending: torch.Tensor,
    folds: torch.Tensor | None,
    max_records: int | None = None,
) -> torch.Tensor:
    """The same as `replay_transformers.kernels.mamba2.reference.replay_step`, on a GPU.

    Tensors may be float32, bfloat16 or float16; ``state``, the rings and tensors of one dimension must be contiguous,
    the others may have any strides. Without gradients. Inside compiled graphs it is the operator
    ``replay_transformers::mamba2_step``.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit; nothing is changed then.
    """
    rows, tokens, heads, width = x.shape
    groups, states = B.shape[2:]
    capacity = ring_x.shape[2]
    if not torch.compiler.is_compiling():
        check_groups(heads, groups)
        expected = {
            "x": (x, (rows, tokens, heads, width)), "dt": (dt, (rows, tokens, heads)),
            "B": (B, (rows, tokens, groups, states)), "C": (C, (rows, tokens, groups, states)), "A": (A, (heads,)),
            "state": (state, (rows, heads, width, states)), "ring_x": (ring_x, (rows, heads, capacity, width)),
            "ring_b": (ring_b, (rows, groups, capacity, states)), "ring_dt": (ring_dt, (rows, heads, capacity)),
            "base": (base, (rows,)), "committed": (committed, (rows,)), "pending": (pending, (rows,)),
        }  # fmt: skip
        if D is not None:
            expected["D"] = (D, (heads,))
        if folds is not None:
            expected["folds"] = (folds, (rows,))
        check_operands(expected, ("state", "ring_x", "ring_b", "ring_dt"), POINTERS)
    run: Callable[..., torch.Tensor] = _operator if torch.compiler.is_compiling() else _launch
    cursor = (base, committed, pending, folds)
    return run_in_parts(run, (x, dt, B, C), (A, D, state, ring_x, ring_b, ring_dt), cursor, capacity, max_records)
