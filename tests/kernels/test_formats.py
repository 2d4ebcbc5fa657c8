"""Formats of the state: what they store exactly, how far off they are at most, how many bytes they take."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_transformers.kernels.formats import CHECKPOINTS, FORMATS, READOUTS, PlainFormat

NAN, INF = float("nan"), float("inf")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NARROW = [name for name in FORMATS if name not in ("float32", "float64")]
STOCHASTIC = ["float16_sr", "fp8_sr"]
SHAPES = [(3, 16), (2, 7), (80, 72), (5, 33), (1, 1)]  # channels and states, of which few are whole blocks of 16

EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
NARROW_FORMAT = pytest.mark.parametrize("name", NARROW)
STOCHASTIC_FORMAT = pytest.mark.parametrize("name", STOCHASTIC)
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random_bits(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A word per value."""
    return torch.randint(0, 2**32, values.shape, generator=torch.Generator().manual_seed(seed))


def through(name: str, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """What comes back of values ``[..., channels, states]``."""
    parts = FORMATS[name].encode(values, random_bits(values, seed) if FORMATS[name].is_stochastic else None)
    return FORMATS[name].decode(parts, values.shape[-1])


def by_block(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of the block of 16 that a value is in."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.shape[-1] % 16))
    largest = padded.unflatten(-1, (-1, 16)).amax(-1, keepdim=True)
    return largest.expand(*largest.shape[:-1], 16).flatten(-2)[..., : values.shape[-1]]


def bound(name: str, values: torch.Tensor) -> torch.Tensor:
    """How far off each value may be, in float64: half a step of the format, a whole one if it rounds by chance."""
    values = values.double()
    if name in ("float32", "float64"):
        return torch.zeros_like(values)
    factor = 2 if name in STOCHASTIC else 1
    if name == "bfloat16":  # its smallest number is 2^-133
        return torch.maximum(values.abs() * 2**-8, torch.tensor(2.0**-134))
    if name.startswith("float16"):
        step = torch.maximum(values.abs() * 2**-11, torch.tensor(2.0**-25)) * factor
        return torch.maximum(step, values.abs() - 65504)  # beyond the largest, the largest
    if name.startswith("fp8"):
        row = values.abs().amax(-1, keepdim=True)
        # scales begin at 2^-126: a step of 2^-9 of that is the least there is
        return torch.maximum(values.abs() * 2**-4, (row * 2**-17).clamp(min=2.0**-136)) * factor
    head = values.abs().amax((-2, -1), keepdim=True)
    return 0.18 * by_block(values) + (head * 2**-17).clamp(min=2.0**-133)


def assert_within(name: str, values: torch.Tensor) -> None:
    """What comes back is finite and within the format's bound."""
    got = through(name, values)
    assert got.dtype == (torch.float64 if name == "float64" else torch.float32)
    assert got.isfinite().all()
    excess = (got.double() - values.double()).abs() - bound(name, values)
    assert excess.max() <= 0, f"{values.flatten()[excess.argmax()]} became {got.flatten()[excess.argmax()]}"


def magnitudes(shape: tuple[int, ...], low: int, high: int, seed: int = 0) -> torch.Tensor:
    """Values of either sign, of magnitudes from 2^low to 2^high, all as likely."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return (torch.exp2(exponent) * torch.randn(shape, generator=generator).sign()).float()


@EVERY_SHAPE
@EVERY_FORMAT
def test_errors_are_within_the_stated_bound(name: str, shape: tuple[int, int]) -> None:
    """Of the order of 1, over many magnitudes in one row, denormal, and nearly as large as there are."""
    for low, high in ((-3, 3), (-30, 5), (-149, -120), (-40, 15), (90, 127)):
        assert_within(name, magnitudes((4, *shape), low, high))
    assert_within(name, torch.full(shape, 3e38))


@EVERY_SHAPE
@EVERY_FORMAT
def test_rows_of_very_different_sizes_in_one_head(name: str, shape: tuple[int, int]) -> None:
    sizes = torch.exp2(torch.linspace(-60, 10, shape[0]))[torch.randperm(shape[0]), None]
    assert_within(name, torch.randn(2, *shape) * sizes)


@EVERY_SHAPE
@EVERY_FORMAT
def test_a_single_value_among_zeros(name: str, shape: tuple[int, int]) -> None:
    """It comes back as well as any, and the zeros as zeros."""
    for place in range(0, shape[0] * shape[1], 1 + shape[0] * shape[1] // 40):
        values = torch.zeros(math.prod(shape))
        values[place] = -2.9
        values = values.view(shape)
        assert_within(name, values)
        assert through(name, values).count_nonzero() == 1


@settings(max_examples=40)
@given(
    st.sampled_from(list(FORMATS)),
    st.integers(1, 3),
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=20),
)
def test_any_values(name: str, channels: int, row: list[float]) -> None:
    """Bounded in every row, all of which are different."""
    values = torch.tensor(row, dtype=torch.float32)
    assert_within(name, torch.stack([values.roll(place) * 2.0**-place for place in range(channels)]))


def representable(name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Values of as few bits as every narrow format has, on a scale that is no power of two of the whole head's."""
    sign = torch.randint(0, 2, shape) * 2 - 1
    if name != "nvfp4":
        row = torch.exp2(torch.randint(-8, 7, (shape[0], 1)).float())
        return torch.randint(8, 16, shape) * torch.exp2(torch.randint(-6, 1, shape).float()) * row * sign / 8
    codes = torch.tensor(E2M1)[torch.randint(0, 8, shape)]
    codes[:, ::16] = 6.0  # the largest of each block
    blocks = -(-shape[1] // 16)
    scales = (
        torch.randint(8, 16, (shape[0], blocks)) * torch.exp2(torch.randint(-5, 3, (shape[0], blocks)).float())
    ) / 8
    return codes * scales.repeat_interleave(16, dim=1)[:, : shape[1]] * sign * 2.0**-11


@EVERY_SHAPE
@EVERY_FORMAT
def test_values_of_few_bits_are_exact(name: str, shape: tuple[int, int]) -> None:
    values = representable(name, shape)
    assert torch.equal(through(name, values), values)
    assert torch.equal(through(name, values * 2.0**-3), values * 2.0**-3)


@EVERY_SHAPE
@NARROW_FORMAT
def test_what_was_stored_is_stored_again_as_it_is(name: str, shape: tuple[int, int]) -> None:
    """Whatever the random bits; the first rounding does change something."""
    values = torch.randn(8, *shape)
    once = through(name, values)
    assert not torch.equal(once, values)
    assert torch.equal(through(name, once, seed=1), once)


@EVERY_FORMAT
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero(name: str, zero: float) -> None:
    """Of either sign, alone and beside others; a step that reads it gets zero."""
    alone = through(name, torch.full((2, 3, 20), zero))
    assert torch.equal(alone, torch.zeros(2, 3, 20))
    values = torch.randn(3, 20)
    values[:, 3:9] = zero
    got = through(name, values)
    assert torch.equal(got[:, 3:9], torch.zeros(3, 6))
    query = torch.randn(20).to(got.dtype)
    assert torch.equal((got + 0.0) @ query, got @ query)


@EVERY_FORMAT
def test_the_sign_of_a_value_does_not_matter(name: str) -> None:
    values = magnitudes((4, 5, 40), -20, 10)
    assert torch.equal(through(name, -values), -through(name, values))


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["fp8", "fp8_sr", "nvfp4"])
def test_what_is_not_finite_decodes_to_nan_where_it_shares_a_scale(name: str, wrong: float) -> None:
    """A row of fp8, a head of NVFP4; all others keep their values."""
    values = torch.randn(3, 4, 40)
    clean = through(name, values)
    values[1, 2, 17] = wrong
    got = through(name, values)
    lost = torch.zeros(3, 4, dtype=torch.bool)
    lost[(1, 2) if name != "nvfp4" else 1] = True
    assert got[lost].isnan().all()
    assert torch.equal(got[~lost], clean[~lost])


@pytest.mark.parametrize("name", ["float16", "float16_sr"])
def test_float16_saturates_and_keeps_what_is_not_finite(name: str) -> None:
    got = through(name, torch.tensor([[INF, -INF, 1e6, -65520.0, 65504.0, NAN, 1.0]]))
    expected = torch.tensor([[INF, -INF, 65504.0, -65504.0, 65504.0, NAN, 1.0]])
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "wrong"), [("bfloat16", NAN), ("bfloat16", INF), ("float32", NAN), ("float32", INF)])
def test_wide_formats_keep_what_is_not_finite(name: str, wrong: float) -> None:
    values = torch.tensor([[wrong, 1.0]])
    torch.testing.assert_close(through(name, values), values, equal_nan=True, rtol=0, atol=0)


