"""Layouts of heads: some tensors have one entry per head, others one per group of consecutive heads that share it."""

import torch

__all__ = ["by_group", "heads_first", "read_state", "scale_scores"]


def heads_first(*tensors: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """``[B, T, heads, ...]`` -> ``[B, heads, T, ...]`` in the compute dtype."""
    return [tensor.transpose(1, 2).to(dtype) for tensor in tensors]


def by_group(heads: torch.Tensor, groups: int) -> torch.Tensor:
    """``[B, heads, ...]`` -> ``[B, groups, heads / groups, ...]``."""
    return heads.unflatten(1, (groups, heads.shape[1] // groups))


def read_state(state: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """States ``[B, heads, P, N]`` times their groups' vectors ``[B, groups, n, N]`` -> ``[B, heads, n, P]``."""
    rows = by_group(state, vectors.shape[1]).flatten(2, 3)
    product = rows @ vectors.transpose(-1, -2)
    return product.view(*state.shape[:3], vectors.shape[2]).transpose(-1, -2)


def scale_scores(weights: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Weights ``[B, heads, t, j]`` times their group's scores ``[B, groups, t, j]`` -> ``[B, heads, t, j]``."""
    return (by_group(weights, scores.shape[1]) * scores[:, :, None]).flatten(1, 2)
