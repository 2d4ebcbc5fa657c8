"""Checks of what the Triton kernels are given, before anything is launched."""

from collections.abc import Mapping

import torch

__all__ = ["DTYPES", "FAR", "POINTERS", "check_groups", "check_operands", "heads_per_program", "is_far", "power_of_two"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POINTERS = ("base", "committed", "pending", "folds")
FAR = 2**31  # elements from a tensor's first one, whose distance needs int64


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 or more)."""
    return 1 << (n - 1).bit_length()


def heads_per_program(limit: int, group: int) -> int:
    """The largest divisor of ``group``, heads that share something, that is at most ``limit``."""
    return max(divisor for divisor in range(1, min(limit, group) + 1) if group % divisor == 0)


def is_far(*tensors: torch.Tensor) -> bool:
    """Whether an element of one of them lies so far from its first one that a kernel must count in int64."""
    return any(
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) >= FAR
        for tensor in tensors
    )


def check_groups(heads: int, groups: int) -> None:
    """Raise ValueError unless every group has the same number of heads."""
    if heads % groups:
        raise ValueError(f"{heads} heads must be a multiple of the groups (key heads) that they share, got {groups}")


def check_operands(
    shapes: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]],
    buffers: tuple[str, ...],
    pointers: tuple[str, ...],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Raise ValueError unless every tensor has its shape, a dtype the kernels know, and one device for all.

    Args:
        shapes: by name, the tensor and the shape it should have.
        buffers: names of those that must be contiguous; tensors of one dimension must be so, too.
        pointers: names of those that must be int64; all others must be float32, bfloat16 or float16.
        dtypes: of those that must be something else, by name.
    """
    device = next(iter(shapes.values()))[0].device
    for name, (tensor, shape) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        allowed: tuple[torch.dtype, ...] = (torch.int64,) if name in pointers else DTYPES
        if dtypes is not None and name in dtypes:
            allowed = (dtypes[name],)
        if tensor.dtype not in allowed:
            raise ValueError(
                f"{name} must be {' or '.join(map(str, allowed))} for the Triton kernels, got {tensor.dtype}; the "
                "reference takes float64 as well"
            )
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device} like the other tensors, got {tensor.device}")
        if name in buffers and not tensor.is_contiguous():
            raise ValueError(f"{name} is written in place and must be contiguous, got strides {tensor.stride()}")
        if tensor.ndim == 1 and not tensor.is_contiguous():
            raise ValueError(f"{name} has one dimension and must be contiguous, got stride {tensor.stride(0)}")
