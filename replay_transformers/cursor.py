"""The cursor: where each row of the batch stands in its rings. One per cache, shared by all layers of a forward."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from replay_transformers.config import ReplayConfig
from replay_transformers.kernels.ring import rows_due
from replay_transformers.ragged import width_for

__all__ = ["WRITE_THROUGH_BYTES", "Cursor", "Position", "StepPlan", "allocate"]

# Batches of at least so many rows spread their flushes over the steps. With the default window of 16 at least two rows
# then flush in each step. Smaller ones flush together: their steps are short either way, and on a CPU all steps between
# two flushes skip the fold.
SPREAD_ROWS = 32

# Where the states of a layer (all rows) take no more than this, single tokens are written through on a GPU: the state
# is read, updated and written as in eager decoding, and no record is kept. Two such passes over a state that fits into
# the GPU's cache cost less than the launch that sums up the records. On an H200 the two cross between 17 and 31 MB.
WRITE_THROUGH_BYTES = 24 * 2**20
THROUGH_DEVICE = "cuda"

# base, committed, pending, folds: what the layers on one device need of the cursor in one forward
Position = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed buffer that outlives the mode it is made in, with an address that compiled graphs may rely on.

    Made under `inference_mode` it is an ordinary tensor all the same, so it can be updated in place outside.
    """
    if torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=dtype, device=device)
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.zeros(shape, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(buffer)
    return buffer


@dataclass
class StepPlan:
    """What one forward does, decided at its first state-space layer and followed by all of them.

    Args:
        tokens: tokens per row in this forward.
        kept: tokens that go through the ring; the ``tokens - kept`` before them are scanned straight into the state.
        folds: int64 ``[B]``, how many of its oldest records each row folds in this forward: ``committed`` if the row is
            due, else 0. None if none folds any: known on the host, or a forward whose ring is emptied before its scan.
        was_empty: True only if the rings are known to hold no record as a forward with scanned tokens begins.
        max_records: how many records a row holds at most as the forward begins.
        next_layer: position (among the state-space layers) of the layer that runs next.
        copies: the cursor and ``folds`` by device: int64 ``[B]`` tensors ``(base, committed, pending, folds)``.
        starts: the positions of the first new tokens by device; attention layers use them while the cursor is ragged.
    """

    tokens: int
    kept: int
    was_empty: bool
    folds: torch.Tensor | None
    max_records: int
    next_layer: int = 0
    copies: dict[torch.device, Position] = field(default_factory=dict)
    starts: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @property
    def scanned(self) -> int:
        """Tokens folded directly into the state, before the kept ones."""
        return self.tokens - self.kept


class Cursor:
    """Per-row pointers into the rings, as device tensors.

    ``base`` is the absolute position of the oldest record, ``committed`` counts the records from there on that are part
    of the sequence for good, ``pending`` those after them that a `crop` may still reject; all int64 ``[B]``. A row has
    seen ``base + committed + pending`` tokens. While ``recording`` is False every forward is committed at once.

    ``early`` (int64 ``[B]``) is by how many tokens a row's present window is shorter than the others. The first window
    of row i has ``(i * window) // B`` tokens less, so that few rows of a large batch flush in the same step.

    While ``ragged`` the rows may have seen different numbers of tokens, at most ``longest`` (kept up to date outside of
    compiled graphs, where no shape depends on it).
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self._recording = False
        self.base: torch.Tensor | None = None
        self.committed: torch.Tensor | None = None
        self.pending: torch.Tensor | None = None
        self.early: torch.Tensor | None = None
        self.plan: StepPlan | None = None
        self.recorded = False  # tokens may have been left uncommitted since then
        self.empty = True  # the rings hold no record, and the host knows
        self.state_bytes = 0  # of one row's state in the layer that has the largest
        self.fresh = True  # no forward has begun since construction or the last reset
        self.first = True  # the latest forward is the first since then
        self.forwards = 0  # how many have gone through every state-space layer
        self.broken = False  # one broke off and left the layers of the cache apart
        self.ragged = False
        self.longest = 0
        self._starts: dict[torch.device, torch.Tensor] | None = None  # of the latest forward; see `starts_of`
        self._moved = True  # tokens came or went since it began

    @property
    def recording(self) -> bool:
        """Whether new tokens stay uncommitted until a commit."""
        return self._recording

    @recording.setter
    def recording(self, value: bool) -> None:
        self._recording = value
        self.recorded |= value

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return -1 if self.base is None else self.base.shape[0]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(base, committed, pending)``; only valid once allocated."""
        assert self.base is not None and self.committed is not None and self.pending is not None
        return self.base, self.committed, self.pending

    def allocate(self, batch_size: int, device: torch.device) -> None:
        """Make the pointers, all zero, and ``early``."""
        shape = (batch_size,)
        self.base, self.committed, self.pending = (allocate(shape, torch.int64, device) for _ in range(3))
        self.early = allocate(shape, torch.int64, device)
        self.spread()

    def spread(self) -> None:
        """Shorten every row's present window so that the batch's flushes spread over the steps, in place."""
        assert self.early is not None
        rows = self.early.shape[0]
        with torch.no_grad():
            if rows < SPREAD_ROWS:
                self.early.zero_()
            else:
                self.early.copy_(torch.arange(rows, device=self.early.device) * self.config.window // rows)

    def lengths(self) -> torch.Tensor:
        """Tokens seen by each row, int64 ``[B]``."""
        base, committed, pending = self.tensors()
        return base + committed + pending

    def note_apart(self, attention_layers: Iterable[Any]) -> None:
        """Take note if attention layers hold another number of tokens than the state-space layers: one broke off.

        What a layer of a ragged cache has written too much is behind its rows' tokens, and the next forward writes over
        it.
        """
        if not self.ragged:
            seen = 0 if self.base is None or self.fresh else int(self.lengths().max())
            self.broken |= any(int(layer.get_seq_length()) != seen for layer in attention_layers)

    def width(self, tokens: int) -> int:
        """Slots for keys and values that a ragged forward of ``tokens`` more tokens per row needs."""
        return width_for(self.longest + tokens)

    def begin(self, batch_size: int, tokens: int, device: torch.device) -> StepPlan:
        """Plan a forward of ``tokens`` tokens for each of ``batch_size`` rows, on ``device``.

        Raises:
            ValueError: another number of rows or another device than the cursor has. Nothing is changed then.
        """
        if self.base is None or self.base.shape[0] != batch_size or self.base.device != device:
            if not self.fresh:
                raise ValueError(self.mismatch(f"{batch_size} rows on {device}"))
            self.allocate(batch_size, device)
        base, committed, pending = self.tensors()
        if not self.recording and (tokens > self.config.max_step or self._writes_through(batch_size, device)):
            kept = 0
        else:
            kept = tokens if tokens <= self.config.max_step else self.config.max_draft
        # asked for only here: a graph of steps through the ring must not depend on it
        was_empty = kept < tokens and self.empty
        folds = self._folds(committed, pending, tokens) if kept == tokens else None
        most = self.config.max_live if self.recorded else max(self.config.window, self.config.max_step)
        self.plan = StepPlan(tokens, kept, was_empty, folds, most, starts=self._starts_of_this_forward())
        self.plan.copies[committed.device] = (base, committed, pending, folds)
        self.first, self.fresh = self.fresh, False
        return self.plan

    def mismatch(self, got: str, buffer: torch.Tensor | None = None) -> str:
        """The message for a forward that does not fit what the cache holds (``buffer``, if it is about that)."""
        held = f"{self.batch_size} rows" if buffer is None else f"{buffer.shape[0]} rows of {buffer.dtype}"
        device = self.base if buffer is None else buffer
        if device is not None:
            held += f" on {device.device}"
        return (
            f"this replay cache holds {held}, got {got}: after moving or casting a model, or for another batch, call "
            "cache.reset() or build a new cache"
        )

    def is_starting(self, before: int, layers: int) -> bool:
        """Whether a layer with ``before`` of the ``layers`` state-space layers before it is in its first forward.

        Raises:
            ValueError: the layer is reached out of order. Nothing is changed then.
        """
        reached = None if before in (0, layers) else before
        if (None if self.plan is None else self.plan.next_layer) != reached:
            raise ValueError(
                "a forward through this replay cache broke off half-way, or did not run every state-space layer of the "
                "model once and in order, and left its layers apart; call cache.reset() or build a new cache"
            )
        return self.fresh if before == 0 else self.first

    def _writes_through(self, rows: int, device: torch.device) -> bool:
        """Whether eager updates are faster: the states are small, on a GPU, and no record waits to be folded."""
        is_small = rows * self.state_bytes <= WRITE_THROUGH_BYTES
        is_free = self.config.impl == "auto" and self.config.is_plain
        return is_free and device.type == THROUGH_DEVICE and is_small and self.empty

    def _folds(self, committed: torch.Tensor, pending: torch.Tensor, tokens: int) -> torch.Tensor | None:
        """`StepPlan.folds`: a tensor wherever asking the host would stall a GPU or break a graph."""
        assert self.early is not None
        due = rows_due(committed, pending, tokens, self.config.window, self.early)
        if due.device.type == "cpu" and not torch.compiler.is_compiling() and not due.any():
            return None
        return torch.where(due, committed, 0)

    def on(self, device: torch.device) -> Position:
        """The cursor and the plan's ``folds`` on ``device``, copied there at most once per forward."""
        assert self.plan is not None
        if device not in self.plan.copies:
            base, committed, pending = (tensor.to(device) for tensor in self.tensors())
            folds = None if self.plan.folds is None else self.plan.folds.to(device)
            self.plan.copies[device] = (base, committed, pending, folds)
        return self.plan.copies[device]

    def start(self, device: torch.device) -> torch.Tensor:
        """Position of each row's first new token on ``device``, int64 ``[B]``, computed there once per forward."""
        assert self.plan is not None
        if device not in self.plan.starts:
            base, committed, pending, _ = self.on(device)
            self.plan.starts[device] = base + committed + pending
        return self.plan.starts[device]

    def starts_of(self, device: torch.device, tokens: int, is_after_end: bool) -> torch.Tensor:
        """`start` for a layer that may come before the plan is made, or after its end; once per forward and device.

        Args:
            device: the layer's. tokens: of the forward. is_after_end: whether the cursor has moved past them.
        """
        if self.plan is not None:
            return self.start(device)
        if not is_after_end:
            known = self._starts_of_this_forward()
        else:
            known = {} if torch.compiler.is_compiling() or self._starts is None else self._starts
        if device not in known:
            lengths = self.lengths().to(device)
            known[device] = lengths - tokens if is_after_end else lengths
        return known[device]

    def _starts_of_this_forward(self) -> dict[torch.device, torch.Tensor]:
        """As a forward begins. What a compiled one computes is not kept beyond its graph."""
        if torch.compiler.is_compiling():
            self._starts = None
            return {}
        if self._moved or self._starts is None:
            self._starts, self._moved = {}, False
        return self._starts

    def end(self) -> None:
        """Advance past the planned forward, in place, after its last state-space layer."""
        assert self.plan is not None and self.early is not None
        base, committed, pending = self.tensors()
        plan, self.plan = self.plan, None
        self._moved = True
        if not torch.compiler.is_compiling():
            self.forwards += 1
            self.longest += plan.tokens
        with torch.no_grad():
            if plan.scanned:
                base.add_(plan.scanned)
                if not plan.was_empty:
                    base.add_(committed).add_(pending)
                    committed.zero_()
                    pending.zero_()
                self.empty = plan.kept == 0
                if plan.kept:
                    pending.fill_(plan.kept)
                if plan.tokens > 1:
                    self.spread()
                return
            self.empty = False
            if plan.folds is not None:
                base.add_(plan.folds)
                committed.sub_(plan.folds)
                self.early.masked_fill_(plan.folds > 0, 0)
            pending.add_(plan.tokens)
            horizon = self.config.max_draft if self.recording else 0
            leaving = (pending - horizon).clamp_(min=0)
            committed.add_(leaving)
            pending.sub_(leaving)

    def commit(self, rejected: torch.Tensor | int) -> None:
        """Commit the pending tokens except the last ``rejected`` (int or int64 ``[B]``), in place."""
        _, committed, pending = self.tensors()
        self._moved = True
        with torch.no_grad():
            committed.add_(pending).sub_(rejected)
            pending.zero_()

    def flushed(self) -> None:
        """Note, in place, that every committed record has been folded; spreads the next flushes anew."""
        base, committed, _ = self.tensors()
        with torch.no_grad():
            base.add_(committed)
            committed.zero_()
        self.empty = not self.recorded
        self.spread()

    def reset(self) -> None:
        """Back to an empty sequence, in place; recording stops."""
        self._recording = self.recorded = False
        self.plan = None
        self.fresh = self.first = self.empty = True
        self.broken = self.ragged = False
        self.longest = 0
        self._starts, self._moved = None, True
        if self.base is not None:
            with torch.no_grad():
                for tensor in self.tensors():
                    tensor.zero_()
            self.spread()

    def select(self, rows: torch.Tensor, in_place: bool) -> None:
        """Keep the given rows (int64 ``[n]``), in place if the addresses have to stay."""
        if self.base is None or self.early is None:
            return
        self._moved = True
        self.base, self.committed, self.pending = (select_rows(tensor, rows, in_place) for tensor in self.tensors())
        self.early = select_rows(self.early, rows, in_place)


def select_rows(buffer: torch.Tensor, rows: torch.Tensor, in_place: bool) -> torch.Tensor:
    """``buffer[rows]``: written back into ``buffer`` if ``in_place``, else a new buffer."""
    with torch.inference_mode(False), torch.no_grad():
        chosen = buffer.index_select(0, rows.to(buffer.device))
        if in_place:
            return buffer.copy_(chosen)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(chosen)
    return chosen
