"""The state-space layers of a replay cache: a checkpoint, a ring of recent inputs, and where they go."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from replay_transformers.config import ReplayConfig
from replay_transformers.cursor import Cursor, allocate, select_rows
from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.causal_conv import reference as causal_conv
from replay_transformers.kernels.decay import at_least_float32
from replay_transformers.kernels.gated_delta import reference as gated_delta
from replay_transformers.kernels.mamba2 import reference as mamba2
from replay_transformers.kernels.saturate import store

__all__ = ["LAYER_CLASSES", "GatedDeltaReplayLayer", "Mamba2ReplayLayer", "ReplayLayer"]


class ReplayLayer(LinearAttentionCacheLayerMixin):
    """One state-space layer: checkpoint, rings and the convolution's ring, all allocated at the first forward.

    A forward calls `convolve` and then `step`, layer by layer in the order of the model. The first layer's `convolve`
    plans the forward, the last layer's `step` advances the cursor.

    Args:
        geometry: shapes of the layer.
        config: the cache's settings.
        cursor: shared by all layers of the cache.
        order: position among the state-space layers. last: whether it is the last of them.
    """

    is_croppable = True  # by pointer, while recording
    is_compileable = True  # fixed shapes, in-place writes

    def __init__(
        self, geometry: LayerGeometry, config: ReplayConfig, cursor: Cursor, order: int = 0, last: bool = True
    ) -> None:
        # the base class's buffers (conv_states, recurrent_states) are deliberately not made
        self.geometry = geometry
        self.config = config
        self.cursor = cursor
        self.order = order
        self.last = last
        self.checkpoint: torch.Tensor | None = None
        self.conv_ring: torch.Tensor | None = None
        self.rings: dict[str, torch.Tensor] = {}

    # -- what transformers asks of a linear attention layer ----------------------------------------------------------

    @property
    def has_previous_state(self) -> dict[int, bool]:
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
        raise ValueError(
            "a replay cache reached a state-space layer whose forward is not patched: call "
            "replay_transformers.enable() before the model runs (and before it is dispatched, where accelerate hooks "
            "have already bound its forward), or use a stock cache"
        )

    lazy_initialization = _unpatched
    update_conv_state = _unpatched
    update_recurrent_state = _unpatched
    conv_states = property(_unpatched)  # type: ignore[assignment]
    recurrent_states = property(_unpatched)  # type: ignore[assignment]

    def offload(self) -> None:
        """Nothing: replay layers stay on their device."""

    def prefetch(self) -> None:
        """Nothing: replay layers stay on their device."""

    def crop(self, tokens_to_remove: int) -> None:
        """Not for one layer alone: the cursor is shared."""
        raise ValueError("call crop() on the ReplayCache: its layers share one cursor and roll back together")

    # -- a forward ----------------------------------------------------------------------------------------------------

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
        self._open(inputs)
        if self.conv_ring is None:
            slots = self.config.capacity + self.geometry.conv_kernel - 1
            self.conv_ring = allocate((inputs.shape[0], slots, inputs.shape[2]), inputs.dtype, inputs.device)
        base, committed, pending = self.cursor.on(inputs.device)
        with torch.autocast(inputs.device.type, enabled=False):
            return causal_conv.conv_step(
                inputs, weight, bias, ring=self.conv_ring, position=base + committed + pending, activation=activation
            )

    def _open(self, inputs: torch.Tensor) -> None:
        cursor = self.cursor
        if self.order == 0:
            if cursor.plan is not None:
                raise ValueError(
                    "an earlier forward through this replay cache broke off half-way and left its layers apart; call "
                    "cache.reset() or build a new cache"
                )
            starting = cursor.fresh
        else:
            if cursor.plan is None or cursor.plan.next_layer != self.order:
                raise ValueError(
                    f"state-space layer {self.order} ran out of order: every state-space layer of the model has to run "
                    "once per forward, in order, when it uses a replay cache"
                )
            starting = cursor.plan.first
        self._check_buffers(inputs, starting)
        if self.order == 0:
            cursor.begin(inputs.shape[0], inputs.shape[1], inputs.device)

    def _check_buffers(self, inputs: torch.Tensor, starting: bool) -> None:
        ring = self.conv_ring
        if ring is None:
            return
        held = (ring.shape[0], ring.dtype, ring.device)
        got = (inputs.shape[0], inputs.dtype, inputs.device)
        if held == got:
            return
        if not starting:
            raise ValueError(
                f"this replay cache holds {held[0]} rows of {held[1]} on {held[2]}, got {got[0]} rows of {got[1]} on "
                f"{got[2]}; after moving or casting a model, or for another batch, call cache.reset() or build a new "
                "cache"
            )
        self.checkpoint = self.conv_ring = None
        self.rings = {}

    def _run(
        self,
        operands: tuple[torch.Tensor, ...],
        scan: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        replay: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """The forward's output; records its tokens and closes the layer's forward.

        A long forward folds whatever the ring holds, scans its older tokens straight into the checkpoint, and sends
        only those that may still be rejected through the ring.

        Args:
            operands: tensors ``[B, T, ...]`` in the order of the kernels' arguments.
            scan: takes the operands' older tokens, gives their output and the state after them.
            replay: takes the operands' newest tokens and the cursor, gives their output and records them.
        """
        plan = self.cursor.plan
        assert plan is not None and self.checkpoint is not None
        base, committed, pending = self.cursor.on(self.checkpoint.device)
        outputs = []
        with torch.autocast(self.checkpoint.device.type, enabled=False):
            if plan.scanned:
                self._fold(base, committed + pending)
                output, state = scan(*(operand[:, : plan.scanned] for operand in operands))
                store(self.checkpoint, state)
                outputs.append(output)
                base = base + committed + pending + plan.scanned
                committed = pending = torch.zeros_like(base)
            if plan.kept:
                newest = (operand[:, plan.scanned :] for operand in operands)
                may_flush = plan.may_flush and not plan.scanned
                outputs.append(
                    replay(*newest, base=base, committed=committed, pending=pending, may_flush=may_flush)
                )
        plan.next_layer += 1
        if self.last:
            self.cursor.end()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _fold(self, base: torch.Tensor, count: torch.Tensor) -> None:
        raise NotImplementedError

    def _allocate(self, like: torch.Tensor, rings: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Make the checkpoint and the rings (``name: (shape, dtype)``) on the device of ``like``, once."""
        if self.checkpoint is not None:
            return
        geometry = self.geometry
        shape = (like.shape[0], geometry.heads, geometry.head_dim, geometry.state_dim)
        self.checkpoint = allocate(shape, self.config.checkpoint_dtype, like.device)
        self.rings = {name: allocate(ring, dtype, like.device) for name, (ring, dtype) in rings.items()}

    # -- the whole cache ----------------------------------------------------------------------------------------------

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor of the layer by name; empty before the first forward."""
        if self.checkpoint is None or self.conv_ring is None:
            return {}
        return {"checkpoint": self.checkpoint, "conv_ring": self.conv_ring, **self.rings}

    def reset(self) -> None:
        """Zero the checkpoint, in place; the rings' slots are dead once the cursor is reset, whatever they hold."""
        if self.checkpoint is not None:
            with torch.no_grad():
                self.checkpoint.zero_()

    def select(self, rows: torch.Tensor, in_place: bool) -> None:
        """Keep the given batch rows (int64 ``[n]``) of every buffer; the cache does the same for the cursor."""
        if self.checkpoint is None or self.conv_ring is None:
            return
        self.checkpoint = select_rows(self.checkpoint, rows, in_place)
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

    def _everything(self) -> dict[str, torch.Tensor]:
        assert self.checkpoint is not None
        base, committed, pending = (tensor.to(self.checkpoint.device) for tensor in self.cursor.tensors())
        return {"base": base, "count": committed + pending}


