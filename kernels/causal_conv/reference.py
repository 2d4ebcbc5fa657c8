"""Plain PyTorch reference of the causal convolution with rollback by pointer."""

import torch

from replay_transformers.kernels.decay import at_least_float32
from replay_transformers.kernels.ring import gather_records, record_slots, write_records

__all__ = ["conv_step"]


def conv_step(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    ring: torch.Tensor,
    position: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Convolve ``T`` new tokens per row with the raw inputs before them, and remember the new inputs.

    The left context of a token is read from the ring at the positions before ``position``. Rejecting tokens is
    therefore nothing but calling again with an earlier ``position``: the context is what it would have been had the
    rejected tokens never been seen. Positions below zero count as zeros.

    Args:
        inputs: ``[B, T, D]``, any ``T >= 1``, any strides.
        weight: ``[D, W]``, tap ``W - 1`` multiplies the current token.
        bias: ``[D]`` or None.
        ring: ``[B, R, D]`` raw inputs, **mutated**: the last ``min(T, R)`` inputs are written. ``R >= W - 1``.
        position: int64 ``[B]``, the absolute position of the row's first new token.
        activation: ``"silu"`` or None.

    Returns:
        ``[B, T, D]`` in the dtype of ``inputs``; accumulated in float32 (float64 for float64 inputs).
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}; apply another one to the output")
    tokens, taps, capacity = inputs.shape[1], weight.shape[1], ring.shape[1]
    compute = at_least_float32(inputs.dtype)

    first = position - (taps - 1)
    context_position = first[:, None] + torch.arange(taps - 1, device=first.device)
    context = gather_records(ring, record_slots(first, taps - 1, capacity), context_position >= 0, dim=1)
    padded = torch.cat([context, inputs], dim=1).to(compute)

    kept = min(tokens, capacity)
    slots = record_slots(position + (tokens - kept), kept, capacity)
    write_records(ring, slots, inputs[:, tokens - kept :], dim=1)

    taps_weight = weight.to(compute)
    output = padded[:, :tokens] * taps_weight[:, 0]
    for tap in range(1, taps):
        output = output + padded[:, tap : tap + tokens] * taps_weight[:, tap]
    if bias is not None:
        output = output + bias.to(compute)
    if activation == "silu":
        output = torch.nn.functional.silu(output)
    return output.to(inputs.dtype)
