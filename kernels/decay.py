"""Sums of log-decays in the forms that stay exact.

The product of the decays between two tokens is always the exponential of *one* sum of logs of the tokens between them.
Exponentials of prefix sums are never multiplied or divided by each other: strong decay would overflow them within a
few tokens, and differences of long prefix sums cancel.
"""

import math

import torch

__all__ = ["at_least_float32", "is_forgotten", "segment_sums", "suffix_sums"]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a reference computes: float64 stays, everything narrower becomes float32."""
    return torch.promote_types(torch.float32, dtype)


def is_forgotten(logs: torch.Tensor, threshold: float) -> torch.Tensor:
    """Whether a state that is scaled by the exponential of these logs is scaled by less than ``threshold`` (> 0)."""
    return logs < math.log(threshold)


def suffix_sums(logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums from the right end.

    Args:
        logs: ``[..., n]`` log-decays, oldest first.

    Returns:
        ``(after, total)``: ``after[..., j]`` is the sum over ``i > j``, ``total`` (``[...]``) the whole sum.
    """
    inclusive = logs.flip(-1).cumsum(-1).flip(-1)
    after = torch.nn.functional.pad(inclusive[..., 1:], (0, 1))
    return after, inclusive[..., 0]


def segment_sums(logs: torch.Tensor) -> torch.Tensor:
    """Sums over every segment ``(j, t]``.

    Args:
        logs: ``[..., n]`` log-decays, oldest first.

    Returns:
        ``[..., n, n]`` with ``[..., t, j]`` the sum over ``j < i <= t``, and ``-inf`` for ``j > t``, so that its
        exponential is the causal decay mask.
    """
    n = logs.shape[-1]
    ones = torch.ones(n, n, dtype=torch.bool, device=logs.device)
    terms = logs[..., :, None].expand(*logs.shape, n).masked_fill(~ones.tril(-1), 0)
    return terms.cumsum(-2).masked_fill(~ones.tril(0), float("-inf"))
