"""Triton kernels of the Mamba-2 replay step.

Two launches per layer and step. With the records ``j`` and the step's own tokens ``s``,

    y_t = carry_t (S0 C_t) + history_t,    history_t = sum_j w_tj x_j + sum_{s <= t} w_ts x_s + D x_t

- ``_prepare``, one program per row and a few heads of one group, computes ``carry`` and ``history`` from the rings and
  appends the new records. It does not touch the state.
- ``_step``, one program per row, head and block of the head's channels, reads its block of the checkpoint once. In
  rows that are due it folds the records into the block as well, one after the other, and writes it back; the output of
  such a row is read from the checkpoint before the fold, where the same formula holds.

Everything is computed in float32, without matrix units: the step is bound by memory.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from replay_transformers.kernels.launch import choose
from replay_transformers.kernels.parts import after_part, parts_of
from replay_transformers.kernels.tiles import record_slot, saturated
from replay_transformers.kernels.validation import POINTERS, check_operands, power_of_two

__all__ = ["replay_step"]

MIN_RECORDS = 16  # fewer are not worth a compilation of their own


@triton.jit
def _prepare(
    x, dt, B, C, A, D,
    ring_x, ring_b, ring_dt,
    base, committed, pending, folds,
    cursor, history, carry, weight,
    x_row, x_token, x_head, x_channel,
    dt_row, dt_token, dt_head,
    b_row, b_token, b_group, b_state,
    c_row, c_token, c_group, c_state,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
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
    n, p, h = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P), tl.arange(0, SHARE)
    live, n_ok, p_ok, token_ok = age < past, n < STATES, p < WIDTH, token < TOKENS
    slot, own_slot = record_slot(start, age, CAPACITY), record_slot(start, past + token, CAPACITY)
    group_row = row * (HEADS // GROUP) + group
    key_ring = ring_b + group_row * (CAPACITY * STATES)
    head = share * SHARE + h
    corner = row * HEADS + share * SHARE
    times = ring_dt + corner * CAPACITY + h[:, None] * CAPACITY
    records = ring_x + corner * (CAPACITY * WIDTH) + (h[:, None, None] * (CAPACITY * WIDTH) + p[None, None, :])
    own_n_ok, own_p_ok = token_ok[:, None] & n_ok[None, :], token_ok[None, :, None] & p_ok[None, None, :]

    own_b = tl.load(
        B + row * b_row + group * b_group + (token[:, None] * b_token + n[None, :] * b_state), mask=own_n_ok, other=0.0
    )
    own_c = tl.load(
        C + row * c_row + group * c_group + (token[:, None] * c_token + n[None, :] * c_state), mask=own_n_ok, other=0.0
    )
    own_step = tl.load(
        dt + row * dt_row + (head[:, None] * dt_head + token[None, :] * dt_token), mask=token_ok[None, :], other=0.0
    )
    own_x = tl.load(
        x + row * x_row
        + (head[:, None, None] * x_head + token[None, :, None] * x_token + p[None, None, :] * x_channel),
        mask=own_p_ok, other=0.0,
    )  # fmt: skip
    rate = tl.load(A + head).to(tl.float32)
    skip = tl.zeros([SHARE], tl.float32)
    if HAS_D:
        skip = tl.load(D + head).to(tl.float32)
    keys = tl.load(key_ring + (slot[:, None] * STATES + n[None, :]), mask=live[:, None] & n_ok[None, :], other=0.0)
    step = tl.load(times + slot[None, :], mask=live[None, :], other=0.0)
    later = tl.load(times + record_slot(start, age + 1, CAPACITY)[None, :], mask=(age + 1 < past)[None, :], other=0.0)
    record = tl.load(records + slot[None, :, None] * WIDTH, mask=live[None, :, None] & p_ok[None, None, :], other=0.0)

    # logs by age [SHARE, ages]; `later` is shifted by one age, so that its sums from the right leave out the own log
    keys, record = keys.to(tl.float32), record.to(tl.float32)
    later *= rate[:, None]
    after = tl.cumsum(later, 1, reverse=True)
    total = tl.sum(step * rate[:, None], 1)
    own_log = own_step * rate[:, None]
    out = history + corner * (TOKENS * WIDTH) + (h[:, None] * (TOKENS * WIDTH) + p[None, :])
    for t in tl.static_range(TOKENS):
        query = tl.sum(tl.where((token == t)[:, None], own_c.to(tl.float32), 0.0), 0)
        since = tl.sum(tl.where((token <= t)[None, :], own_log, 0.0), 1)
        factor = tl.exp(after + since[:, None]) * step * tl.sum(keys * query[None, :], 1)[None, :]
        factor = tl.where(live[None, :], factor, 0.0)
        result = tl.sum(record * factor[:, :, None], 1)
        # the step's own tokens s <= t: logs of the tokens after s, up to t
        between = tl.zeros([SHARE, BLOCK_T], tl.float32)
        if TOKENS > 1:
            inside = (token[None, :] > token[:, None]) & (token <= t)[None, :]
            between = tl.sum(tl.where(inside[None, :, :], own_log[:, None, :], 0.0), 2)
        own_factor = tl.exp(between) * own_step * tl.sum(own_b.to(tl.float32) * query[None, :], 1)[None, :]
        own_factor = tl.where((token <= t)[None, :], own_factor, 0.0)
        own_factor += tl.where((token == t)[None, :], skip[:, None], 0.0)
        result += tl.sum(own_x.to(tl.float32) * own_factor[:, :, None], 1)
        tl.store(out + t * WIDTH, result, mask=p_ok[None, :])
        tl.store(carry + corner * TOKENS + (h * TOKENS + t), tl.exp(total + since))

    # append
    tl.store(times + own_slot[None, :], own_step, mask=token_ok[None, :])
    tl.store(records + own_slot[None, :, None] * WIDTH, own_x, mask=own_p_ok)
    if share * SHARE % GROUP == 0:
        tl.store(key_ring + (own_slot[:, None] * STATES + n[None, :]), own_b, mask=own_n_ok)
    if share == 0:
        tl.store(cursor + row * 2, start)
        tl.store(cursor + row * 2 + 1, count)
    if FOLD:
        if count > 0:
            folded = (age < count)[None, :]
            rest = tl.cumsum(tl.where((age + 1 < count)[None, :], later, 0.0), 1, reverse=True)
            weights = weight + corner * (BLOCK_R + 1) + h * (BLOCK_R + 1)
            tl.store(weights[:, None] + age[None, :], tl.where(folded, tl.exp(rest) * step, 0.0))
            tl.store(weights + BLOCK_R, tl.exp(tl.sum(tl.where(folded, step * rate[:, None], 0.0), 1)))


@triton.jit
def _step(
    state, ring_x, ring_b, C, history, carry, weight, cursor, y,
    c_row, c_token, c_group, c_state,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    first = (tl.program_id(0) % tiles) * BLOCK_P
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    head = ((tl.program_id(0) // tiles) % HEADS).to(tl.int32)
    row = row_head // HEADS
    group = head // GROUP

    # addresses: int64 for the corner of a block, int32 inside it
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    p_ok, n_ok = first + p < WIDTH, n < STATES
    block = state + (row_head * WIDTH + first) * STATES + (p[:, None] * STATES + n[None, :])
    block_ok = p_ok[:, None] & n_ok[None, :]
    s = tl.load(block, mask=block_ok, other=0.0).to(tl.float32)
    token = tl.arange(0, BLOCK_T)
    out_ok = (token < TOKENS)[:, None] & p_ok[None, :]
    known = (row_head * TOKENS) * WIDTH + first + (token[:, None] * WIDTH + p[None, :])
    result = tl.load(history + known, mask=out_ok, other=0.0)
    scale = tl.load(carry + row_head * TOKENS + token, mask=token < TOKENS, other=0.0)
    for t in tl.static_range(TOKENS):
        query = tl.load(C + row * c_row + group * c_group + (t * c_token + n * c_state), mask=n_ok, other=0.0)
        carried = tl.sum(s * query.to(tl.float32)[None, :], 1)
        result += tl.where((token == t)[:, None], carried[None, :] * scale[:, None], 0.0)
    out = y + (row * TOKENS * HEADS + head) * WIDTH + first + (token[:, None] * (HEADS * WIDTH) + p[None, :])
    tl.store(out, result.to(y.dtype.element_ty), mask=out_ok)

    if FOLD:
        count = tl.load(cursor + row * 2 + 1)
        if count > 0:
            start = tl.load(cursor + row * 2)
            weights = weight + row_head * (BLOCK_R + 1)
            records = ring_x + row_head * (CAPACITY * WIDTH) + first
            keys = ring_b + (row * (HEADS // GROUP) + group) * (CAPACITY * STATES)
            s *= tl.load(weights + BLOCK_R)
            # each record is loaded one round ahead
            record = tl.load(records + start * WIDTH + p, mask=p_ok, other=0.0)
            key = tl.load(keys + start * STATES + n, mask=n_ok, other=0.0)
            factor = tl.load(weights)
            for j in range(1, count + 1):
                slot = record_slot(start, tl.minimum(j, count - 1), CAPACITY)
                next_record = tl.load(records + slot * WIDTH + p, mask=p_ok, other=0.0)
                next_key = tl.load(keys + slot * STATES + n, mask=n_ok, other=0.0)
                next_factor = tl.load(weights + j)
                s += (record.to(tl.float32) * factor)[:, None] * key.to(tl.float32)[None, :]
                record, key, factor = next_record, next_key, next_factor
            tl.store(block, saturated(s, state.dtype.element_ty), mask=block_ok)


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
    cursor = torch.empty(rows, 2, dtype=torch.int32, device=device)
    history = torch.empty(rows, heads, tokens, width, dtype=torch.float32, device=device)
    carry = torch.empty(rows, heads, tokens, dtype=torch.float32, device=device)
    weight = torch.empty((rows, heads, block_r + 1) if fold else (1,), dtype=torch.float32, device=device)
    y = torch.empty(rows, tokens, heads, width, dtype=x.dtype, device=device)
    chosen = choose("mamba2", device, rows * heads, tokens, width, states)
    share = min(chosen.share, group & -group)
    block_p = min(chosen.block, power_of_two(width))
    sizes = {
        "HEADS": heads, "GROUP": group, "WIDTH": width, "STATES": states, "CAPACITY": ring_x.shape[2],
        "BLOCK_N": power_of_two(states), "BLOCK_R": block_r,
        "TOKENS": tokens, "BLOCK_T": power_of_two(tokens), "FOLD": fold,
    }  # fmt: skip
    _prepare[(rows * (heads // share),)](
        x, dt, B, C, A, D, ring_x, ring_b, ring_dt, base, committed, pending, folds, cursor, history, carry, weight,
        *x.stride(), *dt.stride(), *B.stride(), *C.stride(),
        SHARE=share, BLOCK_P=power_of_two(width), HAS_D=D is not None, **sizes, num_warps=chosen.share_warps,
    )  # fmt: skip
    _step[(rows * heads * triton.cdiv(width, block_p),)](
        state, ring_x, ring_b, C, history, carry, weight, cursor, y, *C.stride(),
        BLOCK_P=block_p, **sizes, num_warps=chosen.warps,
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

    Tensors may be float32, bfloat16 or float16; ``state`` and the rings must be contiguous, the others may have any
    strides. Without gradients. Inside compiled graphs it is the operator ``replay_transformers::mamba2_step``.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit; nothing is changed then.
    """
    rows, tokens, heads, width = x.shape
    groups, states = B.shape[2:]
    capacity = ring_x.shape[2]
    if not torch.compiler.is_compiling():
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
    outputs = []
    for part in parts_of(tokens):
        operands = (tensor[:, part] for tensor in (x, dt, B, C))
        bound = capacity - (part.stop - part.start) if max_records is None else max_records + part.start
        cursor = (base, committed, pending, folds)
        outputs.append(run(*operands, A, D, state, ring_x, ring_b, ring_dt, *cursor, bound))
        base, committed, pending, folds = after_part(*cursor, part.stop - part.start)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
