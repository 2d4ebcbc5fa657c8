"""The convolution with its context in a ring, against a plain convolution of the tokens a row has really seen.

float64: at most five products of order one are summed, each within 2.2e-16; the tolerance is 1e-13.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from replay_transformers.kernels.causal_conv.reference import conv_step
from tests.kernels.oracles import convolution

TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-13}
CHANNELS = 6


class Rows:
    """Rows that see different numbers of tokens, and what each has seen."""

    def __init__(self, taps: int, capacity: int, rows: int = 3, activation: str | None = "silu") -> None:
        self.weight = torch.randn(CHANNELS, taps, dtype=torch.float64)
        self.bias = torch.randn(CHANNELS, dtype=torch.float64) if activation else None
        self.ring = torch.zeros(rows, capacity, CHANNELS, dtype=torch.float64)
        self.activation = activation
        self.seen = [torch.zeros(0, CHANNELS, dtype=torch.float64) for _ in range(rows)]

    def append(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and truth."""
        position = torch.tensor([len(row) for row in self.seen])
        output = conv_step(
            inputs, self.weight, self.bias, ring=self.ring, position=position, activation=self.activation
        )
        self.seen = [torch.cat([row, new]) for row, new in zip(self.seen, inputs, strict=True)]
        whole = [convolution(row, self.weight, self.bias, self.activation) for row in self.seen]
        return output, torch.stack([row[-inputs.shape[1] :] for row in whole])

    def reject(self, row: int, count: int) -> None:
        """As if the row had never seen its last ``count`` tokens."""
        self.seen[row] = self.seen[row][: len(self.seen[row]) - count]

    def draw(self, count: int) -> torch.Tensor:
        """New inputs."""
        return torch.randn(len(self.seen), count, CHANNELS, dtype=torch.float64)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_equals_a_plain_convolution(taps: int, activation: str | None) -> None:
    """Blocks of every length, shorter than the kernel at first and longer than the ring later; rejections between."""
    rows = Rows(taps, capacity=11, activation=activation)
    for count in [1, 1, 2, *(random.choice([1, 2, 3, 4, 8, 20]) for _ in range(25))]:
        output, truth = rows.append(rows.draw(count))
        torch.testing.assert_close(output, truth, **TOLERANCE)
        for row in range(3):
            rows.reject(row, random.randint(0, min(count, 11 - (taps - 1))))
    assert len({len(row) for row in rows.seen}) > 1
    assert min(len(row) for row in rows.seen) > 2 * 11


@pytest.mark.parametrize("start", [0, 2, 9])
@pytest.mark.parametrize("accepted", range(7))
def test_rollback_restores_the_context(accepted: int, start: int) -> None:
    """Accepted counts below, at and above kernel - 1 = 3, after prompts shorter and longer than the kernel."""
    rows = Rows(taps=4, capacity=6 + 3, rows=1)
    if start:
        rows.append(rows.draw(start))
    rows.append(rows.draw(6))
    rows.reject(0, 6 - accepted)
    for count in (1, 1, 1, 1, 5):
        output, truth = rows.append(rows.draw(count))
        torch.testing.assert_close(output, truth, **TOLERANCE)


def test_dead_slots_are_never_read() -> None:
    """NaN everywhere but in the three inputs before the new ones: the same bits."""
    runs = []
    for poisoned in (False, True):
        torch.manual_seed(1)
        rows = Rows(taps=4, capacity=9, rows=2)
        outputs = []
        for count in (1, 1, 4, 1, 12, 2, 1, 9, 1):
            if poisoned:
                for row, seen in enumerate(rows.seen):
                    context = {(len(seen) - back) % 9 for back in range(1, 4) if len(seen) >= back}
                    dead = [slot for slot in range(9) if slot not in context]
                    rows.ring[row, dead] = float("nan")
            output, _ = rows.append(rows.draw(count))
            outputs.append(output)
            rows.reject(1, count // 3)
        runs.append(outputs)
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def test_rejected_inputs_may_be_anything() -> None:
    """NaN among the rejected tokens reaches nothing after them."""
    rows = Rows(taps=4, capacity=9, rows=1)
    rows.append(rows.draw(5))
    draft = rows.draw(4)
    draft[:, 1:] = float("nan")
    rows.append(draft)
    rows.reject(0, 3)
    for _ in range(4):
        output, truth = rows.append(rows.draw(1))
        torch.testing.assert_close(output, truth, **TOLERANCE)


def test_strided_inputs() -> None:
    """A slice of a projection stored time first."""
    one, two = Rows(4, 9), Rows(4, 9)
    two.weight, two.bias = one.weight, one.bias
    for count in (2, 1, 12, 3):
        inputs = one.draw(count)
        buffer = torch.full((count, 3, CHANNELS + 5), float("nan"), dtype=torch.float64)
        view = buffer.transpose(0, 1)[..., 2 : 2 + CHANNELS]
        view.copy_(inputs)
        assert not view.is_contiguous()
        torch.testing.assert_close(two.append(view)[0], one.append(inputs)[0], **TOLERANCE)
        assert torch.equal(one.ring, two.ring)


def test_narrow_inputs_are_rounded_once() -> None:
    """bfloat16: half a unit in the last of 8 bits, 2**-8 of the value; the ring keeps the inputs as they came."""
    weight, ring = torch.randn(CHANNELS, 4), torch.zeros(1, 9, CHANNELS, dtype=torch.bfloat16)
    inputs = torch.randn(1, 7, CHANNELS).bfloat16()
    output = conv_step(inputs, weight, None, ring=ring, position=torch.tensor([0]))
    truth = convolution(inputs[0], weight, None, "silu")
    assert output.dtype == torch.bfloat16
    assert ((output[0].double() - truth).abs() <= 2**-8 * truth.abs() + 1e-6).all()
    assert torch.equal(ring[:, :7], inputs)


def test_gradients_reach_the_inputs_and_not_the_ring() -> None:
    weight = torch.randn(CHANNELS, 4, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(1, 3, CHANNELS, dtype=torch.float64, requires_grad=True)
    history = torch.randn(1, 9, CHANNELS, dtype=torch.float64)

    def output(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ring = history.clone()
        result = conv_step(inputs, weight, None, ring=ring, position=torch.tensor([13]))
        assert not ring.requires_grad
        return result

    assert torch.autograd.gradcheck(output, (inputs, weight))


def test_unknown_activations_are_refused() -> None:
    inputs, weight, ring = torch.ones(1, 1, CHANNELS), torch.ones(CHANNELS, 4), torch.zeros(1, 9, CHANNELS)
    with pytest.raises(ValueError, match="'silu' or None, got 'gelu'"):
        conv_step(inputs, weight, None, ring=ring, position=torch.tensor([0]), activation="gelu")
    assert (ring == 0).all()
