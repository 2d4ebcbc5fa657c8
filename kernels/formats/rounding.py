"""Stochastic rounding, by random numbers that depend on what is rounded where and when, and on nothing else.

The bits come from Philox 4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a function of a
counter and a key, with 7 rounds, the fewest that the authors found to pass every test. There is no state that a
replayed graph would have to advance: the counter is the element, its row and head, and how many tokens the row has
folded.
"""

import torch

__all__ = ["philox", "round_stochastically", "state_bits"]

ROUNDS = 7
LOW = 0xFFFFFFFF  # of 32 bits; words are kept in int64
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the two halves of the key grow by in each round


def _high(a: int, b: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of a product of 32-bit words."""
    return ((a >> 16) * b + ((a & 0xFFFF) * b >> 16)) >> 16


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: int, rounds: int = ROUNDS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words per counter.

    Args:
        counter: four int64 tensors of 32-bit words, of shapes that broadcast. key: 64 bits.

    Returns:
        Four int64 tensors, uniform from 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & LOW, key >> 32 & LOW
    for _ in range(rounds):
        high, low = _high(MULTIPLIERS[1], c2), MULTIPLIERS[1] * c2 & LOW
        other_high, other_low = _high(MULTIPLIERS[0], c0), MULTIPLIERS[0] * c0 & LOW
        c0, c1, c2, c3 = high ^ c1 ^ k0, low, other_high ^ c3 ^ k1, other_low
        k0, k1 = k0 + WEYL[0] & LOW, k1 + WEYL[1] & LOW
    return c0, c1, c2, c3


def state_bits(
    positions: torch.Tensor, heads: int, channels: int, states: int, key: int, first: int = 0
) -> torch.Tensor:
    """A word per element of a batch of states, int64 ``[B, heads, channels, states]``.

    Args:
        positions: int64 ``[B]``, tokens that a row will have folded: another one at every flush.
        key: 64 bits; the layer's.
        first: the place of the first of these rows in the batch.
    """
    device = positions.device
    element = torch.arange(channels * states, device=device).view(channels, states)
    place = torch.arange(first * heads, (first + len(positions)) * heads, device=device).view(-1, heads, 1, 1)
    position = positions.view(-1, 1, 1, 1)
    return philox((element, place, position & LOW, position >> 32), key)[0]


def round_stochastically(values: torch.Tensor, bits: torch.Tensor, mantissa: int, smallest: float) -> torch.Tensor:
    """Float32 values of so many mantissa bits, up or down with the probability that makes the mean exact.

    Args:
        values: float32, finite. bits: int64, the same shape.
        mantissa: stored bits behind the leading one.
        smallest: the smallest normal number, a power of two; below it the step stays the same.

    Returns:
        float32; the target format has all of them.
    """
    magnitude = values.abs()
    # numbers below the smallest normal one get its exponent, and with it its step
    is_small = magnitude < smallest
    raised = torch.where(is_small, magnitude + smallest, magnitude)
    dropped = 23 - mantissa
    noise = (bits >> (32 - dropped)).to(torch.int32)
    word = (raised.view(torch.int32) + noise) & -(1 << dropped)
    rounded = word.view(torch.float32)
    return torch.copysign(torch.where(is_small, rounded - smallest, rounded), values)
