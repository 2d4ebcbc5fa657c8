"""Random tensors of one layer's decode step, for the eager baseline and for the replay step."""

from dataclasses import dataclass, field
from typing import Any

import torch

from replay_transformers.config import ReplayConfig
from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.decay import is_forgotten
from replay_transformers.kernels.formats import FORMATS, Format, PlainFormat, StoredState
from replay_transformers.kernels.formats.stored import State
from replay_transformers.kernels.ring import gather_records, live_records, record_slots

from .precision_grid import Setting

TIME_STEPS = (1e-3, 1e-1)  # the shortest and the longest
FASTEST_RATE = 16.0
STATE_SCALE = 0.3
LARGEST_POSITION = 1_000_000
SEED = 5 << 32 | 11  # of stochastic rounding
FILLED_ROWS = 16  # at a time: encoding takes several tensors of the state's size
OPERANDS = {"mamba2": ("x", "dt", "B", "C", "A", "D"), "gated_delta": ("q", "k", "v", "g", "beta")}
PHASES = 16  # of the flush cycle over which layers rotate, so that even one row is measured in all of them

Tensors = dict[str, torch.Tensor]


@dataclass
class ReplayLayer:
    """One layer: operands by position, the rest by name; ``states`` has the checkpoint and the copy if there is one."""

    operands: tuple[torch.Tensor, ...]
    rings: Tensors
    states: dict[str, State]
    settings: dict[str, float] = field(default_factory=dict)

    @property
    def buffers(self) -> dict[str, Any]:
        """What a step changes."""
        return {**self.states, **self.rings}


def _step_sizes(shape: tuple[int, ...], device: torch.device, time_steps: tuple[float, float]) -> torch.Tensor:
    """Log-uniform time steps in float32."""
    low, high = (torch.tensor(step, device=device).log() for step in time_steps)
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


def random_stored(geometry: LayerGeometry, rows: int, name: str, device: torch.device) -> State:
    """A state of normal values in a format."""
    form = FORMATS[name]
    if isinstance(form, PlainFormat):
        return random_state(geometry, rows, form.dtype, device)
    parts = {
        part: torch.zeros(rows, geometry.heads, *shape, dtype=dtype, device=device)
        for part, (shape, dtype) in form.parts(geometry.head_dim, geometry.state_dim).items()
    }
    state = StoredState(form, parts, geometry.state_dim, geometry.kind == "gated_delta", SEED)
    for start in range(0, rows, FILLED_ROWS):
        few = state.with_parts({part: tensor[start : start + FILLED_ROWS] for part, tensor in parts.items()})
        count = min(FILLED_ROWS, rows - start)
        values = random_state(geometry, count, torch.float32, device)
        few.write(values, torch.zeros(count, dtype=torch.int64, device=device))
    return state


def replay_operands(
    geometry: LayerGeometry,
    rows: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    time_steps: tuple[float, float] = TIME_STEPS,
) -> tuple[torch.Tensor, ...]:
    """What the model hands to `replay_step`: views into the convolution's output, as in the mixers."""
    heads, groups, width, depth = geometry.heads, geometry.groups, geometry.head_dim, geometry.state_dim
    mixed = torch.randn(rows, tokens, geometry.conv_dim, device=device).to(dtype)
    dt = _step_sizes((rows, tokens, heads), device, time_steps)
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
    precision: Setting,
    device: torch.device,
    time_steps: tuple[float, float] = TIME_STEPS,
) -> ReplayLayer:
    """A layer with a random checkpoint and full rings of random records, whose ``d`` does not follow from the rest.

    A copy that steps read is of another state than the checkpoint, so that it shows which of the two is read.
    """
    past = replay_operands(geometry, rows, capacity, dtype, device, time_steps)
    # [B, T, heads, ...] -> [B, heads, R, ...]
    rings = [tensor.transpose(1, 2).contiguous() for tensor in past if tensor.ndim > 1]
    if geometry.kind == "mamba2":
        x, dt, B, _ = rings
        named = {"ring_x": x, "ring_b": B, "ring_dt": dt}
    else:
        _, k, v, g, beta = rings
        named = {"ring_k": k, "ring_v": v, "ring_g": g, "ring_beta": beta, "ring_d": v * 0.5}
    formats = {"state": precision.checkpoint, "readout": precision.readout}
    states = {key: random_stored(geometry, rows, name, device) for key, name in formats.items() if name}
    operands = replay_operands(geometry, rows, tokens, dtype, device, time_steps)
    settings = {"decay_skip": precision.decay_skip} if precision.decay_skip else {}
    return ReplayLayer(operands, named, states, settings)


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


def skipped_share(layer: ReplayLayer, cursor: dict[str, Any]) -> float:
    """Share of (row, head) whose state a step without a fold does not read."""
    threshold = layer.settings.get("decay_skip")
    if threshold is None:
        return 0.0
    is_mamba2 = "ring_dt" in layer.rings
    ring, new = (layer.rings["ring_dt"], layer.operands[1]) if is_mamba2 else (layer.rings["ring_g"], layer.operands[3])
    live_count, capacity = cursor["committed"] + cursor["pending"], ring.shape[2]
    live = live_records(torch.zeros_like(live_count), live_count, capacity)
    past = gather_records(ring, record_slots(cursor["base"], capacity, capacity), live, dim=2)
    logs = past.float().sum(-1) + new[:, 0].float()
    if is_mamba2:
        logs = logs * layer.operands[4]
    return float(is_forgotten(logs, threshold).float().mean())


def plain_bytes(geometry: LayerGeometry, rows: int, tokens: int, live: int, form: Format) -> tuple[int, int]:
    """Bytes of state and records that a plain step reads, and bytes that it writes; activations take two bytes."""
    heads, groups, width, depth = geometry.heads, geometry.groups, geometry.head_dim, geometry.state_dim
    values, keys = 2 * heads * width, 2 * groups * depth
    read = values + keys + 4 * heads  # x, B, dt, or d, k, g
    written = read if geometry.kind == "mamba2" else read + values + 2 * heads  # v and beta as well
    return rows * (heads * form.head_bytes(width, depth) + live * read), rows * tokens * written
