"""Plain PyTorch reference of the Mamba-2 replay step, its fold, and the scan over a prompt.

The recurrence, per head with state ``S`` of shape ``[P, N]`` (Dao & Gu 2024, "Transformers are SSMs", section 6):

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t (x) B_t,        y_t = S_t C_t + D x_t

Unrolled from a checkpoint ``S0`` over the records ``j = 1 .. t``, with ``c_j = A * (dt_1 + ... + dt_j)``:

    y_t = exp(c_t) S0 C_t + sum_{j <= t} exp(c_t - c_j) dt_j (B_j . C_t) x_j + D x_t

Shapes: ``B`` rows, ``T`` tokens in this forward, ``H`` heads of dimension ``P``, ``G`` groups of heads that share ``B``
and ``C``, ``N`` state dimension, ``R`` ring slots. Everything is computed in float32, or float64 for float64 inputs.
"""

import torch

from replay_transformers.kernels.decay import at_least_float32, is_forgotten, segment_sums, suffix_sums
from replay_transformers.kernels.formats.stored import State, readable, refresh, store_rows
from replay_transformers.kernels.heads import by_group, heads_first, read_state, scale_scores
from replay_transformers.kernels.ring import gather_records, live_records, record_slots, write_records
from replay_transformers.kernels.saturate import store

__all__ = ["fold", "folded_state", "replay_step", "scan", "update"]


