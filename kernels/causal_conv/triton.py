"""Triton kernel of the causal convolution with rollback by pointer."""

import torch
import triton
import triton.language as tl

from replay_transformers.kernels.launch import choose, on_their_device
from replay_transformers.kernels.parts import MAX_TOKENS
from replay_transformers.kernels.ring import record_slots, write_records
from replay_transformers.kernels.validation import check_operands, power_of_two

__all__ = ["conv_step"]

PART = 16  # tokens per program of a long convolution


@triton.jit
def _convolve(
    inputs, weight, bias, ring, position, out,
    in_row, in_token, in_channel, weight_channel, weight_tap,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (CHANNELS + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // blocks).to(tl.int64)
    d = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = d < CHANNELS
    at = tl.load(position + row)
    # slot of the first new token; the earliest of the context is TAPS - 1 before it
    slot = (at % CAPACITY).to(tl.int32)
    raw = inputs + row * in_row + d * in_channel
    memory = ring + row * (CAPACITY * CHANNELS) + d
    # all loads come before the first store, which they might alias as far as the compiler knows
    own, values, factors = (), (), ()
    for t in tl.static_range(TOKENS):
        own += (tl.load(raw + t * in_token, mask=ok, other=0.0),)  # type: ignore[assignment]
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + d * weight_channel + tap * weight_tap, mask=ok, other=0.0)
        factors += (factor.to(tl.float32),)  # type: ignore[assignment]
    for age in tl.static_range(1 - TAPS, 0):
        place = slot + age
        place = tl.where(place < 0, place + CAPACITY, place)
        known = tl.load(memory + place * CHANNELS, mask=ok, other=0.0).to(tl.float32)
        values += (tl.where(at + age >= 0, known, 0.0),)  # type: ignore[assignment]
    for t in tl.static_range(TOKENS):
        values += (own[t].to(tl.float32),)  # type: ignore[assignment]
    start = tl.zeros([BLOCK_D], tl.float32)
    if HAS_BIAS:
        start = tl.load(bias + d, mask=ok, other=0.0).to(tl.float32)
    for t in tl.static_range(TOKENS):
        total = start
        for tap in tl.static_range(TAPS):
            total += factors[tap] * values[t + tap]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + (row * TOKENS + t) * CHANNELS + d, total.to(out.dtype.element_ty), mask=ok)
    # no slot of the context is among those written: CAPACITY >= TOKENS + TAPS - 1
    for t in tl.static_range(TOKENS):
        place = slot + t
        place = tl.where(place >= CAPACITY, place - CAPACITY, place)
        tl.store(memory + place * CHANNELS, own[t], mask=ok)


@triton.jit
def _convolve_long(
    inputs, weight, bias, ring, position, out,
    in_row, in_token, in_channel, weight_channel, weight_tap, tokens,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, CAPACITY: tl.constexpr,
    PART: tl.constexpr, BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """PART tokens per program; the ring is read only."""
    blocks: tl.constexpr = (CHANNELS + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // blocks).to(tl.int64)
    d = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = d < CHANNELS
    at = tl.load(position + row)
    slot = (at % CAPACITY).to(tl.int32)
    begin = tl.program_id(1) * PART
    raw = inputs + row * in_row + begin.to(tl.int64) * in_token + d * in_channel
    memory = ring + row * (CAPACITY * CHANNELS) + d
    results = out + (row * tokens + begin) * CHANNELS + d
    for t in tl.range(0, tl.minimum(PART, tokens - begin)):
        total = tl.zeros([BLOCK_D], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + d, mask=ok, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            factor = tl.load(weight + d * weight_channel + tap * weight_tap, mask=ok, other=0.0).to(tl.float32)
            age = t + tap - (TAPS - 1)  # among this program's tokens
            if begin + age >= 0:
                total += factor * tl.load(raw + age * in_token, mask=ok, other=0.0).to(tl.float32)
            else:
                place = slot + age
                place = tl.where(place < 0, place + CAPACITY, place)
                value = tl.load(memory + place * CHANNELS, mask=ok, other=0.0).to(tl.float32)
                total += factor * tl.where(at + age >= 0, value, 0.0)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(results + t * CHANNELS, total.to(out.dtype.element_ty), mask=ok)


@on_their_device
def _launch(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ring: torch.Tensor,
    position: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    rows, tokens, channels = inputs.shape
    out = torch.empty(rows, tokens, channels, dtype=inputs.dtype, device=inputs.device)
    chosen = choose("causal_conv", inputs.device, rows * channels, tokens)
    block, taps, capacity = min(chosen.block, power_of_two(channels)), weight.shape[1], ring.shape[1]
    if tokens > min(MAX_TOKENS, capacity - taps + 1):
        _convolve_long[rows * triton.cdiv(channels, block), triton.cdiv(tokens, PART)](
            inputs, weight, bias, ring, position, out, *inputs.stride(), *weight.stride(), tokens,
            CHANNELS=channels, TAPS=taps, CAPACITY=capacity,
            PART=PART, BLOCK_D=block, HAS_BIAS=bias is not None, SILU=silu, num_warps=chosen.warps,
        )  # fmt: skip
        kept = min(tokens, capacity)
        slots = record_slots(position + (tokens - kept), kept, capacity)
        write_records(ring, slots, inputs[:, tokens - kept :], dim=1)
        return out
    _convolve[(rows * triton.cdiv(channels, block),)](
        inputs, weight, bias, ring, position, out, *inputs.stride(), *weight.stride(),
        TOKENS=tokens, CHANNELS=channels, TAPS=taps, CAPACITY=capacity,
        BLOCK_D=block, HAS_BIAS=bias is not None, SILU=silu, num_warps=chosen.warps,
    )  # fmt: skip
    return out


_operator = torch.library.custom_op("replay_transformers::causal_conv_step", _launch, mutates_args=("ring",))


@_operator.register_fake
def _(inputs: torch.Tensor, *operands: object) -> torch.Tensor:
    return inputs.new_empty(inputs.shape)


def conv_step(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    ring: torch.Tensor,
    position: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """The same as `replay_transformers.kernels.causal_conv.reference.conv_step`, on a GPU.

    Tensors may be float32, bfloat16 or float16; ``ring``, ``bias`` and ``position`` must be contiguous, the others
    may have any strides. Without gradients. Inside compiled graphs it is the operator
    ``replay_transformers::causal_conv_step``.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit; nothing is changed then.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}; apply another one to the output")
    rows, tokens, channels = inputs.shape
    taps, capacity = weight.shape[1], ring.shape[1]
    if torch.compiler.is_compiling():
        return _operator(inputs, weight, bias, ring, position, activation == "silu")
    expected = {
        "inputs": (inputs, (rows, tokens, channels)), "weight": (weight, (channels, taps)),
        "ring": (ring, (rows, capacity, channels)), "position": (position, (rows,)),
    }  # fmt: skip
    if bias is not None:
        expected["bias"] = (bias, (channels,))
    check_operands(expected, ("ring",), ("position",))
    return _launch(inputs, weight, bias, ring, position, activation == "silu")
