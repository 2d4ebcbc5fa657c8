"""Pretended GPUs: tensors that say they are on "cuda:1" and lie in the CPU's memory, and everything that moves between.

Within `devices()` operations whose operands are on different devices raise as on real ones, copies between devices and
waits for a device are counted, and the numbers are those of the CPU, so that a model split over two pretended GPUs can
be compared with the same model on one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CPU = torch.device("cpu")
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put_.default)  # by lists as well, which torch moves to the device


class Placed(torch.Tensor):
    """A tensor on a pretended device.

    For torch's own code it is a tensor on the CPU, whose `device` says otherwise: builds without CUDA cannot make its
    devices the current one. Only `Devices` can compute with it.
    """

    held: torch.Tensor
    place: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor, place: torch.device | None = None, requires_grad: bool = False) -> Any:
        """``held`` as if it were on ``place``; without one a parameter, which accelerate makes like this."""
        if place is None:
            return torch.nn.Parameter(held, requires_grad=requires_grad)
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        new = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=CPU, **layout)  # type: ignore[attr-defined]
        new.held, new.place = held, place
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a pretended device outside of devices()")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it pretends to be."""
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether that is a GPU."""
        return self.place.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether that is none."""
        return self.place.type == "meta"

    def to(self, *args: Any, copy: bool = False, non_blocking: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """As of any tensor; torch's own would think it is on the CPU already."""
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype)
        args = tuple(value for value in args if not isinstance(value, bool))
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = device or self.device, dtype or self.dtype
        if not copy and (device, dtype) == (self.device, self.dtype):
            return self
        return aten._to_copy.default(self, dtype=dtype, device=device)

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        """On the host."""
        return self.to(CPU)

    def tolist(self) -> Any:
        """On the host."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed({tuple(self.shape)}, {self.dtype}, {self.place})"

    def __deepcopy__(self, memo: Any) -> Placed:
        return Placed(self.held.clone(), self.place)


class Devices(TorchDispatchMode):
    """Computes with tensors on pretended devices.

    Attributes:
        copies: how often a tensor went from one device to another: ``(from, to, dtype, shape)``.
        waits: how often the host asked a device for a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # torch does not look for a driver then
        self.copies: Counter[tuple[str, str, torch.dtype, tuple[int, ...]]] = Counter()
        self.waits = 0

    def __enter__(self) -> Devices:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes it on the host and copies
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*exc_info)

    def clear(self) -> None:
        """Count from now on."""
        self.copies.clear()
        self.waits = 0

    def pointers_moved(self, rows: int) -> Counter[tuple[str, str]]:
        """Copies of int64 ``[rows]`` by where they went: cursors, beams, accepted counts."""
        moved: Counter[tuple[str, str]] = Counter()
        for (start, end, dtype, shape), count in self.copies.items():
            if dtype == torch.int64 and shape == (rows,):
                moved[start, end] += count
        return moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        found = {tensor.device for tensor in tensors if tensor.ndim or tensor.device != CPU}
        target = kwargs.get("device")
        if func in INDEXING and tensors[0].device != CPU:
            found.discard(CPU)
        if func in COPIES:
            source = tensors[-1]
            target = tensors[0].device if func is aten.copy_.default or target is None else target
            if target != source.device:
                self.copies[str(source.device), str(target), source.dtype, tuple(source.shape)] += 1
                self.waits += target == CPU
        elif func is aten._local_scalar_dense.default:
            self.waits += isinstance(tensors[0], Placed)
        elif len(found) > 1:
            raise RuntimeError(f"expected all tensors to be on one device, {func} got {sorted(map(str, found))}")
        place = torch.device(target) if target is not None else next(iter(found), CPU)
        if "device" in kwargs:
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        known = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, Placed)}
        result = func(*_held(args), **{name: _held(value) for name, value in kwargs.items()})
        return result if place == CPU else _placed(result, place, known)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _held(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_held, value))
    return value.held if isinstance(value, Placed) else value


def _placed(value: Any, place: torch.device, known: dict[int, Placed]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_placed(one, place, known) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    same = known.get(id(value))
    return same if same is not None and same.place == place else Placed(value, place)


class _Event:
    """Of a device that has done everything at once."""

    def __init__(self, **options: Any) -> None: ...

    def record(self, *stream: Any) -> None:
        """Nothing to note."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@contextmanager
def devices() -> Iterator[Devices]:
    """Within the block "cuda:0", "cuda:1", ... exist."""
    replaced = [(torch.cuda, "current_stream", mock.Mock()), (torch.cuda, "Event", _Event), (torch, "Event", _Event)]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(Devices())
