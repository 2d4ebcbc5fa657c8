"""The argument of `ReplayCache.crop`."""

from numbers import Integral
from typing import Any

import torch

__all__ = ["rejected_tokens"]


def rejected_tokens(tokens_to_remove: Any, rows: int) -> tuple[torch.Tensor, int | None]:
    """How many tokens to reject, out of what `crop` was given.

    Args:
        tokens_to_remove: 0 or a negative int, or an int64 tensor of such values, 0-d or ``[B]``.
        rows: of the cache; -1 if it has none yet.

    Returns:
        int64, 0 or more, 0-d, ``[1]`` or ``[B]``, on the CPU; and as an int if it is the same for all rows, else None.

    Raises:
        ValueError: anything else.
    """
    if isinstance(tokens_to_remove, torch.Tensor):
        if tokens_to_remove.dtype != torch.int64 or tokens_to_remove.ndim > 1:
            raise ValueError(
                f"crop takes an int or an int64 tensor [B], got {tokens_to_remove.dtype} of shape "
                f"{tuple(tokens_to_remove.shape)}"
            )
        if tokens_to_remove.ndim == 1 and tokens_to_remove.shape[0] != rows:
            raise ValueError(f"crop got {tokens_to_remove.shape[0]} values for the {max(rows, 0)} rows of the cache")
        values = tokens_to_remove.tolist()
        values = values if isinstance(values, list) else [values]
    elif isinstance(tokens_to_remove, Integral) and not isinstance(tokens_to_remove, bool):
        values = [int(tokens_to_remove)]
    else:
        raise ValueError(f"crop takes an int or an int64 tensor [B], got {type(tokens_to_remove).__name__}")
    if max(values) > 0:
        raise ValueError(
            f"crop takes the number of tokens to remove as 0 or a negative int, got {max(values)}; to keep the "
            "first n tokens pass n - cache.get_seq_length()"
        )
    return -torch.tensor(values, dtype=torch.int64), -values[0] if len(set(values)) == 1 else None
