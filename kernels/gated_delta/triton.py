"""Triton kernels of the Gated DeltaNet replay step.

Two launches per layer and step, and a third where rows may be due. With the records ``j`` and the step's own tokens
``s``,

    d_t = beta_t (v_t - gain_kt (S0^T k_t) - sum_j w_tj d_j - sum_{s < t} w_ts d_s)
    y_t = gain_qt (S0^T q_t) + sum_j u_tj d_j + sum_{s <= t} u_ts d_s

- ``gated_delta_prepare``, one program per row and value heads of one key head, reduces what the heads share (keys,
  queries, decays) to the gains, which take in the norms of ``k`` and ``q``, and the coefficients ``w`` and ``u``,
  appends the new keys, decays and rates.
- ``gated_delta_step``, one program per row, value head and block of the head's channels, streams its block of the
  checkpoint through registers or shared memory (`read`), combines the answers with those of the records and appends
  ``v`` and ``d``. It only reads the checkpoint: also in rows that are due, where the same formula holds before the
  fold. Some more programs meanwhile solve for what the fold of those rows needs (`fold.solve`), of several tokens
  ``gated_delta_prepare`` does.
- ``gated_delta_fold`` then folds the records of the rows that are due, from the inputs alone. In a launch of its own,
  since the step streams with many registers and few programs, while a fold waits long and wants many programs; few
  rows are due at a time, and inside the step they would hold up the programs that wait behind them.

A state in a format of more than a dtype, or beside a copy that is read, has kernels of its own for the last two
(`stored`). Its rows that are due are folded before they are read, so that what is read of them is what was just stored;
``gated_delta_prepare`` solves for them.

Where the GPU can do so (`overlap`), the step begins while ``gated_delta_prepare`` ends, and reads the checkpoint, and
``gated_delta_fold`` while the step ends.

Everything is computed in float32; products on matrix units are exact where one side is bfloat16, else of three products
of tf32 each. One token is answered without them, since its step is bound by memory.
"""

import functools
from collections.abc import Callable

import torch
import triton

from replay_transformers.kernels.folds import LIST, FoldLaunch
from replay_transformers.kernels.formats.plain import PlainFormat
from replay_transformers.kernels.formats.precision import (
    NARROW_BLOCK,
    NARROW_STAGES,
    NARROW_WARPS,
    Precision,
    parts_of,
    pointers,
    state_operands,
    tiles_per_program,
)
from replay_transformers.kernels.formats.stored import State, StoredState
from replay_transformers.kernels.gated_delta.fold import SOLUTION, gated_delta_fold
from replay_transformers.kernels.gated_delta.step import gated_delta_prepare, gated_delta_step
from replay_transformers.kernels.gated_delta.stored import gated_delta_stored_fold, gated_delta_stored_step
from replay_transformers.kernels.gated_delta.update import update
from replay_transformers.kernels.launch import choose, on_their_device
from replay_transformers.kernels.overlap import overlapping
from replay_transformers.kernels.parts import run_in_parts
from replay_transformers.kernels.tiles import LEAST_DEPTH, MIN_RECORDS
from replay_transformers.kernels.validation import (
    POINTERS,
    check_groups,
    check_operands,
    heads_per_program,
    power_of_two,
)

__all__ = ["replay_step", "update"]

