"""What the launches of a step with any precision have in common."""

import math
from dataclasses import dataclass

import torch

from replay_transformers.kernels.formats import FORMATS
from replay_transformers.kernels.formats.base import Format
from replay_transformers.kernels.formats.plain import PlainFormat
from replay_transformers.kernels.formats.stored import State, StoredState

__all__ = [
    "NARROW_BLOCK",
    "NARROW_STAGES",
    "NARROW_WARPS",
    "Operands",
    "Precision",
    "parts_of",
    "pointers",
    "state_operands",
    "tiles_per_program",
]

NAMES = {made.dtype: name for name, made in FORMATS.items() if isinstance(made, PlainFormat)}
# where matrix units multiply narrow states: channels of a tile, warps of a program, tiles that it has under way, and
# how many programs there should be, of more than one tile if these are enough
NARROW_BLOCK, NARROW_WARPS, NARROW_STAGES, NARROW_PROGRAMS = 16, 1, 3, 16384


@dataclass(frozen=True)
class Precision:
    """Formats of the checkpoint and of the copy that is read, by name.

    Args:
        readout: "" without a copy.
        key: 64 bits, of stochastic rounding.
        decay_skip: as in `ReplayConfig`.
    """

    checkpoint: str
    readout: str = ""
    key: int = 0
    decay_skip: float = 0.0

    @property
    def written(self) -> list[Format]:
        """What a fold writes."""
        return [FORMATS[name] for name in (self.checkpoint, self.readout) if name]

    @property
    def read(self) -> Format:
        """What a step reads."""
        return self.written[-1]

    @property
    def is_read_plainly(self) -> bool:
        """Whether the kernels for plain checkpoints can read it."""
        return isinstance(self.read, PlainFormat)

    @property
    def needs_heads(self) -> bool:
        """Whether a fold must have all channels of a head in one program."""
        return any(form.needs_head for form in self.written)

    @property
    def copies_heads(self) -> bool:
        """Whether only the copy needs all channels of a head: it can be made of what is stored."""
        return self.needs_heads and not self.written[0].needs_head

    @property
    def least_log(self) -> float:
        """The logarithm of ``decay_skip``."""
        return math.log(self.decay_skip) if self.decay_skip else 0.0


def tiles_per_program(heads: int, channels: int) -> int:
    """Tiles of NARROW_BLOCK channels that a program goes through, where there are ``heads`` heads in all rows."""
    tiles = -(-channels // NARROW_BLOCK)
    return -(-tiles // min(tiles, -(-NARROW_PROGRAMS // heads)))


def parts_of(state: State | None) -> tuple[str, list[torch.Tensor]]:
    """Name and parts of a state's format; an empty name if there is none."""
    if state is None:
        return "", []
    if isinstance(state, StoredState):
        return state.format.name, list(state.parts.values())
    return NAMES.get(state.dtype, str(state.dtype)), [state]


def pointers(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """``values, scales, head_scales`` for a kernel; where a format has fewer, the values again."""
    return parts + parts[:1] * (3 - len(parts))


@dataclass(frozen=True)
class Operands:
    """States as `check_operands` takes them: shapes, and dtypes where they are a format's own, by name."""

    shapes: dict[str, tuple[torch.Tensor, tuple[int, ...]]]
    dtypes: dict[str, torch.dtype]


def state_operands(shape: tuple[int, int, int, int], transposed: bool, **states: State | None) -> Operands:
    """Of states for rows and heads of this shape ``[B, H, ., .]``; a part of a state is called ``name.part``.

    Args:
        transposed: whether the last two are states and channels, not channels and states.

    Raises:
        ValueError: a `StoredState` that has them the other way round.
    """
    operands = Operands({}, {})
    channels, count = shape[:1:-1] if transposed else shape[2:]
    for name, state in states.items():
        if isinstance(state, torch.Tensor):
            operands.shapes[name] = (state, shape)
        elif state is not None:
            if state.transposed != transposed:
                raise ValueError(f"{name} must be a StoredState with transposed={transposed}, got {state.transposed}")
            for part, (own, dtype) in state.format.parts(channels, count).items():
                operands.shapes[f"{name}.{part}"] = (state.parts[part], (*shape[:2], *own))
                operands.dtypes[f"{name}.{part}"] = dtype
    return operands
