"""What a format of the recurrent state is."""

import functools
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace

import torch

__all__ = ["Format"]


class Format(ABC):
    """How the state of one head, ``[channels, states]``, is stored: a few tensors, the parts.

    A row of the state has the states of one value channel: what a read-out sums over. Encoding takes float32 values
    with any dimensions before these two, and so do the parts.

    Attributes:
        name: what `ReplayConfig` calls it.
        is_stochastic: it rounds by random bits.
        tiles: the module beside this one that has it for Triton, with the functions of `plain_tiles`.
        store: which of its functions writes.
        needs_head: it writes all channels of a head at once.
    """

    name: str
    is_stochastic: bool = False
    tiles: str
    store: str = "store"
    needs_head: bool = False

    @abstractmethod
    def parts(self, channels: int, states: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of one head by name, ``values`` first."""

    @abstractmethod
    def encode(self, values: torch.Tensor, bits: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The parts of float32 values ``[..., channels, states]``.

        Args:
            values: what to store. Where they are not finite the parts decode to NaN, in the whole row or head.
            bits: int64, the shape of the values, uniform from 0 to 2^32 - 1; for stochastic formats.
        """

    @abstractmethod
    def decode(self, parts: Mapping[str, torch.Tensor], states: int) -> torch.Tensor:
        """The values, float32 ``[..., channels, states]``, exactly as they are stored."""

    def kernels(self) -> SimpleNamespace:
        """Triton's functions ``load``, ``store``, ``opened``, ``vectors`` and ``products``."""
        return _functions(self.tiles, self.store)

    def head_bytes(self, channels: int, states: int) -> int:
        """Bytes of the parts of one head."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts(channels, states).values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@functools.cache
def _functions(tiles: str, store: str) -> SimpleNamespace:
    module = importlib.import_module(f"replay_transformers.kernels.formats.{tiles}")
    names = {name: name for name in ("load", "opened", "vectors", "products")} | {"store": store}
    return SimpleNamespace(**{name: getattr(module, function) for name, function in names.items()})
