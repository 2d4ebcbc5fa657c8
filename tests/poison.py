"""Makes uninitialised memory visible: NaN in floating-point dtypes, the byte 0x5A repeated in integers, True in bool.

Freshly mapped memory is usually zero, so code that reads what it never wrote passes by luck. `wrappers` replaces the
functions through which Python code allocates such memory. Tracing sees the originals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

INTEGER_BYTE = b"\x5a"


def fill_value(dtype: torch.dtype) -> float | int | bool:
    """The value that marks memory of this dtype as never written."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    return int.from_bytes(INTEGER_BYTE * dtype.itemsize, "little")


def fill(tensor: torch.Tensor) -> None:
    """Overwrite an ordinary tensor in place; leave fake, sparse and meta tensors and dtypes without fill_ alone."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return
    if _get_current_dispatch_mode() is not None or torch.jit.is_tracing():
        return
    try:
        with torch.no_grad():
            tensor.fill_(fill_value(tensor.dtype))
    except (NotImplementedError, RuntimeError):
        if tensor.dtype.itemsize > 1:  # only some packed one-byte formats have no fill_
            raise


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an allocating function so that what it returns is filled."""

    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return allocate(*args, **kwargs)
        tensor = allocate(*args, **kwargs)
        fill(tensor)
        return tensor

    return wrapper


# Made once: compiled code is guarded by the identity of the functions it calls.
wrappers: list[tuple[Any, str, Callable[..., torch.Tensor]]] = [
    (owner, name, poisoned(getattr(owner, name)))
    for owner, names in {
        torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
        torch.Tensor: ("new_empty", "new_empty_strided"),
    }.items()
    for name in names
]
