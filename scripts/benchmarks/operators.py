"""Random tensors of one layer's decode step, for the eager baseline and for the replay step."""

from dataclasses import dataclass

import torch

from replay_transformers.config import ReplayConfig
from replay_transformers.geometry import LayerGeometry

from .eager import Tensors

SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1
FASTEST_RATE = 16.0
STATE_SCALE = 0.3
LARGEST_POSITION = 1_000_000
OPERANDS = {"mamba2": ("x", "dt", "B", "C", "A", "D"), "gated_delta": ("q", "k", "v", "g", "beta")}
PHASES = 16  # of the flush cycle over which layers rotate, so that even one row is measured in all of them


@dataclass
class ReplayLayer:
    """One layer: operands by position, state and rings by name."""

    operands: tuple[torch.Tensor, ...]
    buffers: Tensors


def _step_sizes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Log-uniform time steps in float32."""
    low, high = (torch.tensor(step, device=device).log() for step in (SHORTEST_STEP, LONGEST_STEP))
    return (low + (high - low) * torch.rand(shape, device=device)).exp()


def _rates(heads: int, device: torch.device) -> torch.Tensor:
    return -torch.empty(heads, device=device).uniform_(0.5, FASTEST_RATE)


def state_shape(geometry: LayerGeometry, rows: int) -> tuple[int, int, int, int]:
    """``[B, H, P, N]`` for Mamba-2, ``[B, Hv, K, V]`` for Gated DeltaNet."""
    dims = geometry.head_dim, geometry.state_dim
    first, last = dims if geometry.kind == "mamba2" else dims[::-1]
    return rows, geometry.heads, first, last


def random_state(geometry: LayerGeometry, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A state of normal values."""
    return torch.randn(state_shape(geometry, rows), device=device).mul_(STATE_SCALE).to(dtype)


def replay_operands(
    geometry: LayerGeometry, rows: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """What the model hands to `replay_step`: views into the convolution's output, as in the mixers."""
    heads, groups, width, depth = geometry.heads, geometry.groups, geometry.head_dim, geometry.state_dim
    mixed = torch.randn(rows, tokens, geometry.conv_dim, device=device).to(dtype)
    dt = _step_sizes((rows, tokens, heads), device)
    if geometry.kind == "mamba2":
        x, B, C = mixed.split([heads * width, groups * depth, groups * depth], dim=-1)
        x, B, C = x.unflatten(-1, (heads, width)), B.unflatten(-1, (groups, depth)), C.unflatten(-1, (groups, depth))
        return x, dt, B, C, _rates(heads, device), torch.ones(heads, device=device)
    q, k, v = mixed.split([groups * depth, groups * depth, heads * width], dim=-1)
    q, k, v = q.unflatten(-1, (groups, depth)), k.unflatten(-1, (groups, depth)), v.unflatten(-1, (heads, width))
    beta = torch.randn(rows, tokens, heads, device=device).sigmoid().to(dtype)
    return q, k, v, dt * _rates(heads, device), beta


def eager_layer(geometry: LayerGeometry, rows: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """A layer's state in float32 and one token's inputs, contiguous, by the names that `eager` uses."""
    operands = replay_operands(geometry, rows, 1, dtype, device)
    tensors = {
        name: (operand if operand.ndim == 1 else operand[:, 0]).contiguous()
        for name, operand in zip(OPERANDS[geometry.kind], operands, strict=True)
    }
    outputs = torch.empty(rows, geometry.heads, geometry.head_dim, dtype=dtype, device=device)
    return {"state": random_state(geometry, rows, torch.float32, device), "y": outputs, **tensors}


def ring_capacity(window: int, tokens: int) -> int:
    """Slots of the ring that a cache of these settings allocates."""
    return ReplayConfig(window=window, max_draft=max(ReplayConfig().max_draft, tokens - 1)).capacity


def replay_layer(
    geometry: LayerGeometry,
    rows: int,
    tokens: int,
    *,
    capacity: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> ReplayLayer:
    """A layer with a random checkpoint and full rings of random records, whose ``d`` does not follow from the rest."""
    past = replay_operands(geometry, rows, capacity, dtype, device)
    # [B, T, heads, ...] -> [B, heads, R, ...]
    rings = [tensor.transpose(1, 2).contiguous() for tensor in past if tensor.ndim > 1]
    if geometry.kind == "mamba2":
        x, dt, B, _ = rings
        named = {"ring_x": x, "ring_b": B, "ring_dt": dt}
    else:
        _, k, v, g, beta = rings
        named = {"ring_k": k, "ring_v": v, "ring_g": g, "ring_beta": beta, "ring_d": v * 0.5}
    state = random_state(geometry, rows, state_dtype, device)
    return ReplayLayer(replay_operands(geometry, rows, tokens, dtype, device), {"state": state, **named})


def cursor(committed: torch.Tensor, folds: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """A cursor whose rows started their rings at different positions."""
    base = torch.randint(LARGEST_POSITION, committed.shape, device=committed.device)
    return {"base": base, "committed": committed, "pending": torch.zeros_like(committed), "folds": folds}


def spread_cursors(rows: int, window: int, device: torch.device) -> list[dict[str, torch.Tensor | None]]:
    """The steady state of single-token decoding with flushes spread over the rows, one cursor per phase."""
    cursors = []
    for phase in range(PHASES):
        committed = torch.remainder(torch.arange(rows, device=device) + phase, window) + 1
        cursors.append(cursor(committed, torch.where(committed == window, committed, 0)))
    return cursors


def plain_traffic(geometry: LayerGeometry, rows: int, tokens: int, live: int, state_itemsize: int) -> int:
    """Bytes of state and ring that a plain step reads and writes; activations take two bytes."""
    heads, groups, width, depth = geometry.heads, geometry.groups, geometry.head_dim, geometry.state_dim
    values, keys = 2 * heads * width, 2 * groups * depth
    read = values + keys + 4 * heads  # x, B, dt, or d, k, g
    written = read if geometry.kind == "mamba2" else read + values + 2 * heads  # v and beta as well
    return rows * (heads * width * depth * state_itemsize + live * read + tokens * written)
