"""The baseline: eager decoding of one token, one Triton kernel per operator that reads and writes the whole state.

Each launch takes a `Tile`, its only tunable. `EAGER` names, per operator, the launch, a plain PyTorch step to check it
against, and the tiles worth trying.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from replay_transformers.geometry import LayerGeometry

from .operators import Tensors

NORM_EPSILON = 1e-6  # inside the square root, as in transformers and flash-linear-attention
FEWEST_VALUES_PER_THREAD, MOST_VALUES_PER_THREAD = 8, 128
WARPS = (1, 2, 4, 8)
TILE_ROWS = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Tile:
    """A launch configuration: rows of the head dimension per program, and warps."""

    rows: int
    warps: int


@triton.jit
def _mamba2_kernel(  # type: ignore[no-untyped-def]
    p_state, p_x, p_dt, p_A, p_B, p_C, p_D, p_y,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i_h = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    i_head = i_row * H + i_h
    i_group = i_row * G + i_h // (H // G)
    o_p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_n = tl.arange(0, N)
    inside = (o_p < P) | (P % ROWS == 0)  # no masks where a head has only whole tiles
    p_tile = p_state + (i_head * P + o_p[:, None]) * N + o_n[None, :]
    b_state = tl.load(p_tile, mask=inside[:, None], other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_head * P + o_p, mask=inside, other=0.0).to(tl.float32)
    b_B = tl.load(p_B + i_group * N + o_n).to(tl.float32)
    b_C = tl.load(p_C + i_group * N + o_n).to(tl.float32)
    dt = tl.load(p_dt + i_head)
    decay = tl.exp(tl.load(p_A + i_h) * dt)
    b_state = b_state * decay + (b_x * dt)[:, None] * b_B[None, :]
    b_y = tl.sum(b_state * b_C[None, :], axis=1) + b_x * tl.load(p_D + i_h)
    tl.store(p_tile, b_state.to(p_state.dtype.element_ty), mask=inside[:, None])
    tl.store(p_y + i_head * P + o_p, b_y.to(p_y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_delta_kernel(  # type: ignore[no-untyped-def]
    p_state, p_q, p_k, p_v, p_g, p_beta, p_y,
    HV: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    i_h = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    i_head = i_row * HV + i_h
    i_key = i_row * HK + i_h // (HV // HK)
    o_k = tl.arange(0, K)
    o_v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (o_v < V) | (V % ROWS == 0)
    p_tile = p_state + (i_head * K + o_k[:, None]) * V + o_v[None, :]
    b_state = tl.load(p_tile, mask=inside[None, :], other=0.0).to(tl.float32)
    b_k = tl.load(p_k + i_key * K + o_k).to(tl.float32)
    b_q = tl.load(p_q + i_key * K + o_k).to(tl.float32)
    b_v = tl.load(p_v + i_head * V + o_v, mask=inside, other=0.0).to(tl.float32)
    b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k) + EPSILON)
    b_q = b_q * tl.rsqrt((tl.sum(b_q * b_q) + EPSILON) * K)
    b_state = b_state * tl.exp(tl.load(p_g + i_head))
    b_delta = (b_v - tl.sum(b_state * b_k[:, None], axis=0)) * tl.load(p_beta + i_head).to(tl.float32)
    b_state = b_state + b_k[:, None] * b_delta[None, :]
    b_y = tl.sum(b_state * b_q[:, None], axis=0)
    tl.store(p_tile, b_state.to(p_state.dtype.element_ty), mask=inside[None, :])
    tl.store(p_y + i_head * V + o_v, b_y.to(p_y.dtype.element_ty), mask=inside)


def mamba2_update(tile: Tile, *, state: torch.Tensor, y: torch.Tensor, **inputs: torch.Tensor) -> None:
    """One Mamba-2 token per row.

    Args:
        state: ``[B, H, P, N]``, **mutated**. y: ``[B, H, P]``, **written**.
        inputs: x ``[B, H, P]``; dt ``[B, H]`` float32, after bias and softplus; A, D ``[H]`` float32; B, C
            ``[B, G, N]``. All contiguous.
    """
    rows, heads, head_dim, state_dim = state.shape
    names = ("x", "dt", "A", "B", "C", "D")
    _mamba2_kernel[triton.cdiv(head_dim, tile.rows), heads, rows](
        state, *(inputs[name] for name in names), y,
        H=heads, P=head_dim, G=inputs["B"].shape[1], N=state_dim, ROWS=tile.rows, num_warps=tile.warps,
    )  # fmt: skip


def gated_delta_update(tile: Tile, *, state: torch.Tensor, y: torch.Tensor, **inputs: torch.Tensor) -> None:
    """One Gated DeltaNet token per row.

    Args:
        state: ``[B, Hv, K, V]``, **mutated**. y: ``[B, Hv, V]``, **written**.
        inputs: q, k ``[B, Hk, K]`` before normalisation; v ``[B, Hv, V]``; g ``[B, Hv]`` float32, the log-decay; beta
            ``[B, Hv]``. All contiguous.
    """
    rows, heads, key_dim, value_dim = state.shape
    names = ("q", "k", "v", "g", "beta")
    _gated_delta_kernel[triton.cdiv(value_dim, tile.rows), heads, rows](
        state, *(inputs[name] for name in names), y,
        HV=heads, HK=inputs["k"].shape[1], K=key_dim, V=value_dim, ROWS=tile.rows, EPSILON=NORM_EPSILON,
        num_warps=tile.warps,
    )  # fmt: skip


def mamba2_plain(*, state: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`mamba2_update` in plain PyTorch and float64: the output and the next state."""
    x, dt, A, B, C, D = (inputs[name].double() for name in ("x", "dt", "A", "B", "C", "D"))
    repeats = x.shape[1] // B.shape[1]
    B, C = (tensor.repeat_interleave(repeats, dim=1)[:, :, None] for tensor in (B, C))
    state = state.double() * (A * dt).exp()[..., None, None] + (x * dt[..., None])[..., None] * B
    return (state * C).sum(-1) + x * D[:, None], state


