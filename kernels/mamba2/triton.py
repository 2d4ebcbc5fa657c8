"""Triton kernels of the Mamba-2 replay step.

Two launches per layer and step, kernels in `step`. With the records ``j`` and the step's own tokens ``s``,

    y_t = carry_t (S0 C_t) + sum_j w_tj x_j + sum_{s <= t} w_ts x_s + D x_t

- ``mamba2_prepare``, one program per row and heads of one group, reduces what the heads share (B, C, time steps) to
  ``carry`` and the coefficients ``w``, and appends B and the time steps of the new records. It does not touch the
  state.
- ``mamba2_step``, one program per row, head and block of the head's channels, reads its block of the checkpoint once
  and appends the block's x. In rows that are due it folds the records into the block as well, a matrix product, and
  writes it back; the output of such a row is read from the checkpoint before the fold, where the same formula holds.

A state in a format of more than a dtype, or beside a copy that is read, has a kernel of its own for the fold, in a
third launch (`stored`): its rows that are due are folded before they are read, so that what is read of them is what was
just stored. What is narrow is read by a kernel of its own as well, which multiplies it on matrix units.

The step is bound by memory: nothing may wait for anything before the state is under way. Where the GPU can do so
(`overlap`), its kernel begins while ``mamba2_prepare`` ends. Everything is computed in
float32 or, on matrix units, exactly as well; see `exact_product`.
"""

import functools
from collections.abc import Callable

import torch
import triton

from replay_transformers.kernels.folds import LIST, FoldLaunch
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
from replay_transformers.kernels.launch import choose, on_their_device
from replay_transformers.kernels.mamba2.step import mamba2_prepare, mamba2_step
from replay_transformers.kernels.mamba2.stored import mamba2_stored_fold, mamba2_stored_step
from replay_transformers.kernels.mamba2.update import update
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

COLUMNS = 32  # 4 bytes each: what a memory transaction reads of one channel's states
PART = 64  # states folded at a time
# folds of stored states: tile by tile; where a format needs all of a head; where only the copy's does
TILES = FoldLaunch(block=16, warps=1, stages=2, programs=2112)
HEADS = FoldLaunch(block=16, warps=4, stages=1, programs=264, whole=True)
COPIES = FoldLaunch(block=16, warps=1, stages=1, programs=2112, whole=True)


