"""What the launches of a step with any precision have in common."""

import math
from dataclasses import dataclass

import torch

from replay_transformers.kernels.formats import FORMATS
from replay_transformers.kernels.formats.base import Format
from replay_transformers.kernels.formats.plain import PlainFormat
from replay_transformers.kernels.formats.stored import State, StoredState
from replay_transformers.kernels.validation import DTYPES

__all__ = ["Precision", "check_stored", "parts_of", "pointers"]

NAMES = {made.dtype: name for name, made in FORMATS.items() if isinstance(made, PlainFormat)}


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
        return isinstance(self.read, PlainFormat) and not self.decay_skip

    @property
    def needs_heads(self) -> bool:
        """Whether a fold must have all channels of a head in one program."""
        return any(form.needs_head for form in self.written)

    @property
    def least_log(self) -> float:
        """The logarithm of ``decay_skip``."""
        return math.log(self.decay_skip) if self.decay_skip else 0.0


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


def check_stored(name: str, state: State | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless a state is one of this shape ``[B, H, ., .]`` on the device, and laid out for kernels."""
    if isinstance(state, StoredState):
        rows, heads, *rest = shape
        channels, states = reversed(rest) if state.transposed else rest
        expected = {part: (rows, heads, *one) for part, (one, _) in state.format.parts(channels, states).items()}
        tensors = state.parts
    else:
        expected, tensors = {"": shape}, {} if state is None else {"": state}
    for part, tensor in tensors.items():
        label = f"{name}.{part}" if part else name
        if tuple(tensor.shape) != tuple(expected[part]):
            raise ValueError(f"{label} must have shape {list(expected[part])}, got {list(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{label} must be on {device} like the other tensors, got {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{label} is written in place and must be contiguous, got strides {tensor.stride()}")
        if isinstance(state, torch.Tensor) and tensor.dtype not in DTYPES:
            raise ValueError(
                f"{label} must be {' or '.join(map(str, DTYPES))} for the Triton kernels, got {tensor.dtype}; the "
                "reference takes float64 as well"
            )