LEAST_CHANNELS = 16  # of products on matrix units
DEPTH = 256  # bytes of the state that a thread has under way, where there is one token
CHUNK, STAGES = 16, 3  # rows of the state per matrix product, and how many products are under way
SOLVERS = 528  # programs beside those of a step that solve for what folds need
FOLD_PART = 64  # states per matrix product of a fold
# folds: of a plain state; of stored states tile by tile; where a format needs all of a head; where only the copy's does
PLAIN = FoldLaunch(block=64, warps=4, stages=1, programs=2112)
TILES = FoldLaunch(block=16, warps=1, stages=2, programs=1056)
HEADS = FoldLaunch(block=128, warps=8, stages=1, programs=264, whole=True)
COPIES = FoldLaunch(block=16, warps=1, stages=3, programs=528, whole=True)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    checkpoint: list[torch.Tensor],
    readout: list[torch.Tensor],
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
    precision: Precision | None,
) -> torch.Tensor:
    rows, tokens, key_heads, states = q.shape
    heads, width = v.shape[2:]
    group, fold, device = heads // key_heads, folds is not None, q.device
    block_r, block_t = power_of_two(max(max_records, MIN_RECORDS)), power_of_two(tokens)
    chosen = choose("gated_delta", device, rows * heads, tokens, width, states)
    share, block_v = heads_per_program(chosen.share, group), min(chosen.block, power_of_two(width))
    block_v, block_k = max(block_v, LEAST_CHANNELS), max(power_of_two(states), LEAST_DEPTH)
    skips = precision is not None and precision.decay_skip > 0
    folds_first, folds_last = fold and precision is not None, fold and precision is None
    early = {} if folds_first else overlapping(device)
    leads = bool(early) and folds_last
    # many tokens take the registers that the solvers would need
    solvers = min(SOLVERS, rows * heads) if folds_last and tokens == 1 else 0

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    cursor = torch.empty(rows, 3, dtype=torch.int32, device=device)
    coefficient, own = scratch(rows, heads, tokens, 2, block_r), scratch(rows, heads, tokens, 2, block_t)
    gain = scratch(rows, heads, 2, tokens)
    solution = scratch(rows, heads, block_r // MIN_RECORDS, SOLUTION.value) if fold else scratch(1)
    y = torch.empty(rows, tokens, heads, width, dtype=q.dtype, device=device)
    sizes = {
        "HEADS": heads, "GROUP": group, "STATES": states, "CAPACITY": ring_k.shape[2], "BLOCK_K": block_k,
        "BLOCK_R": block_r,
    }  # fmt: skip
    gated_delta_prepare[(rows * (heads // share),)](
        q, k, g, beta, ring_k, ring_g, ring_beta, base, committed, pending, folds,
        cursor, coefficient, own, gain, solution,
        *q.stride(), *k.stride(), *g.stride(), *beta.stride(), states**-0.5,
        precision.least_log if precision is not None else 0.0,
        SHARE=share, TOKENS=tokens, BLOCK_T=block_t, FOLD=fold, FOLD_FIRST=folds_first,
        SOLVES=fold and not solvers, SKIP=skips, OVERLAPS=bool(early), **sizes, num_warps=chosen.share_warps,
    )  # fmt: skip
    source = readout or checkpoint
    how = PLAIN
    if precision is not None:
        how = COPIES if precision.copies_heads else HEADS if precision.needs_heads else TILES
    fold_v, fold_grid = how.tile(width, LEAST_CHANNELS), how.grid(rows, heads, width, LEAST_CHANNELS)
    fold_warps = min(how.warps, fold_v // LEAST_CHANNELS)
    fold_sizes = {"WIDTH": width, "BLOCK_V": fold_v, "STAGES": how.stages, "LIST": LIST}
    if fold and precision is not None:
        written = [form.kernels() for form in precision.written]
        transposed = [isinstance(form, PlainFormat) for form in precision.written]
        gated_delta_stored_fold[fold_grid](
            *pointers(checkpoint), *pointers(source), ring_k, ring_v, solution, cursor, base, folds, rows,
            precision.key, LOAD=written[0].load, STORE=written[0].store, STORE_COPY=written[-1].store,
            HAS_COPY=bool(readout), TRANSPOSED=transposed[0], COPY_TRANSPOSED=transposed[-1],
            TILES=how.tiles(width, LEAST_CHANNELS), TWICE=precision.copies_heads, SKIP=skips, WARPS=fold_warps,
            **fold_sizes, **sizes, num_warps=fold_warps,
        )  # fmt: skip
    operands = (
        q, k, v, beta, ring_v, ring_d, coefficient, own, gain, cursor, y,
        *q.stride(), *k.stride(), *v.stride(), *beta.stride(),
    )  # fmt: skip
    step_sizes = {"WIDTH": width, "TOKENS": tokens, "BLOCK_T": block_t, "SKIP": skips, "OVERLAPS": bool(early)}
    if precision is None or precision.is_read_plainly:
        under_way = max(1, min(block_k, chosen.warps * 32 * DEPTH // (source[0].itemsize * block_v)))
        gated_delta_step[(solvers + rows * heads * triton.cdiv(width, block_v),)](
            source[0], *operands, ring_k, ring_g, ring_beta, solution, folds, rows, BLOCK_V=block_v,
            AGES=MIN_RECORDS, ROWS=under_way, CHUNK=min(CHUNK, block_k), STAGES=STAGES, FOLD_FIRST=folds_first,
            SOLVERS=solvers, LIST=LIST, LEADS=leads, **step_sizes, **sizes, num_warps=chosen.warps, **early,
        )  # fmt: skip
    else:
        form = precision.read.kernels()
        tiles = tiles_per_program(rows * heads, width)
        gated_delta_stored_step[(rows * heads * triton.cdiv(width, NARROW_BLOCK * tiles),)](
            *pointers(source), *operands, OPENED=form.opened, VECTORS=form.vectors, PRODUCTS=form.products,
            BLOCK_V=NARROW_BLOCK, TILES=tiles, STAGES=NARROW_STAGES, **step_sizes, **sizes,
            num_warps=NARROW_WARPS, **early,
        )  # fmt: skip
    if folds_last:
        gated_delta_fold[fold_grid](
            checkpoint[0], ring_k, ring_v, solution, cursor, folds, rows, PART=min(FOLD_PART, block_k),
            OVERLAPS=leads, **fold_sizes, **sizes, num_warps=fold_warps, **early,
        )  # fmt: skip
    return y


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
    rings, cursor = (ring_k, ring_v, ring_g, ring_beta, ring_d), (base, committed, pending)
    return _run(q, k, v, g, beta, [state], [], *rings, *cursor, folds, max_records, None)


@on_their_device
def _launch_stored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    checkpoint: list[torch.Tensor],
    readout: list[torch.Tensor],
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
    checkpoint_format: str,
    readout_format: str,
    key: int,
    decay_skip: float,
) -> torch.Tensor:
    rings, cursor = (ring_k, ring_v, ring_g, ring_beta, ring_d), (base, committed, pending)
    precision = Precision(checkpoint_format, readout_format, key, decay_skip)
    return _run(q, k, v, g, beta, checkpoint, readout, *rings, *cursor, folds, max_records, precision)


RINGS = ("ring_k", "ring_v", "ring_g", "ring_beta", "ring_d")
_operator = torch.library.custom_op("replay_transformers::gated_delta_step", _launch, mutates_args=("state", *RINGS))
_stored_operator = torch.library.custom_op(
    "replay_transformers::gated_delta_stored_step", _launch_stored, mutates_args=("checkpoint", "readout", *RINGS)
)


@_operator.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: object) -> torch.Tensor:
    return q.new_empty(v.shape)


@_stored_operator.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *operands: object) -> torch.Tensor:
    return q.new_empty(v.shape)


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
    """The same as `replay_transformers.kernels.gated_delta.reference.replay_step`, on a GPU.

    Tensors may be float32, bfloat16 or float16; states, the rings and tensors of one dimension must be contiguous, the
    others may have any strides. Without gradients. Inside compiled graphs it is the operator
    ``replay_transformers::gated_delta_step``, or ``gated_delta_stored_step`` for a state that is not one tensor of
    floats.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit; nothing is changed then.
    """
    rows, tokens, key_heads, states = q.shape
    heads, width = v.shape[2:]
    capacity = ring_k.shape[2]
    rings = {"ring_k": ring_k, "ring_v": ring_v, "ring_g": ring_g, "ring_beta": ring_beta, "ring_d": ring_d}
    is_plain = isinstance(state, torch.Tensor) and readout is None and not decay_skip
    if not torch.compiler.is_compiling():
        check_groups(heads, key_heads)
        expected = {
            "q": (q, (rows, tokens, key_heads, states)), "k": (k, (rows, tokens, key_heads, states)),
            "v": (v, (rows, tokens, heads, width)), "g": (g, (rows, tokens, heads)),
            "beta": (beta, (rows, tokens, heads)),
            "ring_k": (ring_k, (rows, key_heads, capacity, states)), "ring_v": (ring_v, (rows, heads, capacity, width)),
            "ring_g": (ring_g, (rows, heads, capacity)), "ring_beta": (ring_beta, (rows, heads, capacity)),
            "ring_d": (ring_d, (rows, heads, capacity, width)),
            "base": (base, (rows,)), "committed": (committed, (rows,)), "pending": (pending, (rows,)),
        }  # fmt: skip
        if folds is not None:
            expected["folds"] = (folds, (rows,))
        held = state_operands((rows, heads, states, width), True, state=state, readout=readout)
        check_operands(expected | held.shapes, (*RINGS, *held.shapes), POINTERS, held.dtypes)
    cursor, tokens_of = (base, committed, pending, folds), (q, k, v, g, beta)
    run: Callable[..., torch.Tensor]
    if is_plain:
        run = _operator if torch.compiler.is_compiling() else _launch
        return run_in_parts(run, tokens_of, (state, *rings.values()), cursor, capacity, max_records)
    (form, parts), (copy_form, copy_parts) = parts_of(state), parts_of(readout)
    run = functools.partial(
        _stored_operator if torch.compiler.is_compiling() else _launch_stored,
        checkpoint_format=form,
        readout_format=copy_form,
        key=state.key if isinstance(state, StoredState) else 0,
        decay_skip=float(decay_skip),
    )
    return run_in_parts(run, tokens_of, (parts, copy_parts, *rings.values()), cursor, capacity, max_records)
