"""Triton kernel of the eager Mamba-2 update: one token per row, the whole state read and written.

Where a layer's state is small enough for the GPU's cache, writing it at every step costs less than keeping records.
"""

import torch
import triton
import triton.language as tl

from replay_transformers.kernels.launch import on_their_device
from replay_transformers.kernels.tiles import inside, saturated
from replay_transformers.kernels.validation import check_groups, check_operands, is_far, power_of_two

__all__ = ["update"]

BLOCK, WARPS = 16, 8  # channels of a head per program: the waiting of a few rows is shared among many threads


@triton.jit
def _update(
    state, x, dt, B, C, A, D, y,
    x_row, x_head, x_channel, dt_row, dt_head,
    b_row, b_group, b_state, c_row, c_group, c_state,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, HAS_D: tl.constexpr, IS_FAR: tl.constexpr,
):  # fmt: skip
    first, head, row = tl.program_id(0) * BLOCK_P, tl.program_id(1), tl.program_id(2)
    if IS_FAR:
        row = row.to(tl.int64)
    row_head, group = row * HEADS + head, head // GROUP
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    # without masks where blocks fit
    p_ok, n_ok = inside(first + p, WIDTH, BLOCK_P), (n < STATES) | (STATES == BLOCK_N)
    block = state + row_head * (WIDTH * STATES) + ((first + p)[:, None] * STATES + n[None, :])
    block_ok = p_ok[:, None] & n_ok[None, :]
    # in this order the compiler has all loads under way before it waits for the first one
    step = tl.load(dt + row * dt_row + head * dt_head)
    rate = tl.load(A + head).to(tl.float32)
    value = tl.load(x + row * x_row + head * x_head + (first + p) * x_channel, mask=p_ok, other=0.0).to(tl.float32)
    key = tl.load(B + row * b_row + group * b_group + n * b_state, mask=n_ok, other=0.0).to(tl.float32)
    s = tl.load(block, mask=block_ok, other=0.0).to(tl.float32)
    skip = 0.0
    if HAS_D:
        skip = tl.load(D + head).to(tl.float32)
    query = tl.load(C + row * c_row + group * c_group + n * c_state, mask=n_ok, other=0.0).to(tl.float32)
    s = s * tl.exp(rate * step) + (value * step)[:, None] * key[None, :]
    result = tl.sum(s * query[None, :], 1) + value * skip
    tl.store(block, saturated(s, state.dtype.element_ty), mask=block_ok)
    tl.store(y + row_head * WIDTH + first + p, result.to(y.dtype.element_ty), mask=p_ok)


@on_their_device
def _launch(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
) -> torch.Tensor:
    rows, _, heads, width = x.shape
    groups, states = B.shape[2:]
    y = torch.empty(rows, 1, heads, width, dtype=x.dtype, device=x.device)
    block = min(BLOCK, power_of_two(width))
    _update[(triton.cdiv(width, block), heads, rows)](  # one dimension each: a long division costs as much as the rest
        state, x, dt, B, C, A, D, y,
        *(x.stride(i) for i in (0, 2, 3)), *(dt.stride(i) for i in (0, 2)),
        *(B.stride(i) for i in (0, 2, 3)), *(C.stride(i) for i in (0, 2, 3)),
        HEADS=heads, GROUP=heads // groups, WIDTH=width, STATES=states,
        BLOCK_P=block, BLOCK_N=power_of_two(states), HAS_D=D is not None,
        IS_FAR=is_far(x, dt, B, C, state), num_warps=WARPS,
    )  # fmt: skip
    return y


_operator = torch.library.custom_op("replay_transformers::mamba2_update", _launch, mutates_args=("state",))


@_operator.register_fake
def _(x: torch.Tensor, *operands: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def update(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    *,
    state: torch.Tensor,
) -> torch.Tensor:
    """The recurrence for one token per row (see `replay_transformers.kernels.mamba2.reference`), on a GPU.

    Args:
        x: ``[B, 1, H, P]``. dt: ``[B, 1, H]`` in float32, after bias, softplus and clamp. B, C: ``[B, 1, G, N]``.
        A: ``[H]``, negative. D: ``[H]`` or None.
        state: ``[B, H, P, N]``, contiguous, **mutated**.

    Returns:
        ``[B, 1, H, P]`` in the dtype of ``x``.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit; nothing is changed then.
    """
    if torch.compiler.is_compiling():
        return _operator(x, dt, B, C, A, D, state)
    rows, _, heads, width = x.shape
    groups, states = B.shape[2:]
    expected = {
        "x": (x, (rows, 1, heads, width)), "dt": (dt, (rows, 1, heads)), "B": (B, (rows, 1, groups, states)),
        "C": (C, (rows, 1, groups, states)), "A": (A, (heads,)), "state": (state, (rows, heads, width, states)),
    }  # fmt: skip
    if D is not None:
        expected["D"] = (D, (heads,))
    check_groups(heads, groups)
    check_operands(expected, ("state",), ())
    return _launch(x, dt, B, C, A, D, state)
