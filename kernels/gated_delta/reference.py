"""Plain PyTorch reference of the Gated DeltaNet replay step, its fold, and the scan over a prompt.

The recurrence, per value head (Yang et al. 2024, "Gated Delta Networks"), with ``S`` of shape ``[K, V]`` as in
transformers:

    d_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t),   S_t = exp(g_t) S_{t-1} + k_t (x) d_t,   y_t = S_t^T q_t

``k`` and ``q`` are L2-normalised per head and ``q`` is scaled by ``K^-0.5``. Unrolled from a checkpoint ``S0`` with
``G_j = g_1 + ... + g_j``:

    d_t = beta_t (v_t - exp(G_t) S0^T k_t - sum_{j < t} exp(G_t - G_j) (k_j . k_t) d_j)
    y_t = exp(G_t) S0^T q_t + sum_{j <= t} exp(G_t - G_j) (k_j . q_t) d_j

The ``d`` of a block solve a unit lower-triangular system. Records keep the *inputs* (``k`` and ``v`` after the
convolution and before normalisation); a fold solves for ``d`` anew against the checkpoint. The ring also keeps each
token's ``d``, solved against the state that was read, which makes plain steps cheap; no fold ever uses it.

Shapes: ``B`` rows, ``T`` tokens in this forward, ``Hk`` key heads of dimension ``K``, ``Hv`` value heads of dimension
``V`` (each key head serves ``Hv / Hk`` consecutive value heads), ``R`` ring slots. Everything is computed in float32,
or float64 for float64 inputs.
"""

import torch

from replay_transformers.kernels.decay import at_least_float32, is_forgotten, segment_sums, suffix_sums
from replay_transformers.kernels.formats.stored import State, readable, refresh, store_rows
from replay_transformers.kernels.heads import by_group, heads_first, scale_scores
from replay_transformers.kernels.ring import gather_records, live_records, record_slots, write_records
from replay_transformers.kernels.saturate import store

__all__ = ["fold", "folded_state", "l2_normalise", "replay_step", "scan", "update"]

