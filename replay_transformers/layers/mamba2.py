"""Mamba-2 layers of a replay cache."""

from typing import Any

import torch

from replay_transformers.cursor import allocate
from replay_transformers.kernels.decay import at_least_float32
from replay_transformers.kernels.mamba2 import reference as mamba2
from replay_transformers.layers.base import ReplayLayer

__all__ = ["Mamba2ReplayLayer"]


class Mamba2ReplayLayer(ReplayLayer):
    """A Mamba-2 layer.

    Checkpoint ``[B, H, P, N]``; rings ``x [B, H, R, P]`` and ``b [B, G, R, N]`` in the activation dtype, ``dt
    [B, H, R]`` in float32. ``rate`` (``[H]``) is the layer's ``A`` as of the last forward.
    """

    rate: Any = None  # a tensor from the first forward on

    def _ring_shapes(self, dtype: torch.dtype) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        geometry = self.geometry
        return {
            "x": (geometry.heads, (geometry.head_dim,), dtype),
            "b": (geometry.groups, (geometry.state_dim,), dtype),
            "dt": (geometry.heads, (), at_least_float32(dtype)),
        }

    def allocate(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make all buffers for ``rows`` rows of activations in ``dtype``; otherwise the first forward does."""
        super().allocate(rows, dtype, device)
        self.rate = allocate((self.geometry.heads,), at_least_float32(dtype), device)

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
        with torch.no_grad():
            self.rate.copy_(A)

        def update(kernels: Any, *operands: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return kernels.update(*operands, A, D, state=state)

        def replay(kernels: Any, *operands: torch.Tensor, **cursor: Any) -> torch.Tensor:
            return kernels.replay_step(
                *operands,
                A,
                D,
                state=self.checkpoint,
                ring_x=self.rings["x"],
                ring_b=self.rings["b"],
                ring_dt=self.rings["dt"],
                **cursor,
            )

        return self._run((x, dt, B, C), update, replay)

    def _records(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.rings["x"], self.rings["b"], self.rings["dt"], self.rate

    def _fold(self, base: torch.Tensor, count: torch.Tensor) -> None:
        mamba2.fold(self.checkpoint, *self._records(), base=base, count=count, **self._reading())

    def state(self) -> torch.Tensor:
        """The recurrent state ``[B, H, P, N]`` as if updated eagerly, uncommitted tokens included. Changes nothing."""
        return mamba2.folded_state(self.checkpoint, *self._records(), **self._everything())
