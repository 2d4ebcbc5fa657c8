"""Triton kernel of the eager Gated DeltaNet update: one token per row, the whole state read and written.

Where a layer's state is small enough for the GPU's cache, writing it at every step costs less than keeping records.
"""

import torch
import triton
import triton.language as tl

from replay_transformers.kernels.gated_delta import reference
from replay_transformers.kernels.launch import on_their_device
from replay_transformers.kernels.tiles import inside, saturated
from replay_transformers.kernels.validation import check_groups, check_operands, power_of_two

__all__ = ["update"]

BLOCK, WARPS = 16, 1  # channels of a head per program: many small programs, since there are few rows
NORM_EPSILON = tl.constexpr(reference.NORM_EPSILON)


@triton.jit
def _update(
    state, q, k, v, g, beta, y,
    q_row, q_head, q_state, k_row, k_head, k_state,
    v_row, v_head, v_channel, g_row, g_head, beta_row, beta_head, query_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first, head, row = tl.program_id(0) * BLOCK_V, tl.program_id(1), tl.program_id(2).to(tl.int64)
    row_head, key_head = row * HEADS + head, head // GROUP
    i, p = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    # without masks where blocks fit
    p_ok, k_ok = inside(first + p, WIDTH, BLOCK_V), (i < STATES) | (STATES == BLOCK_K)
    block = state + (row_head * (STATES * WIDTH) + first) + (i[:, None] * WIDTH + p[None, :])
    block_ok = k_ok[:, None] & p_ok[None, :]
    s = tl.load(block, mask=block_ok, other=0.0).to(tl.float32)
    key = tl.load(k + row * k_row + key_head * k_head + i * k_state, mask=k_ok, other=0.0).to(tl.float32)
    query = tl.load(q + row * q_row + key_head * q_head + i * q_state, mask=k_ok, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_row + head * v_head + (first + p) * v_channel, mask=p_ok, other=0.0).to(tl.float32)
    rate = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    decay = tl.exp(tl.load(g + row * g_row + head * g_head))
    key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPSILON)
    query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPSILON) * query_scale
    delta = rate * (value - tl.sum(s * key[:, None], 0) * decay)
    s = s * decay + key[:, None] * delta[None, :]
    result = tl.sum(s * query[:, None], 0)
    tl.store(block, saturated(s, state.dtype.element_ty), mask=block_ok)
    tl.store(y + row_head * WIDTH + first + p, result.to(y.dtype.element_ty), mask=p_ok)


@on_their_device
def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    rows, _, key_heads, states = q.shape
    heads, width = v.shape[2:]
    y = torch.empty(rows, 1, heads, width, dtype=q.dtype, device=q.device)
    block = min(BLOCK, power_of_two(width))
    _update[(triton.cdiv(width, block), heads, rows)](
        state, q, k, v, g, beta, y,
        *(q.stride(i) for i in (0, 2, 3)), *(k.stride(i) for i in (0, 2, 3)), *(v.stride(i) for i in (0, 2, 3)),
        *(g.stride(i) for i in (0, 2)), *(beta.stride(i) for i in (0, 2)), states**-0.5,
        HEADS=heads, GROUP=heads // key_heads, WIDTH=width, STATES=states,
        BLOCK_V=block, BLOCK_K=power_of_two(states), num_warps=WARPS,
    )  # fmt: skip
    return y


_operator = torch.library.custom_op("replay_transformers::gated_delta_update", _launch, mutates_args=("state",))


@_operator.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: object) -> torch.Tensor:
    return q.new_empty(v.shape)


def update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
) -> torch.Tensor:
    """The recurrence for one token per row (see `replay_transformers.kernels.gated_delta.reference`), on a GPU.

    Args:
        q, k: ``[B, 1, Hk, K]``, before normalisation. v: ``[B, 1, Hv, V]``. g: ``[B, 1, Hv]`` in float32, the
            log-decay. beta: ``[B, 1, Hv]``.
        state: ``[B, Hv, K, V]``, contiguous, **mutated**.

    Returns:
        ``[B, 1, Hv, V]`` in the dtype of ``q``.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit; nothing is changed then.
    """
    if torch.compiler.is_compiling():
        return _operator(q, k, v, g, beta, state)
    rows, _, key_heads, states = q.shape
    heads, width = v.shape[2:]
    expected = {
        "q": (q, (rows, 1, key_heads, states)), "k": (k, (rows, 1, key_heads, states)),
        "v": (v, (rows, 1, heads, width)), "g": (g, (rows, 1, heads)), "beta": (beta, (rows, 1, heads)),
        "state": (state, (rows, heads, states, width)),
    }  # fmt: skip
    check_groups(heads, key_heads)
    check_operands(expected, ("state",), ())
    return _launch(q, k, v, g, beta, state)
