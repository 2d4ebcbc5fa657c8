"""Storing a state in a narrower dtype."""

import torch

__all__ = ["bounded", "store"]


def store(state: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into ``state``, **in place**, once, without autograd.

    Rounds to nearest. Values beyond float16's largest (65,504) are stored as the largest instead of as infinity, from
    which a recurrence never recovers. What is not finite stays so, for outputs and `ReplayCache.check_finite` to show.

    Args:
        state: the destination, any float dtype.
        values: same shape, in the compute dtype.
    """
    with torch.no_grad():
        state.copy_(bounded(values, state.dtype))


def bounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values, finite ones beyond float16's largest as the largest if that is the dtype they are meant for."""
    if dtype != torch.float16:
        return values
    limit = torch.finfo(torch.float16).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit))
