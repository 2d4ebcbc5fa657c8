"""fp8: e4m3 with one scale per row of the state.

Scales are powers of two, the smallest with which the row's largest value fits: e4m3 is a floating format, so they cost
no precision, and whatever is a few bits times a power of two is stored exactly. A value is off by at most 2^-4 of
itself, or 2^-17 of the row's largest where that is more; with stochastic rounding by at most twice as much.
"""

from collections.abc import Mapping

import torch

from replay_transformers.kernels.formats.base import Format
from replay_transformers.kernels.formats.rounding import round_stochastically

__all__ = ["Fp8"]

E4M3 = torch.float8_e4m3fn
MANTISSA, SMALLEST = 3, 2.0**-6
# the largest is 448 = 1.75 * 2^8; scales begin at the smallest normal float32
CARRY, EXPONENT, LEAST = 0x1FFFFF, 8, 1


def power_scale(largest: torch.Tensor, carry: int, exponent: int) -> torch.Tensor:
    """The smallest power of two, and a normal float32, that brings ``largest`` (float32, 0 or more) into range.

    The format's largest is ``(2 - carry * 2^-23) * 2^exponent``, up to one unit in the last place of float32. NaN where
    ``largest`` is not finite.
    """
    biased = ((largest.contiguous().view(torch.int32) + carry) >> 23) - exponent
    scale = (biased.clamp(min=LEAST) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)


class Fp8(Format):
    """``values`` uint8 ``[channels, states]``, the bits of e4m3; ``scales`` bfloat16 ``[channels]``."""

    tiles = "fp8_tiles"

    def __init__(self, name: str, is_stochastic: bool = False) -> None:
        self.name, self.is_stochastic = name, is_stochastic
        self.store = "store_sr" if is_stochastic else "store"

    def parts(self, channels: int, states: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of one head by name."""
        return {"values": ((channels, states), torch.uint8), "scales": ((channels,), torch.bfloat16)}

    def encode(self, values: torch.Tensor, bits: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The parts of float32 values; a row with one that is not finite decodes to NaN."""
        scale = power_scale(values.abs().amax(-1), CARRY, EXPONENT)
        scaled = torch.where(scale.isnan()[..., None], 0.0, values * (1 / scale)[..., None])
        if self.is_stochastic:
            assert bits is not None
            scaled = round_stochastically(scaled, bits, MANTISSA, SMALLEST)
        return {"values": scaled.to(E4M3).view(torch.uint8), "scales": scale.to(torch.bfloat16)}

    def decode(self, parts: Mapping[str, torch.Tensor], states: int) -> torch.Tensor:
        """The values in float32."""
        return parts["values"].view(E4M3).to(torch.float32) * parts["scales"].to(torch.float32)[..., None]
