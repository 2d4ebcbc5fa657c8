"""Storing a state in a narrower dtype."""

import torch

__all__ = ["store", "store_rows"]


def store(state: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into ``state``, **in place**, once, without autograd.

    Rounds to nearest. Values beyond float16's largest (65,504) are stored as the largest instead of as infinity, from
    which a recurrence never recovers; NaN stays NaN.

    Args:
        state: the destination, any float dtype.
        values: same shape, in the compute dtype.
    """
    with torch.no_grad():
        state.copy_(_bounded(values, state.dtype))


def store_rows(state: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
    """As `store`, for the chosen rows (bool ``[B]``) of ``[B, ...]`` tensors; the other rows keep their bytes."""
    mask = rows.view(-1, *[1] * (state.ndim - 1))
    with torch.no_grad():
        state.copy_(torch.where(mask, _bounded(values, state.dtype).to(state.dtype), state))


def _bounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float16:
        return values
    limit = torch.finfo(torch.float16).max
    return values.clamp(-limit, limit)
