"""Position arithmetic of the ring buffers, shared by every operator.

A row's records carry absolute positions, counted from the last reset. The record of position ``p`` lies in slot
``p mod capacity``. The row's live records start at ``base`` and are numbered by *age*, the oldest having age 0.
"""

import torch

__all__ = ["gather_records", "live_records", "record_slots", "rows_due", "write_records"]


def rows_due(
    committed: torch.Tensor, pending: torch.Tensor, tokens: int, window: int, early: torch.Tensor
) -> torch.Tensor:
    """The flush rule: which rows fold their committed records in a forward of ``tokens`` tokens.

    Args:
        committed: int64 ``[B]``, records committed since the row's last flush.
        pending: int64 ``[B]``, records appended and not committed yet.
        tokens: tokens per row in this forward.
        window: the cache's window, in tokens.
        early: int64 ``[B]``, by how many tokens the row's present window is shorter than ``window``.

    Returns:
        bool ``[B]``. It depends on nothing but the cursor and ``tokens``, so it is known before the forward runs.
    """
    return committed + pending + tokens + early > window


def live_records(first: torch.Tensor, end: torch.Tensor, capacity: int) -> torch.Tensor:
    """Which ages lie from ``first`` up to and without ``end`` (int64 ``[B]``): bool ``[B, capacity]``."""
    age = torch.arange(capacity, device=end.device)
    return (age >= first[:, None]) & (age < end[:, None])


def record_slots(start: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    """Slots of the positions ``start .. start + length - 1``.

    Args:
        start: int64 ``[B]``, absolute positions. Negative ones wrap like any other; the caller masks them.
        length: number of slots per row.
        capacity: slots in the ring.

    Returns:
        int64 ``[B, length]``, values in ``0 .. capacity - 1``.
    """
    offsets = torch.arange(length, device=start.device)
    return torch.remainder(start[:, None] + offsets, capacity)


def _expand_slots(slots: torch.Tensor, ring: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * ring.ndim
    shape[0], shape[dim] = slots.shape
    size = list(ring.shape)
    size[dim] = slots.shape[1]
    return slots.view(shape).expand(size)


def gather_records(ring: torch.Tensor, slots: torch.Tensor, live: torch.Tensor, dim: int) -> torch.Tensor:
    """Copy records out of a ring in the order of ``slots``; dead ones come out as zero.

    Args:
        ring: ``[B, ..., capacity, ...]`` with the slots along ``dim``.
        slots: int64 ``[B, n]``.
        live: bool ``[B, n]``. Dead entries are dropped by selection, so whatever they hold (NaN included) stays there.
        dim: the ring's slot dimension, 1 or more.

    Returns:
        A new tensor shaped like ``ring`` with ``n`` along ``dim``.
    """
    index = _expand_slots(slots, ring, dim)
    shape = [1] * ring.ndim
    shape[0], shape[dim] = live.shape
    return torch.where(live.view(shape), ring.gather(dim, index), torch.zeros((), dtype=ring.dtype, device=ring.device))


def write_records(ring: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, dim: int) -> None:
    """Write ``values`` into ``slots`` of ``ring``, in place. The values are detached and cast to the ring's dtype."""
    with torch.no_grad():
        ring.scatter_(dim, _expand_slots(slots, ring, dim), values.detach().to(ring.dtype))