NORM_EPSILON = 1e-6  # inside the square root, as in transformers and flash-linear-attention


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def _read_state(state: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """States ``[B, Hv, K, V]`` times their key heads' vectors ``[B, Hk, n, K]`` -> ``[B, Hv, n, V]``."""
    return (vectors[:, :, None] @ by_group(state, vectors.shape[1])).flatten(1, 2)


def _solve_deltas(decay: torch.Tensor, keys: torch.Tensor, beta: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The corrections ``d`` of a block.

    Solves ``d_t + beta_t sum_{j < t} decay[t, j] (k_j . k_t) d_j = beta_t residual_t`` by forward substitution.

    Args:
        decay: ``[B, Hv, n, n]``; keys: ``[B, Hk, n, K]`` normalised; beta: ``[B, Hv, n]``; residual: ``[B, Hv, n, V]``.

    Returns:
        ``[B, Hv, n, V]``.
    """
    system = scale_scores(decay * beta[..., None], keys @ keys.transpose(-1, -2)).tril(-1)
    return torch.linalg.solve_triangular(system, beta[..., None] * residual, upper=False, unitriangular=True)


def _next_state(state: torch.Tensor, deltas: torch.Tensor, keys: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """The state after ``n`` tokens: deltas ``[B, Hv, n, V]``, keys ``[B, Hk, n, K]``, logs ``[B, Hv, n]``."""
    after, total = suffix_sums(logs)
    weighted = deltas * after.exp()[..., None]
    update = keys[:, :, None].transpose(-1, -2) @ by_group(weighted, keys.shape[1])
    return state * total.exp()[..., None, None] + update.flatten(1, 2)


def _block_deltas(
    state: torch.Tensor, keys: torch.Tensor, v: torch.Tensor, logs: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """``d`` of a block of tokens directly on top of ``state`` (all heads first, compute dtype)."""
    predicted = _read_state(state, keys) * logs.cumsum(-1).exp()[..., None]
    return _solve_deltas(segment_sums(logs).exp(), keys, beta, v - predicted)


def folded_state(
    state: State,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    *,
    base: torch.Tensor,
    count: torch.Tensor,
    decay_skip: float = 0.0,
) -> torch.Tensor:
    """The state after the ``count`` oldest records of each row. Nothing is mutated.

    Args:
        state: ``[B, Hv, K, V]``, the checkpoint, in any format.
        ring_k: ``[B, Hk, R, K]``; ring_v: ``[B, Hv, R, V]``; ring_g, ring_beta: ``[B, Hv, R]``.
        base: int64 ``[B]``, absolute position of the row's oldest record.
        count: int64 ``[B]``, between 0 and ``R``.
        decay_skip: states that these records scale by less than this are left out.

    Returns:
        ``[B, Hv, K, V]`` in float32 (float64 if the records are). Rows with ``count == 0`` equal ``state``
        in value.
    """
    compute = at_least_float32(ring_k.dtype)
    capacity = ring_k.shape[2]
    live = live_records(torch.zeros_like(count), count, capacity)
    slots = record_slots(base, capacity, capacity)
    k, v, logs, beta = (
        gather_records(ring, slots, live, dim=2).to(compute) for ring in (ring_k, ring_v, ring_g, ring_beta)
    )
    keys, start = l2_normalise(k), readable(state, compute)
    if decay_skip:
        start = start.masked_fill(is_forgotten(suffix_sums(logs)[1], decay_skip)[..., None, None], 0)
    return _next_state(start, _block_deltas(start, keys, v, logs, beta), keys, logs)


def fold(
    state: State,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
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
        rings = ring_k, ring_v, ring_g, ring_beta
        folded = folded_state(state, *rings, base=base, count=count, decay_skip=decay_skip)
        store_rows(state, folded, count > 0, base + count)
        refresh(readout, state, base + count, count > 0)


def replay_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: State,
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
    readout: State | None = None,
    decay_skip: float = 0.0,
) -> torch.Tensor:
    """One forward of ``T`` tokens per row: flush the rows that are due, read out, append the new records.

    ``folds`` says how many of a row's oldest records are folded into ``state`` first: all that are committed if the row
    is due, else none; pending ones stay in their slots. The cursor (``base``, ``committed``, ``pending``) is read and
    not advanced: it is shared by the layers of a forward, and so is ``folds``, which it decides once for all of them.

    Args:
        q, k: ``[B, T, Hk, K]`` in the activation dtype, after the convolution and before normalisation.
        v: ``[B, T, Hv, V]``.
        g: ``[B, T, Hv]`` in float32, the log-decay (``<= 0``). beta: ``[B, T, Hv]``.
        state: ``[B, Hv, K, V]``, the checkpoint, **mutated** only in rows that are due.
        ring_k: ``[B, Hk, R, K]``, ring_v, ring_d: ``[B, Hv, R, V]``, ring_g,
            ring_beta: ``[B, Hv, R]``, **mutated**: T slots per row.
        base, committed, pending: int64 ``[B]``. ``R >= committed + pending + T`` in every row.
        folds: int64 ``[B]``, records to fold: ``committed`` in a row that is due, else 0. None promises that no row is
            due, and skips the fold.
        max_records: promises that no row holds more records before the step; fewer slots are looked at then. None:
            as many as the ring has room for.
        readout: a copy of the checkpoint in a narrower format, read instead of it and **mutated** in rows that are due.
        decay_skip: heads whose state the records and the first new token scale by less than this do not read it, and
            those whose state the folded records scale by less forget it.

    Returns:
        ``[B, T, Hv, V]`` in the dtype of ``q``.
    """
    tokens, capacity = q.shape[1], ring_k.shape[2]
    compute = at_least_float32(q.dtype)
    live_count = committed + pending
    if folds is not None:
        rings = ring_k, ring_v, ring_g, ring_beta
        fold(state, *rings, base=base, count=folds, readout=readout, decay_skip=decay_skip)
    ages = capacity if max_records is None else min(max_records, capacity)
    live = live_records(torch.zeros_like(committed) if folds is None else folds, live_count, ages)

    slots = record_slots(base, ages, capacity)
    past_k, past_logs, past_d = (gather_records(r, slots, live, dim=2).to(compute) for r in (ring_k, ring_g, ring_d))
    past_keys = l2_normalise(past_k)
    queries, keys, values, logs, gain = heads_first(q, k, v, g, beta, dtype=compute)
    keys = l2_normalise(keys)
    queries = l2_normalise(queries) * queries.shape[-1] ** -0.5

    # what the checkpoint and the past records answer to each new key and query: one read of the state for both
    vectors = torch.cat([keys, queries], dim=2)
    after, total = suffix_sums(past_logs)
    since = logs.cumsum(-1)
    since = torch.cat([since, since], dim=-1)
    source = readable(state if readout is None else readout, compute)
    answers = _read_state(source, vectors) * (total[..., None] + since).exp()[..., None]
    if decay_skip:
        answers = answers.masked_fill(is_forgotten(total + since[..., 0], decay_skip)[..., None, None], 0)
    past_weights = (since[..., :, None] + after[..., None, :]).exp()
    answers = answers + scale_scores(past_weights, vectors @ past_keys.transpose(-1, -2)) @ past_d

    decay = segment_sums(logs).exp()
    deltas = _solve_deltas(decay, keys, gain, values - answers[:, :, :tokens])
    output = answers[:, :, tokens:] + scale_scores(decay, queries @ keys.transpose(-1, -2)) @ deltas

    new_slots = record_slots(base + live_count, tokens, capacity)
    for ring, record in ((ring_k, k), (ring_v, v), (ring_g, g), (ring_beta, beta)):
        write_records(ring, new_slots, record.transpose(1, 2), dim=2)
    write_records(ring_d, new_slots, deltas, dim=2)
    return output.transpose(1, 2).to(q.dtype)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state of a sequence of any length, chunk by chunk; nothing is mutated.

    Args:
        q, k, v, g, beta: as in `replay_step`, any ``T >= 1``.
        state: ``[B, Hv, K, V]``, the state before the first token.
        chunk_size: tokens per chunk; the result does not depend on it beyond rounding.

    Returns:
        ``(y, state)``: ``[B, T, Hv, V]`` in the dtype of ``q``, and ``[B, Hv, K, V]`` in float32 (or float64).
    """
    compute = at_least_float32(q.dtype)
    queries, keys, values, logs, gain = heads_first(q, k, v, g, beta, dtype=compute)
    keys = l2_normalise(keys)
    queries = l2_normalise(queries) * queries.shape[-1] ** -0.5
    state = readable(state, compute)
    outputs = []
    for start in range(0, q.shape[1], chunk_size):
        part = slice(start, start + chunk_size)
        keys_c, queries_c, logs_c = keys[:, :, part], queries[:, :, part], logs[:, :, part]
        deltas = _block_deltas(state, keys_c, values[:, :, part], logs_c, gain[:, :, part])
        carried = _read_state(state, queries_c) * logs_c.cumsum(-1).exp()[..., None]
        scores = scale_scores(segment_sums(logs_c).exp(), queries_c @ keys_c.transpose(-1, -2))
        outputs.append(carried + scores @ deltas)
        state = _next_state(state, deltas, keys_c, logs_c)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(q.dtype), state


def update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
) -> torch.Tensor:
    """The recurrence over ``T`` tokens, eagerly: as `scan`, but ``state`` (any float dtype) is **mutated**.

    Returns:
        ``[B, T, Hv, V]`` in the dtype of ``q``.
    """
    output, after = scan(q, k, v, g, beta, state=state)
    store(state, after)
    return output