def test_ties_between_numbers_of_e2m1_go_to_the_even_code() -> None:
    """Halfway between codes 0 and 1 to 0, between 1 and 2 to 2, and so on; a hair to either side, to that side."""
    halves = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
    even = [E2M1[code if code % 2 == 0 else code + 1] for code in range(7)]
    row = torch.tensor([[6.0, *halves]])  # the block's scale is 1
    for sign in (1, -1):
        assert through("nvfp4", sign * row)[0, 1:].tolist() == [sign * number for number in even]
    for nudged, numbers in ((1 - 2.0**-23, E2M1[:7]), (1 + 2.0**-23, E2M1[1:])):
        values = row.clone()
        values[:, 1:] *= nudged
        assert through("nvfp4", values)[0, 1:].tolist() == list(numbers)


def test_ties_between_numbers_of_e4m3_go_to_the_even_one() -> None:
    values = torch.tensor([[448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10]])  # steps of 2, and the smallest there is
    assert through("fp8", values).tolist() == [[448.0, 16.0, 20.0, 0.0, 4 * 2.0**-10]]


def test_scales_are_the_smallest_powers_of_two_that_fit() -> None:
    largest = torch.tensor([448.0, math.nextafter(448.0, 449) + 1e-4, 224.0, 225.0, 1.0, 2.0**-140, 3e38])
    scales = FORMATS["fp8"].encode(largest[:, None])["scales"].float()
    assert scales.tolist() == [1.0, 2.0, 0.5, 1.0, 2.0**-8, 2.0**-126, 2.0**120]
    largest = torch.tensor([2688.0, 2689.0, 1344.0, 1345.0, 2.0**-140])
    scales = FORMATS["nvfp4"].encode(largest[:, None, None])["head_scales"]
    assert scales.flatten().tolist() == [1.0, 2.0, 0.5, 1.0, 2.0**-126]


