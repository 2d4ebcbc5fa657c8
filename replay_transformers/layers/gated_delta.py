"""Gated DeltaNet layers of a replay cache."""

from typing import Any

import torch

from replay_transformers.kernels.decay import at_least_float32
from replay_transformers.kernels.gated_delta import reference as gated_delta
from replay_transformers.layers.base import ReplayLayer

__all__ = ["GatedDeltaReplayLayer"]


class GatedDeltaReplayLayer(ReplayLayer):
    """A Gated DeltaNet layer.

    Checkpoint ``[B, Hv, K, V]``; rings ``k [B, Hk, R, K]`` and ``v [B, Hv, R, V]`` in the activation dtype, before
    normalisation, ``g [B, Hv, R]`` in float32, ``beta [B, Hv, R]`` as the model computes it, and the derived ``d
    [B, Hv, R, V]`` in the activation dtype (it never enters a fold, so its rounding lives for one window at most).
    """

    transposed = True

    def _ring_shapes(self, dtype: torch.dtype) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        geometry, wide = self.geometry, at_least_float32(dtype)
        return {
            "k": (geometry.groups, (geometry.state_dim,), dtype),
            "v": (geometry.heads, (geometry.head_dim,), dtype),
            "g": (geometry.heads, (), wide),
            "beta": (geometry.heads, (), dtype),
            "d": (geometry.heads, (geometry.head_dim,), dtype),
        }

    def step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """The forward's output ``[B, T, Hv, V]`` in the dtype of ``q``; records its tokens, closes the layer's forward.

        Args:
            q, k: ``[B, T, Hk, K]``, before normalisation. v: ``[B, T, Hv, V]``. g: ``[B, T, Hv]`` log-decay in
            float32. beta: ``[B, T, Hv]``.
        """

        def update(kernels: Any, *operands: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return kernels.update(*operands, state=state)

        def replay(kernels: Any, *operands: torch.Tensor, **cursor: Any) -> torch.Tensor:
            rings: dict[str, Any] = {f"ring_{name}": ring for name, ring in self.rings.items()}
            settings = {**rings, **cursor, "state": self.checkpoint}
            return kernels.replay_step(*operands, **settings)

        return self._run((q, k, v, g, beta), update, replay)

    def _records(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.rings["k"], self.rings["v"], self.rings["g"], self.rings["beta"]

    def _fold(self, base: torch.Tensor, count: torch.Tensor) -> None:
        gated_delta.fold(self.checkpoint, *self._records(), base=base, count=count, **self._reading())

    def state(self) -> torch.Tensor:
        """The recurrent state ``[B, Hv, K, V]`` as if updated eagerly, uncommitted tokens included. Changes nothing."""
        return gated_delta.folded_state(self.checkpoint, *self._records(), **self._everything())
