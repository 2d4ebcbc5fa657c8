"""Formats that are dtypes of torch: the state as it is, rounded to nearest."""

from collections.abc import Mapping

import torch

from replay_transformers.kernels.formats.base import Format
from replay_transformers.kernels.saturate import bounded

__all__ = ["PlainFormat"]


class PlainFormat(Format):
    """One tensor of floats. Beyond the largest float16 the largest is stored."""

    tiles = "plain_tiles"

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def parts(self, channels: int, states: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of one head by name."""
        return {"values": ((channels, states), self.dtype)}

    def encode(self, values: torch.Tensor, bits: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The parts of values ``[..., channels, states]``; NaN stays NaN."""
        return {"values": bounded(values, self.dtype).to(self.dtype)}

    def decode(self, parts: Mapping[str, torch.Tensor], states: int) -> torch.Tensor:
        """The values in float32, or float64 if that is what they are."""
        return parts["values"].to(torch.promote_types(torch.float32, self.dtype))