def gated_delta_plain(*, state: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_delta_update` in plain PyTorch and float64: the output and the next state."""
    q, k, v, g, beta = (inputs[name].double() for name in ("q", "k", "v", "g", "beta"))
    repeats = v.shape[1] // k.shape[1]
    q, k = (x / (x.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(repeats, dim=1)[..., None] for x in (q * q.shape[-1] ** -0.5, k))
    state = state.double() * g.exp()[..., None, None]
    delta = (v - (state * k).sum(-2)) * beta[..., None]
    state = state + k * delta[:, :, None]
    return (state * q).sum(-2), state


@dataclass(frozen=True)
class EagerOperator:
    """An operator's baseline."""

    update: Callable[..., None]
    plain: Callable[..., tuple[torch.Tensor, torch.Tensor]]


EAGER = {
    "mamba2": EagerOperator(mamba2_update, mamba2_plain),
    "gated_delta": EagerOperator(gated_delta_update, gated_delta_plain),
}


def tiles(geometry: LayerGeometry) -> list[Tile]:
    """The launch configurations of a sweep: no taller than a head, and few enough values per thread for registers."""
    values = {(rows, warps): rows * geometry.state_dim // (32 * warps) for rows in TILE_ROWS for warps in WARPS}
    return [
        Tile(rows, warps)
        for (rows, warps), each in values.items()
        if rows <= geometry.head_dim and FEWEST_VALUES_PER_THREAD <= each <= MOST_VALUES_PER_THREAD
    ] or [Tile(TILE_ROWS[0], 1)]


def update_all(operator: EagerOperator, tile: Tile, layers: list[Tensors]) -> list[Callable[[], None]]:
    """One call per layer's tensors."""
    return [functools.partial(operator.update, tile, **tensors) for tensors in layers]
