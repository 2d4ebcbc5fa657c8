"""NVFP4: e2m1, two in a byte, an e4m3 scale per 16 values of a row and a float32 scale per head.

The head's scale is a power of two, the smallest with which the scales of the head's blocks fit into e4m3. A value is
off by at most 0.18 of its block's largest (half the distance of the two largest numbers, 4 and 6, with the scale's own
rounding), and by 2^-17 of the head's largest, under which the scales of blocks vanish.
"""

import itertools
from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from replay_transformers.kernels.formats.base import Format
from replay_transformers.kernels.formats.fp8 import E4M3, power_scale

__all__ = ["Nvfp4"]

BLOCK = 16
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by code
# halfway between two neighbours; ties go to the even code
BOUNDS = tuple((low + high) / 2 for low, high in itertools.pairwise(NUMBERS))
SIXTH = 1 / 6  # as float32
SIGN = 8
# the largest is 6 * 448 = 1.3125 * 2^11
CARRY, EXPONENT = 0x57FFFF, 11


class Nvfp4(Format):
    """``values`` uint8 ``[channels, n / 2]``, ``scales`` uint8 ``[channels, n / 16]``, ``head_scales`` float32 ``[1]``.

    ``n`` is the number of states, rounded up to a whole block. The first of two values has the lower four bits.
    """

    tiles = "nvfp4_tiles"
    needs_head = True

    def __init__(self, name: str) -> None:
        self.name = name

    def parts(self, channels: int, states: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of one head by name."""
        blocks = -(-states // BLOCK)
        return {
            "values": ((channels, blocks * BLOCK // 2), torch.uint8),
            "scales": ((channels, blocks), torch.uint8),
            "head_scales": ((1,), torch.float32),
        }

    def encode(self, values: torch.Tensor, bits: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The parts of float32 values; a head with one that is not finite decodes to NaN."""
        magnitude = pad(values.abs(), (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        largest = magnitude.amax(-1)
        head_scale = power_scale(largest.amax((-2, -1)), CARRY, EXPONENT)[..., None, None]
        is_finite = head_scale.isfinite()
        scales = torch.where(is_finite, largest * (1 / head_scale) * SIXTH, 0.0).to(E4M3)
        unit = torch.where(is_finite, scales.to(torch.float32) * head_scale, 0.0)[..., None]
        codes = torch.zeros_like(magnitude, dtype=torch.uint8)
        for code, bound in enumerate(BOUNDS):
            edge = unit * bound  # exact: few bits times a power of two
            codes += (magnitude >= edge if code % 2 else magnitude > edge).to(torch.uint8)
        codes = torch.where(unit > 0, codes, 0).flatten(-2)
        negative = pad(torch.signbit(values), (0, codes.shape[-1] - values.shape[-1]))
        codes = codes + negative.to(torch.uint8) * SIGN
        return {
            "values": codes[..., 0::2] | codes[..., 1::2] << 4,
            "scales": scales.view(torch.uint8),
            "head_scales": head_scale[..., 0],
        }

    def decode(self, parts: Mapping[str, torch.Tensor], states: int) -> torch.Tensor:
        """The values in float32."""
        packed = parts["values"]
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(torch.int64)
        numbers = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], device=packed.device)
        unit = parts["scales"].view(E4M3).to(torch.float32) * parts["head_scales"][..., None]
        return (numbers[codes].unflatten(-1, (-1, BLOCK)) * unit[..., None]).flatten(-2)[..., :states]