def _weighted_sum(weights: torch.Tensor, scores: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``sum_j weights[h, t, j] * scores[g, t, j] * x[h, j]``: ``[B, H, T, P]``."""
    return scale_scores(weights, scores) @ x


def _next_state(
    state: State, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, decay_skip: float = 0.0
) -> torch.Tensor:
    """The state after ``n`` tokens: x ``[B, H, n, P]``, B ``[B, G, n, N]``, dt ``[B, H, n]`` -> ``[B, H, P, N]``."""
    after, total = suffix_sums(dt * A[:, None])
    weighted = x * (after.exp() * dt)[..., None]
    update = by_group(weighted, B.shape[1]).transpose(-1, -2) @ B[:, :, None]
    before = readable(state, x.dtype)
    if decay_skip:
        before = before.masked_fill(is_forgotten(total, decay_skip)[..., None, None], 0)
    return before * total.exp()[..., None, None] + update.flatten(1, 2)


def _block(
    state: State,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    before: torch.Tensor | None = None,
    decay_skip: float = 0.0,
) -> torch.Tensor:
    """Output of one block of tokens on top of ``state``; ``before`` (``[B, H]``) is the log-decay since ``state``."""
    logs = dt * A[:, None]
    decay = logs.cumsum(-1) if before is None else logs.cumsum(-1) + before[..., None]
    carried = read_state(readable(state, x.dtype), C) * decay.exp()[..., None]
    if decay_skip:
        carried = carried.masked_fill(is_forgotten(decay[..., 0], decay_skip)[..., None, None], 0)
    weights = segment_sums(logs).exp() * dt[..., None, :]
    return carried + _weighted_sum(weights, C @ B.transpose(-1, -2), x)


def _finish(output: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None) -> torch.Tensor:
    """Add the skip connection and return to ``[B, T, H, P]`` in the dtype of ``x``."""
    output = output.transpose(1, 2)
    if D is not None:
        output = output + x.to(output.dtype) * D.to(output.dtype)[:, None]
    return output.to(x.dtype)


def _records(
    rings: tuple[torch.Tensor, torch.Tensor, torch.Tensor], base: torch.Tensor, live: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The ring's x, B and dt by age, dead ones as zero; ``live`` is bool ``[B, ages]``."""
    slots = record_slots(base, live.shape[1], rings[0].shape[2])
    return [gather_records(ring, slots, live, dim=2).to(dtype) for ring in rings]


def folded_state(
    state: State,
    ring_x: torch.Tensor,
    ring_b: torch.Tensor,
    ring_dt: torch.Tensor,
    A: torch.Tensor,
    *,
    base: torch.Tensor,
    count: torch.Tensor,
    decay_skip: float = 0.0,
) -> torch.Tensor:
    """The state after the ``count`` oldest records of each row. Nothing is mutated.

    Args:
        state: ``[B, H, P, N]``, the checkpoint, in any format.
        ring_x: ``[B, H, R, P]``; ring_b: ``[B, G, R, N]``; ring_dt: ``[B, H, R]``.
        A: ``[H]``, negative.
        base: int64 ``[B]``, absolute position of the row's oldest record.
        count: int64 ``[B]``, between 0 and ``R``.
        decay_skip: states that these records scale by less than this are left out.

    Returns:
        ``[B, H, P, N]`` in float32 (float64 if the records are). Rows with ``count == 0`` equal ``state``
        in value.
    """
    compute = at_least_float32(ring_x.dtype)
    live = live_records(torch.zeros_like(count), count, ring_x.shape[2])
    x, B, dt = _records((ring_x, ring_b, ring_dt), base, live, compute)
    return _next_state(state, x, B, dt, A.to(compute), decay_skip)


def fold(
    state: State,
    ring_x: torch.Tensor,
    ring_b: torch.Tensor,
    ring_dt: torch.Tensor,
    A: torch.Tensor,
    *,
    base: torch.Tensor,
    count: torch.Tensor,
    readout: State | None = None,
    decay_skip: float = 0.0,
) -> None:
    """Fold the ``count`` oldest records of each row into ``state``, **in place** (arguments as in `folded_state`).

    The checkpoint is written once, in its own format, and so is ``readout``, the copy of it that steps read. Rows with
    ``count == 0`` keep their bytes.
    """
    with torch.no_grad():
        folded = folded_state(state, ring_x, ring_b, ring_dt, A, base=base, count=count, decay_skip=decay_skip)
        store_rows(state, folded, count > 0, base + count)
        refresh(readout, state, base + count, count > 0)


def replay_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    *,
    state: State,
    ring_x: torch.Tensor,
    ring_b: torch.Tensor,
    ring_dt: torch.Tensor,
    base: torch.Tensor,
    committed: torch.Tensor,
    pending: torch.Tensor,
    folds: torch.Tensor | None,
    max_records: int | None = None,
    readout: State | None = None,
    decay_skip: float = 0.0,
) -> torch.Tensor:
    """One forward of ``T`` tokens per row: flush the rows that are due, read out, append the new records.

    ``folds`` says how many of a row's oldest records are folded into ``state`` first: all that are committed if the row
    is due, else none; pending ones stay in their slots. The cursor (``base``, ``committed``, ``pending``) is read and
    not advanced: it is shared by the layers of a forward, and so is ``folds``, which it decides once for all of them.

    Args:
        x: ``[B, T, H, P]`` in the activation dtype, after convolution and activation.
        dt: ``[B, T, H]`` in float32, after bias, softplus and clamp.
        B, C: ``[B, T, G, N]``.
        A: ``[H]``, negative. D: ``[H]`` or None.
        state: ``[B, H, P, N]``, the checkpoint, **mutated** only in rows that are due.
        ring_x: ``[B, H, R, P]``, ring_b: ``[B, G, R, N]``, ring_dt: ``[B, H, R]``, **mutated**: T slots per row.
        base, committed, pending: int64 ``[B]``. ``R >= committed + pending + T`` in every row.
        folds: int64 ``[B]``, records to fold: ``committed`` in a row that is due, else 0. None promises that no row is
            due, and skips the fold.
        max_records: promises that no row holds more records before the step; fewer slots are looked at then. None:
            as many as the ring has room for.
        readout: a copy of the checkpoint in a narrower format, read instead of it and **mutated** in rows that are due.
        decay_skip: heads whose state the records and the first new token scale by less than this do not read it, and
            those whose state the folded records scale by less forget it.

    Returns:
        ``[B, T, H, P]`` in the dtype of ``x``.
    """
    tokens, capacity = x.shape[1], ring_x.shape[2]
    compute = at_least_float32(x.dtype)
    live_count = committed + pending
    if folds is not None:
        rings = ring_x, ring_b, ring_dt
        fold(state, *rings, A, base=base, count=folds, readout=readout, decay_skip=decay_skip)
    ages = capacity if max_records is None else min(max_records, capacity)
    live = live_records(torch.zeros_like(committed) if folds is None else folds, live_count, ages)

    past_x, past_B, past_dt = _records((ring_x, ring_b, ring_dt), base, live, compute)
    x_t, B_t, C_t, dt_t = heads_first(x, B, C, dt, dtype=compute)
    rate = A.to(compute)

    after, total = suffix_sums(past_dt * rate[:, None])
    source = state if readout is None else readout
    output = _block(source, x_t, B_t, C_t, dt_t, rate, before=total, decay_skip=decay_skip)
    since = (dt_t * rate[:, None]).cumsum(-1)
    weights = (since[..., :, None] + after[..., None, :]).exp() * past_dt[..., None, :]
    output = output + _weighted_sum(weights, C_t @ past_B.transpose(-1, -2), past_x)

    slots = record_slots(base + live_count, tokens, capacity)
    write_records(ring_x, slots, x.transpose(1, 2), dim=2)
    write_records(ring_b, slots, B.transpose(1, 2), dim=2)
    write_records(ring_dt, slots, dt.transpose(1, 2), dim=2)
    return _finish(output, x, D)


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    *,
    state: torch.Tensor,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state of a sequence of any length, chunk by chunk; nothing is mutated.

    Args:
        x, dt, B, C, A, D: as in `replay_step`, any ``T >= 1``.
        state: ``[B, H, P, N]``, the state before the first token.
        chunk_size: tokens per chunk; the result does not depend on it beyond rounding.

    Returns:
        ``(y, state)``: ``[B, T, H, P]`` in the dtype of ``x``, and ``[B, H, P, N]`` in float32 (or float64).
    """
    compute = at_least_float32(x.dtype)
    x_t, B_t, C_t, dt_t = heads_first(x, B, C, dt, dtype=compute)
    rate = A.to(compute)
    state = readable(state, compute)
    outputs = []
    for start in range(0, x.shape[1], chunk_size):
        part = slice(start, start + chunk_size)
        block = (x_t[:, :, part], B_t[:, :, part])
        outputs.append(_block(state, *block, C_t[:, :, part], dt_t[:, :, part], rate))
        state = _next_state(state, *block, dt_t[:, :, part], rate)
    return _finish(torch.cat(outputs, dim=2), x, D), state


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
    """The recurrence over ``T`` tokens, eagerly: as `scan`, but ``state`` (any float dtype) is **mutated**.

    Returns:
        ``[B, T, H, P]`` in the dtype of ``x``.
    """
    output, after = scan(x, dt, B, C, A, D, state=state)
    store(state, after)
    return output