def _run(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    checkpoint: list[torch.Tensor],
    readout: list[torch.Tensor],
    ring_x: torch.Tensor,
    ring_b: torch.Tensor,
    ring_dt: torch.Tensor,
    base: torch.Tensor,
    committed: torch.Tensor,
    pending: torch.Tensor,
    folds: torch.Tensor | None,
    max_records: int,
    precision: Precision | None,
) -> torch.Tensor:
    rows, tokens, heads, width = x.shape
    groups, states = B.shape[2:]
    group, fold, device = heads // groups, folds is not None, x.device
    block_r = power_of_two(max(max_records, MIN_RECORDS))
    chosen = choose("mamba2", device, rows * heads, tokens, width, states)
    share, block_t = heads_per_program(chosen.share, group), power_of_two(tokens)
    source = readout or checkpoint
    # copies of 16 bits like the activations are multiplied on matrix units, as other formats are
    is_alike = source[0].dtype == C.dtype and C.itemsize == 2
    is_narrow = precision is not None and (is_alike or not precision.is_read_plainly)
    block_p = min(chosen.block, power_of_two(width))
    block_n = max(power_of_two(states), LEAST_DEPTH)
    skips = precision is not None and precision.decay_skip > 0
    folds_first = fold and precision is not None
    early = {} if folds_first else overlapping(device)

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    cursor = torch.empty(rows, 3, dtype=torch.int32, device=device)
    coefficient, carry = scratch(rows, heads, tokens, 2 * block_r), scratch(rows, heads, tokens)
    weight = scratch(rows, heads, block_r + 1) if fold else scratch(1)
    y = torch.empty(rows, tokens, heads, width, dtype=x.dtype, device=device)
    sizes = {
        "HEADS": heads, "GROUP": group, "STATES": states, "CAPACITY": ring_x.shape[2],
        "BLOCK_N": block_n, "BLOCK_R": block_r,
    }  # fmt: skip
    step_sizes = {"TOKENS": tokens, "BLOCK_T": block_t, **sizes}
    mamba2_prepare[(rows * (heads // share),)](
        dt, B, C, A, D, ring_b, ring_dt, base, committed, pending, folds,
        cursor, coefficient, carry, weight, *dt.stride(), *B.stride(), *C.stride(),
        precision.least_log if precision is not None else 0.0,
        SHARE=share, BLOCK_H=power_of_two(share), HAS_D=D is not None, FOLD=fold,
        FOLD_FIRST=folds_first, SKIP=skips, OVERLAPS=bool(early),
        **step_sizes, num_warps=chosen.share_warps,
    )  # fmt: skip
    if fold and precision is not None:
        written = [form.kernels() for form in precision.written]
        how = COPIES if precision.copies_heads else HEADS if precision.needs_heads else TILES
        mamba2_stored_fold[how.grid(rows, heads, width)](
            *pointers(checkpoint), *pointers(source), ring_x, ring_b, weight, cursor, base, folds, rows, precision.key,
            LOAD=written[0].load, STORE=written[0].store, STORE_COPY=written[-1].store, HAS_COPY=bool(readout),
            WIDTH=width, BLOCK_P=how.tile(width), AGES=MIN_RECORDS, TILES=how.tiles(width), STAGES=how.stages,
            WARPS=how.warps, TWICE=precision.copies_heads, LIST=LIST, SKIP=skips, **sizes, num_warps=how.warps,
        )  # fmt: skip
    if not is_narrow:
        mamba2_step[(rows * heads * triton.cdiv(width, block_p),)](
            source[0], x, C, ring_x, ring_b, coefficient, carry, weight, cursor, y, *x.stride(), *C.stride(),
            WIDTH=width, BLOCK_P=block_p, AGES=MIN_RECORDS, COLUMNS=min(COLUMNS, block_n), PART=min(PART, block_n),
            FOLD=fold and precision is None, SKIP=skips, OVERLAPS=bool(early), **step_sizes,
            num_warps=chosen.warps, **early,
        )  # fmt: skip
    elif precision is not None:
        form = precision.read.kernels()
        tiles = tiles_per_program(rows * heads, width)
        pieces = triton.cdiv(width, NARROW_BLOCK * tiles)
        mamba2_stored_step[(rows * heads * pieces,)](
            *pointers(source), x, C, ring_x, coefficient, carry, cursor, y, *x.stride(), *C.stride(),
            OPENED=form.opened, VECTORS=form.vectors, PRODUCTS=form.products, WIDTH=width, BLOCK_P=NARROW_BLOCK,
            TILES=tiles, STAGES=NARROW_STAGES, SKIP=skips, OVERLAPS=bool(early), **step_sizes,
            num_warps=NARROW_WARPS, **early,
        )  # fmt: skip
    return y


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
    rings, cursor = (ring_x, ring_b, ring_dt), (base, committed, pending)
    return _run(x, dt, B, C, A, D, [state], [], *rings, *cursor, folds, max_records, None)


@on_their_device
def _launch_stored(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    checkpoint: list[torch.Tensor],
    readout: list[torch.Tensor],
    ring_x: torch.Tensor,
    ring_b: torch.Tensor,
    ring_dt: torch.Tensor,
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
    rings, cursor = (ring_x, ring_b, ring_dt), (base, committed, pending)
    precision = Precision(checkpoint_format, readout_format, key, decay_skip)
    return _run(x, dt, B, C, A, D, checkpoint, readout, *rings, *cursor, folds, max_records, precision)


RINGS = ("ring_x", "ring_b", "ring_dt")
_operator = torch.library.custom_op("replay_transformers::mamba2_step", _launch, mutates_args=("state", *RINGS))
_stored_operator = torch.library.custom_op(
    "replay_transformers::mamba2_stored_step", _launch_stored, mutates_args=("checkpoint", "readout", *RINGS)
)


@_operator.register_fake
def _(x: torch.Tensor, *operands: object) -> torch.Tensor:
    return x.new_empty(x.shape)


@_stored_operator.register_fake
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
    """The same as `replay_transformers.kernels.mamba2.reference.replay_step`, on a GPU.

    Tensors may be float32, bfloat16 or float16; states, the rings and tensors of one dimension must be contiguous, the
    others may have any strides. Without gradients. Inside compiled graphs it is the operator
    ``replay_transformers::mamba2_step``, or ``mamba2_stored_step`` for a state that is not one tensor of floats.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit; nothing is changed then.
    """
    rows, tokens, heads, width = x.shape
    groups, states = B.shape[2:]
    capacity = ring_x.shape[2]
    is_plain = isinstance(state, torch.Tensor) and readout is None and not decay_skip
    if not torch.compiler.is_compiling():
        check_groups(heads, groups)
        expected = {
            "x": (x, (rows, tokens, heads, width)), "dt": (dt, (rows, tokens, heads)),
            "B": (B, (rows, tokens, groups, states)), "C": (C, (rows, tokens, groups, states)), "A": (A, (heads,)),
            "ring_x": (ring_x, (rows, heads, capacity, width)), "ring_b": (ring_b, (rows, groups, capacity, states)),
            "ring_dt": (ring_dt, (rows, heads, capacity)),
            "base": (base, (rows,)), "committed": (committed, (rows,)), "pending": (pending, (rows,)),
        }  # fmt: skip
        if D is not None:
            expected["D"] = (D, (heads,))
        if folds is not None:
            expected["folds"] = (folds, (rows,))
        held = state_operands((rows, heads, width, states), False, state=state, readout=readout)
        check_operands(expected | held.shapes, (*RINGS, *held.shapes), POINTERS, held.dtypes)
    cursor, tokens_of, rings = (base, committed, pending, folds), (x, dt, B, C), (ring_x, ring_b, ring_dt)
    run: Callable[..., torch.Tensor]
    if is_plain:
        run = _operator if torch.compiler.is_compiling() else _launch
        return run_in_parts(run, tokens_of, (A, D, state, *rings), cursor, capacity, max_records)
    (form, parts), (copy_form, copy_parts) = parts_of(state), parts_of(readout)
    run = functools.partial(
        _stored_operator if torch.compiler.is_compiling() else _launch_stored,
        checkpoint_format=form,
        readout_format=copy_form,
        key=state.key if isinstance(state, StoredState) else 0,
        decay_skip=float(decay_skip),
    )
    return run_in_parts(run, tokens_of, (A, D, parts, copy_parts, *rings), cursor, capacity, max_records)
