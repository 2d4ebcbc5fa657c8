"""The convolution in Triton against its reference in float32 and float64, as `assert_as_good` has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replay_transformers.kernels.causal_conv import reference
from replay_transformers.kernels.launch import Launch, override
from tests.support.kernels import DEVICE, KERNELS, NAN, assert_as_good, bits

triton = KERNELS["causal_conv"]
CHANNELS = 6
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def make(
    count: int = 1, taps: int = 4, start: tuple[int, ...] = (9, 2**33 + 3), dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Arguments of `conv_step`; every slot but those of the context holds NaN."""
    capacity, rows = count + taps - 1, len(start)
    ring = torch.full((rows, capacity, CHANNELS), NAN)
    for row, first in enumerate(start):
        for position in range(max(0, first - taps + 1), first):
            ring[row, position % capacity] = torch.randn(CHANNELS)
    return {
        "inputs": torch.randn(rows, count, CHANNELS).to(DEVICE, dtype),
        "weight": torch.randn(CHANNELS, taps).to(DEVICE, dtype),
        "bias": torch.randn(CHANNELS).to(DEVICE, dtype),
        "ring": ring.to(DEVICE, dtype),
        "position": torch.tensor(start, device=DEVICE),
        "activation": "silu",
    }


def step(kernel: Any, case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and ring."""
    ring = case["ring"].clone()
    return kernel.conv_step(**{**case, "ring": ring}), ring


def check(case: dict[str, Any]) -> torch.Tensor:
    wide = {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in case.items()}
    (got, ring), (narrow, expected), (exact, _) = (
        step(k, c) for k, c in zip((triton, reference, reference), (case, case, wide), strict=True)
    )
    assert exact.isfinite().all()
    assert_as_good(got, exact, narrow)
    assert torch.equal(bits(ring), bits(expected))
    assert not torch.equal(bits(ring), bits(case["ring"]))
    return got


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize(("start", "dtype"), [((0, 5), "f32"), ((1, 2**31 - 2), "bf16"), ((2, 100), "f16")])
def test_tokens_and_positions(count: int, start: tuple[int, ...], dtype: str) -> None:
    """Rows whose context is partly before the first token, beside rows that ran over the end of the ring."""
    check(make(count, start=start, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("taps", [1, 2, 4, 5])
def test_taps_bias_and_activation(taps: int, biased: bool, activation: str | None) -> None:
    case = make(2, taps) | {"activation": activation}
    check(case if biased else case | {"bias": None})


@pytest.mark.parametrize("block", [1, 4, 256])
def test_blocks_of_channels(block: int) -> None:
    with override("causal_conv", Launch(block, 1)):
        check(make(2, start=(9,)))


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_inputs_of_a_silu() -> None:
    """Its exponential overflows far to the left and vanishes far to the right."""
    case = make(1) | {"bias": torch.tensor([-500.0, 500.0, -90.0, 90.0, -1e30, 1e30], device=DEVICE)}
    output, _ = step(triton, case)
    torch.testing.assert_close(output, step(reference, case)[0], rtol=1e-5, atol=1e-30)


def test_strided_inputs_and_weights() -> None:
    """A slice of a projection, rows and tokens swapped; the weight as a module has it; no stride of 1."""
    case = make(3)
    expected, ring = step(triton, case)
    inputs, weight = case["inputs"], case["weight"]
    buffer = torch.full((3, 2, 2 * CHANNELS + 5), NAN, device=DEVICE)
    view = buffer.transpose(0, 1)[..., 2 : 2 + CHANNELS]
    spaced = buffer.clone().transpose(0, 1)[..., 1 : 1 + 2 * CHANNELS : 2]
    for strided in (view, spaced):
        strided.copy_(inputs)
        assert not strided.is_contiguous()
        got, written = step(triton, case | {"inputs": strided, "weight": weight.t().contiguous().t()})
        assert torch.equal(got, expected)
        assert torch.equal(bits(written), bits(ring))


def test_rollback_is_an_earlier_position() -> None:
    """Rejected inputs, NaN among them, leave no trace."""
    case = make(4, start=(9, 1))
    draft = case["inputs"].clone()
    draft[:, 1:] = NAN
    triton.conv_step(**case | {"inputs": draft})
    check(case | {"inputs": torch.randn_like(draft[:, :2]), "position": case["position"] + 1})


@pytest.mark.parametrize("count", [4, 9, 16, 17, 35])
def test_more_tokens_than_the_ring_or_one_program_holds(count: int) -> None:
    """A ring of 6 slots: new inputs overwrite the context, which must have been read by then."""
    case = make(3, start=(2, 2**31 - 2))
    check(case | {"inputs": torch.randn(2, count, CHANNELS, device=DEVICE)})


def test_a_long_convolution_with_strides_and_without_bias() -> None:
    case = make(3) | {"bias": None, "activation": None}
    inputs = torch.randn(19, 2, CHANNELS + 3, device=DEVICE).transpose(0, 1)[..., :CHANNELS]
    check(case | {"inputs": inputs})
