"""float16 with stochastic rounding: the mean of what is stored is the value, where nearest would lose small changes."""

from collections.abc import Mapping

import torch

from replay_transformers.kernels.formats.base import Format
from replay_transformers.kernels.formats.rounding import round_stochastically
from replay_transformers.kernels.saturate import bounded

__all__ = ["Float16Stochastic"]

MANTISSA, SMALLEST = 10, 2.0**-14


class Float16Stochastic(Format):
    """``values`` float16 ``[channels, states]``; beyond the largest the largest; what is not finite stays so."""

    is_stochastic = True
    tiles = "float16_sr_tiles"

    def __init__(self, name: str) -> None:
        self.name = name

    def parts(self, channels: int, states: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of one head by name."""
        return {"values": ((channels, states), torch.float16)}

    def encode(self, values: torch.Tensor, bits: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The parts of float32 values."""
        assert bits is not None
        kept = values.isfinite() & (values.abs() < torch.finfo(torch.float16).max)
        rounded = round_stochastically(torch.where(kept, values, 0.0), bits, MANTISSA, SMALLEST)
        return {"values": torch.where(kept, rounded, bounded(values, torch.float16)).to(torch.float16)}

    def decode(self, parts: Mapping[str, torch.Tensor], states: int) -> torch.Tensor:
        """The values in float32."""
        return parts["values"].to(torch.float32)