@EVERY_SHAPE
@EVERY_FORMAT
def test_bytes_of_a_head_are_those_of_its_parts(name: str, shape: tuple[int, int]) -> None:
    form, values = FORMATS[name], torch.randn(2, 3, *shape, dtype=torch.float64 if name == "float64" else torch.float32)
    parts = form.encode(values, random_bits(values))
    stated = form.parts(*shape)
    assert next(iter(stated)) == "values"
    assert {part: (tensor.shape[2:], tensor.dtype) for part, tensor in parts.items()} == stated
    assert all(tensor.shape[:2] == (2, 3) for tensor in parts.values())
    assert form.head_bytes(*shape) * 6 == sum(tensor.nbytes for tensor in parts.values())
    blocks = -(-shape[1] // 16)
    per_row = {"float64": 8 * shape[1], "float32": 4 * shape[1], "nvfp4": 9 * blocks}
    per_row |= dict.fromkeys(("fp8", "fp8_sr"), shape[1] + 2)
    assert form.head_bytes(*shape) == shape[0] * per_row.get(name, 2 * shape[1]) + 4 * (name == "nvfp4")


def test_which_formats_there_are() -> None:
    assert all(form.name == name and name in repr(form) for name, form in FORMATS.items())
    assert [name for name, form in FORMATS.items() if form.is_stochastic] == STOCHASTIC
    assert set(CHECKPOINTS) - set(READOUTS) == {*STOCHASTIC, "float64"}
    assert isinstance(FORMATS["bfloat16"], PlainFormat)
