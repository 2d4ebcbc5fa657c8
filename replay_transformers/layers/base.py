"""What the state-space layers of a replay cache share, whatever their operator."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from replay_transformers.config import MOST_RECORDS, ReplayConfig
from replay_transformers.cursor import Cursor, allocate, select_rows
from replay_transformers.geometry import LayerGeometry
from replay_transformers.implementation import Implementations
from replay_transformers.kernels.formats import FORMATS, PlainFormat, StoredState
from replay_transformers.kernels.formats.stored import State, readable, refresh

__all__ = ["ReplayLayer"]


class ReplayLayer(LinearAttentionCacheLayerMixin):
    """One state-space layer: checkpoint, rings and the convolution's ring, all allocated at the first forward.

    A forward calls `convolve` and then `step`, layer by layer in the order of the model. The first layer's `convolve`
    plans the forward, the last layer's `step` advances the cursor.

    Args:
        geometry: shapes of the layer.
        config: the cache's settings.
        cursor: shared by all layers of the cache.
        order: position among the state-space layers. total: how many of them there are.
        attention_before: the attention layers between this and the state-space layer before.
    """

    is_croppable = True  # by pointer, while recording
    is_compileable = True  # fixed shapes, in-place writes
    transposed = False  # whether a head's state is ``[states, channels]`` in transformers, not ``[channels, states]``

    def __init__(
        self,
        geometry: LayerGeometry,
        config: ReplayConfig,
        cursor: Cursor,
        order: int = 0,
        total: int = 1,
        attention_before: Sequence[Any] = (),
    ) -> None:
        # the base class's buffers (conv_states, recurrent_states) are deliberately not made
        self.geometry = geometry
        self.config = config
        self.cursor = cursor
        self.order = order
        self.total = total
        self.attention_before = tuple(attention_before)
        row_bytes = geometry.heads * FORMATS[config.checkpoint].head_bytes(geometry.head_dim, geometry.state_dim)
        cursor.state_bytes = max(cursor.state_bytes, row_bytes)
        self._convolution = Implementations("causal_conv", config.impl)
        refusal = "the rings are longer than the kernels take" if config.capacity > MOST_RECORDS else None
        self._recurrence = Implementations(geometry.kind, config.impl, refusal)
        # from the first forward on, None before it: the state that folds read and write, the copy that steps read
        self.checkpoint: Any = None
        self.readout: Any = None
        self.conv_ring: Any = None
        self.rings: dict[str, torch.Tensor] = {}

    @property
    def has_previous_state(self) -> dict[int, bool]:  # type: ignore[override]
        """Whether the layer has seen tokens since the last reset (under key 0)."""
        return {0: not self.cursor.fresh}

    @property
    def record_past(self) -> bool:
        """Whether new tokens stay rejectable until the next `crop`."""
        return self.cursor.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.cursor.recording = value

    def activate_past_recording(self) -> None:
        """Keep new tokens rejectable until the next `crop` of the cache."""
        self.cursor.recording = True

    def _unpatched(self, *args: Any, **kwargs: Any) -> Any:
        self.cursor.note_apart(self.attention_before)
        raise ValueError(
            "a replay cache reached a state-space layer whose forward is not patched: call "
            "replay_transformers.enable() before the model runs (and before it is loaded with a device_map, or call "
            "generate once, where accelerate's hooks have already bound its forward), or use a stock cache"
        )

    lazy_initialization = _unpatched
    update_conv_state = _unpatched
    update_recurrent_state = _unpatched
    conv_states = property(_unpatched)
    recurrent_states = property(_unpatched)

    def offload(self) -> None:
        """Nothing: replay layers stay on their device."""

    def prefetch(self) -> None:
        """Nothing: replay layers stay on their device."""

    def crop(self, tokens_to_remove: int) -> None:
        """Not for one layer alone: the cursor is shared."""
        raise ValueError("call crop() on the ReplayCache: its layers share one cursor and roll back together")

    def convolve(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
    ) -> torch.Tensor:
        """Causal convolution of the forward's tokens: ``[B, T, D]`` -> ``[B, T, D]``; opens the layer's forward.

        Args:
            inputs: ``[B, T, D]``, raw. weight: ``[D, W]``. bias: ``[D]`` or None. activation: "silu" or None.

        Raises:
            ValueError: a batch size, dtype or device that is not the cache's, layers out of order, or an earlier
                forward that broke off. The cache is unchanged then.
        """
        kernels = self._convolution.choose(inputs, inputs, weight)
        self._recurrence.choose(inputs, inputs)  # what it refuses, it refuses before anything is taken in
        self._open(inputs)
        if self.conv_ring is None:
            self.allocate(inputs.shape[0], inputs.dtype, inputs.device)
        position = self.cursor.start(inputs.device)
        with torch.autocast(inputs.device.type, enabled=False):
            return kernels.conv_step(
                inputs, weight, bias, ring=self.conv_ring, position=position, activation=activation
            )

    def _open(self, inputs: torch.Tensor) -> None:
        starting = self.cursor.is_starting(self.order, self.total)
        ring = self.conv_ring
        if ring is not None:
            got = (inputs.shape[0], inputs.dtype, inputs.device)
            if (ring.shape[0], ring.dtype, ring.device) != got:
                if not starting:
                    raise ValueError(self.cursor.mismatch(f"{got[0]} rows of {got[1]} on {got[2]}", ring))
                self.checkpoint = self.readout = self.conv_ring = None
                self.rings = {}
        if self.order == 0:
            self.cursor.begin(inputs.shape[0], inputs.shape[1], inputs.device)

    def _run(
        self,
        operands: tuple[torch.Tensor, ...],
        update: Callable[..., torch.Tensor],
        replay: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """The forward's output; records its tokens and closes the layer's forward.

        A long forward folds whatever the ring holds, scans its older tokens straight into the checkpoint, and sends
        only those that may still be rejected through the ring. So does a single token that is written through.

        Args:
            operands: tensors ``[B, T, ...]`` in the order of the kernels' arguments.
            update: takes the kernels' module, the operands' older tokens and a state, gives their output, updates the
                state.
            replay: takes the kernels' module, the operands' newest tokens, the cursor and ``folds``; gives their output
                and records them.
        """
        plan = self.cursor.plan
        assert plan is not None
        base, committed, pending, folds = self.cursor.on(self.checkpoint.device)
        outputs = []
        with torch.autocast(self.checkpoint.device.type, enabled=False):
            if plan.scanned:
                if not plan.was_empty:
                    self._fold(base, committed + pending)
                older = [operand[:, : plan.scanned] for operand in operands]
                choose = self._recurrence.choose if plan.scanned == 1 else self._recurrence.choose_scan
                if plan.kept or not self.config.is_plain:  # a step that is written through does without
                    base = base + committed + pending + plan.scanned
                    committed = pending = torch.zeros_like(base)
                outputs.append(self._scan(update, choose, older, base))
            if plan.kept:
                newest = [operand[:, plan.scanned :] for operand in operands]
                kernels = self._recurrence.choose(self.checkpoint, *newest)
                cursor = {"base": base, "committed": committed, "pending": pending, "folds": folds, **self._reading()}
                outputs.append(replay(kernels, *newest, **cursor, max_records=plan.max_records))
        plan.next_layer += 1
        if plan.next_layer == self.total:
            self.cursor.end()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _scan(
        self,
        update: Callable[..., torch.Tensor],
        choose: Callable[..., Any],
        operands: list[torch.Tensor],
        after: torch.Tensor,
    ) -> torch.Tensor:
        """Output of tokens that go straight into the checkpoint, and from there into the copy.

        Args:
            update: as in `_run`. choose: gives the kernels' module for a state and the operands.
            after: int64 ``[B]``, tokens of each row that the checkpoint then holds; not looked at if it is plain.
        """
        is_stored = isinstance(self.checkpoint, StoredState)
        state = self.checkpoint.read().contiguous() if is_stored else self.checkpoint
        output = update(choose(state, *operands), *operands, state=state)
        if is_stored:
            self.checkpoint.write(state, after)
        refresh(self.readout, self.checkpoint, after)
        return output

    def _reading(self) -> dict[str, Any]:
        """What steps and folds of anything but a plain checkpoint are told besides."""
        return {} if self.config.is_plain else {"readout": self.readout, "decay_skip": self.config.decay_skip}

    def _fold(self, base: torch.Tensor, count: torch.Tensor) -> None:
        raise NotImplementedError

    def allocate(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make all buffers for ``rows`` rows of activations in ``dtype``; otherwise the first forward does."""
        geometry, slots = self.geometry, self.config.capacity
        self.conv_ring = allocate((rows, self._conv_slots(), geometry.conv_dim), dtype, device)
        self.checkpoint = self._allocate_state(self.config.checkpoint, rows, device)
        self.readout = None
        if self.config.readout is not None:
            self.readout = self._allocate_state(self.config.readout, rows, device)
        self.rings = {
            name: allocate((rows, heads, slots, *width), ring_dtype, device)
            for name, (heads, width, ring_dtype) in self._ring_shapes(dtype).items()
        }

    def _conv_slots(self) -> int:
        """Inputs that a forward may still need: those before the first token that can be rejected, and its own."""
        return self.geometry.conv_kernel - 1 + self.config.max_draft + self.config.max_step

    def _allocate_state(self, name: str, rows: int, device: torch.device) -> State:
        form, heads = FORMATS[name], self.geometry.heads
        if isinstance(form, PlainFormat):
            return allocate((rows, *self._state_shape()), form.dtype, device)
        channels, states = self.geometry.head_dim, self.geometry.state_dim
        parts = {
            part: allocate((rows, heads, *shape), dtype, device)
            for part, (shape, dtype) in form.parts(channels, states).items()
        }
        return StoredState(form, parts, states, self.transposed, key=self.config.seed ^ self.order << 32)

    def _state_shape(self) -> tuple[int, int, int]:
        """Shape of one row's state, in transformers' layout."""
        channels, states = self.geometry.head_dim, self.geometry.state_dim
        return self.geometry.heads, *((states, channels) if self.transposed else (channels, states))

    def _ring_shapes(self, dtype: torch.dtype) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        """Rings by name: ``(heads, width of a record per head, dtype)`` for activations in ``dtype``."""
        raise NotImplementedError

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor of the layer by name; empty before the first forward.

        A state in a format of several tensors has them all, with a dot: "checkpoint.values", "checkpoint.scales".
        """
        if self.checkpoint is None or self.conv_ring is None:
            return {}
        states = {
            f"{name}.{part}" if part else name: tensor
            for name, state in (("checkpoint", self.checkpoint), ("readout", self.readout))
            for part, tensor in _parts(state)
        }
        return {**states, "conv_ring": self.conv_ring, **self.rings}

    def rows_not_finite(self) -> dict[str, list[int]]:
        """Batch rows whose checkpoint or copy holds a value that is not finite, by the name of the buffer."""
        states = {"checkpoint": self.checkpoint, "readout": self.readout}
        found = {
            name: (~readable(state, torch.float32).isfinite().flatten(1).all(1)).nonzero()[:, 0].tolist()
            for name, state in states.items()
            if state is not None
        }
        return {name: rows for name, rows in found.items() if rows}

    def reset(self) -> None:
        """Zero the states, in place; the rings' slots are dead once the cursor is reset, whatever they hold."""
        with torch.no_grad():
            for state in (self.checkpoint, self.readout):
                for _, tensor in _parts(state):
                    tensor.zero_()

    def select(self, rows: torch.Tensor, in_place: bool) -> None:
        """Keep the given batch rows (int64 ``[n]``) of every buffer; the cache does the same for the cursor."""
        if self.checkpoint is None or self.conv_ring is None:
            return
        self.checkpoint, self.readout = (
            state.with_parts({name: select_rows(part, rows, in_place) for name, part in state.parts.items()})
            if isinstance(state, StoredState)
            else None
            if state is None
            else select_rows(state, rows, in_place)
            for state in (self.checkpoint, self.readout)
        )
        self.conv_ring = select_rows(self.conv_ring, rows, in_place)
        self.rings = {name: select_rows(ring, rows, in_place) for name, ring in self.rings.items()}

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Not for one layer alone: the cursor is shared."""
        raise ValueError("call reorder_cache() on the ReplayCache: its layers share one cursor")

    def state(self) -> torch.Tensor:
        """The recurrent state as if updated eagerly: float32 (or float64), transformers' layout. Changes nothing."""
        raise NotImplementedError

    def flush(self) -> None:
        """Fold the committed records into the checkpoint, in place; the cache advances the cursor."""
        if self.checkpoint is not None:
            base, committed, _ = (tensor.to(self.checkpoint.device) for tensor in self.cursor.tensors())
            self._fold(base, committed)

    def _everything(self) -> dict[str, Any]:
        base, committed, pending = (tensor.to(self.checkpoint.device) for tensor in self.cursor.tensors())
        return {"base": base, "count": committed + pending}


def _parts(state: State | None) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, StoredState):
        yield from state.parts.items()
    elif state is not None:
        yield "", state