class Mamba2ReplayLayer(ReplayLayer):
    """A Mamba-2 layer.

    Checkpoint ``[B, H, P, N]``; rings ``x [B, H, R, P]`` and ``b [B, G, R, N]`` in the activation dtype, ``dt
    [B, H, R]`` in float32. ``rate`` (``[H]``) is the layer's ``A`` as of the last forward.
    """

    rate: torch.Tensor | None = None

    def step(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        A: torch.Tensor,
        D: torch.Tensor | None,
    ) -> torch.Tensor:
        """The forward's output ``[B, T, H, P]`` in the dtype of ``x``; records its tokens, closes the layer's forward.

        Args:
            x: ``[B, T, H, P]``. dt: ``[B, T, H]`` in float32, after bias, softplus and limits. B, C: ``[B, T, G, N]``.
            A: ``[H]``, negative, float32. D: ``[H]`` or None.
        """
        rows, geometry, slots = x.shape[0], self.geometry, self.config.capacity
        wide = at_least_float32(x.dtype)
        self._allocate(
            x,
            {
                "x": ((rows, geometry.heads, slots, geometry.head_dim), x.dtype),
                "b": ((rows, geometry.groups, slots, geometry.state_dim), x.dtype),
                "dt": ((rows, geometry.heads, slots), wide),
            },
        )
        if self.rate is None or self.rate.device != A.device or self.rate.dtype != wide:
            self.rate = allocate((geometry.heads,), wide, A.device)
        with torch.no_grad():
            self.rate.copy_(A)

        def scan(x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> tuple[Any, Any]:
            return mamba2.scan(x, dt, B, C, A, D, state=self.checkpoint)

        def replay(x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, **cursor: Any) -> torch.Tensor:
            return mamba2.replay_step(
                x,
                dt,
                B,
                C,
                A,
                D,
                state=self.checkpoint,
                ring_x=self.rings["x"],
                ring_b=self.rings["b"],
                ring_dt=self.rings["dt"],
                window=self.config.window,
                **cursor,
            )

        return self._run((x, dt, B, C), scan, replay)

    def _records(self) -> tuple[torch.Tensor, ...]:
        return self.rings["x"], self.rings["b"], self.rings["dt"], self.rate

    def _fold(self, base: torch.Tensor, count: torch.Tensor) -> None:
        mamba2.fold(self.checkpoint, *self._records(), base=base, count=count)

    def state(self) -> torch.Tensor:
        """The recurrent state ``[B, H, P, N]`` as if updated eagerly, uncommitted tokens included. Changes nothing."""
        return mamba2.folded_state(self.checkpoint, *self._records(), **self._everything())


class GatedDeltaReplayLayer(ReplayLayer):
    """A Gated DeltaNet layer.

    Checkpoint ``[B, Hv, V, K]`` (transformers' layout transposed: one row per output channel, as in Mamba-2); rings
    ``k [B, Hk, R, K]`` and ``v [B, Hv, R, V]`` in the activation dtype, before normalisation, ``g [B, Hv, R]`` in
    float32, ``beta [B, Hv, R]`` as the model computes it, and the derived ``d [B, Hv, R, V]`` in float32.
    """

    def step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """The forward's output ``[B, T, Hv, V]`` in the dtype of ``q``; records its tokens, closes the layer's forward.

        Args:
            q, k: ``[B, T, Hk, K]``, before normalisation. v: ``[B, T, Hv, V]``. g: ``[B, T, Hv]`` log-decay in
            float32. beta: ``[B, T, Hv]``.
        """
        rows, geometry, slots = q.shape[0], self.geometry, self.config.capacity
        wide = at_least_float32(q.dtype)
        self._allocate(
            q,
            {
                "k": ((rows, geometry.groups, slots, geometry.state_dim), k.dtype),
                "v": ((rows, geometry.heads, slots, geometry.head_dim), v.dtype),
                "g": ((rows, geometry.heads, slots), wide),
                "beta": ((rows, geometry.heads, slots), beta.dtype),
                "d": ((rows, geometry.heads, slots, geometry.head_dim), wide),
            },
        )

        def scan(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gated_delta.scan(*operands, state=self.checkpoint)

        def replay(*operands: torch.Tensor, **cursor: Any) -> torch.Tensor:
            rings = {f"ring_{name}": ring for name, ring in self.rings.items()}
            return gated_delta.replay_step(
                *operands, state=self.checkpoint, **rings, window=self.config.window, **cursor
            )

        return self._run((q, k, v, g, beta), scan, replay)

    def _records(self) -> tuple[torch.Tensor, ...]:
        return self.rings["k"], self.rings["v"], self.rings["g"], self.rings["beta"]

    def _fold(self, base: torch.Tensor, count: torch.Tensor) -> None:
        gated_delta.fold(self.checkpoint, *self._records(), base=base, count=count)

    def state(self) -> torch.Tensor:
        """The recurrent state ``[B, Hv, K, V]`` as if updated eagerly, uncommitted tokens included. Changes nothing."""
        state = gated_delta.folded_state(self.checkpoint, *self._records(), **self._everything())
        return state.transpose(-1, -2).contiguous()


LAYER_CLASSES: dict[str, type[ReplayLayer]] = {"mamba2": Mamba2ReplayLayer, "gated_delta": GatedDeltaReplayLayer}
