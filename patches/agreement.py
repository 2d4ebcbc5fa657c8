"""Processes that share one model by tensor parallelism: what one of them decides, all do.

The model's outputs are the same in all of them. Random numbers, clocks and what a user's functions say need not be, and
processes that go on with different tokens wait for each other for ever.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["agreement"]


def agreement(model: Any) -> Callable[..., None] | None:
    """What overwrites tensors, **in place**, with those of the first process that shares the model.

    None for a model that is not shared.

    Raises:
        NotImplementedError: it is shared in a way that does not tell with whom.
    """
    size = getattr(model, "_tp_size", None) or 1
    if size == 1 or not dist.is_available() or not dist.is_initialized():
        return None
    group = _group(model, size)

    def agree(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)

    return agree


def _group(model: Any, size: int) -> Any:
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        return mesh["tp"].get_group()
    if mesh is not None and mesh.ndim == 1:
        return mesh.get_group()
    if dist.get_world_size() == size:
        return dist.group.WORLD
    raise NotImplementedError(
        f"{type(model).__name__} is split over {size} of {dist.get_world_size()} processes and does not say which: "
        "assisted generation needs a model that was loaded with a device mesh"
    )
