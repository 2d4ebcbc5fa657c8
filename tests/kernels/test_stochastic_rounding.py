"""Stochastic rounding: known random numbers, unbiased means, and chance that depends on place and time alone."""

from __future__ import annotations

import pytest
import torch

from replay_transformers.kernels.formats import FORMATS, StoredState
from replay_transformers.kernels.formats import stored as stored_states
from replay_transformers.kernels.formats.rounding import philox, round_stochastically, state_bits
from tests.kernels.test_formats import EVERY_SHAPE, STOCHASTIC_FORMAT, magnitudes, random_bits


def words(*numbers: int) -> list[torch.Tensor]:
    return [torch.tensor([number]) for number in numbers]


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "expected"),
    [
        (10, (0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (7, (0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (10, (2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            10,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zero-10", "zero-7", "ones-10", "pi-10"],
)
def test_known_answers_of_philox(
    rounds: int, counter: tuple[int, int, int, int], key: int, expected: tuple[int, ...]
) -> None:
    """Those of Random123, the authors' own library."""
    c0, c1, c2, c3 = words(*counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key, rounds)) == expected


def test_words_of_a_state_are_those_of_seven_rounds() -> None:
    """Element, row and head, and the two halves of the position are the counter; the first of four words is taken."""
    words = state_bits(torch.tensor([0, 2**33 + 5]), heads=3, channels=2, states=4, key=2**40 + 1)
    assert words.shape == (2, 3, 2, 4)
    assert state_bits(torch.tensor([0]), 1, 1, 1, key=0).item() == 0x5F6FB709
    counter = [torch.tensor(number) for number in (4 * 1 + 2, 3 * 1 + 2, 5, 2)]
    assert words[1, 2, 1, 2] == philox((counter[0], counter[1], counter[2], counter[3]), 2**40 + 1, rounds=7)[0]


def neighbours(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of a stochastic format around each value, in float64."""
    wide = values.double()
    least, bits = (-14, 10) if name == "float16_sr" else (-6, 3)
    if name == "fp8_sr":
        scale = FORMATS[name].encode(values, torch.zeros(values.shape, dtype=torch.int64))["scales"].double()
        wide = wide / scale[..., None]
    step = torch.exp2(wide.abs().clamp(min=2.0**least).log2().floor() - bits)
    pair = (wide / step).floor() * step, (wide / step).ceil() * step
    return pair if name == "float16_sr" else (pair[0] * scale[..., None], pair[1] * scale[..., None])


@EVERY_SHAPE
@STOCHASTIC_FORMAT
def test_only_the_two_neighbours_are_ever_stored(name: str, shape: tuple[int, int]) -> None:
    values = magnitudes((20, *shape), -20, 9)
    low, high = neighbours(name, values)
    for bits in (torch.zeros_like(values, dtype=torch.int64), random_bits(values), torch.full(values.shape, 2**32 - 1)):
        got = FORMATS[name].decode(FORMATS[name].encode(values, bits), shape[1]).double()
        assert ((got == low) | (got == high)).all()
    # so near to a number as a word can tell, 2^-13 of a step, a value may be taken for it
    up = torch.minimum(values - low, high - values) > (high - low) * 2**-13
    assert torch.equal(got[up].abs(), torch.maximum(low.abs(), high.abs())[up]), "the largest word rounds away from 0"


@pytest.mark.parametrize("draws", [64, 4096])
@STOCHASTIC_FORMAT
def test_the_mean_of_many_roundings_is_the_value(name: str, draws: int) -> None:
    """Off by its standard error, which shrinks with the root of the number of draws: by 5.5 of them at the very most.

    Rounding to nearest is off by 16 standard errors at 4,096 draws where it is off by a quarter of a step.
    """
    values = torch.cat([magnitudes((4, 16), -3, 3), magnitudes((4, 16), -12, 0, seed=1)], dim=1)
    low, high = neighbours(name, values)
    chance = (values.double() - low) / (high - low)
    bits = state_bits(torch.arange(draws), 1, *values.shape, key=7).squeeze(1)
    form = FORMATS[name]
    got = form.decode(form.encode(values.expand(draws, 4, 32), bits), 32).double()
    error = (got - values.double()).mean(0) / (high - low)
    frequent = (chance * (1 - chance)) > 0.05  # rarer ones are not normally distributed
    assert frequent.sum() > 60
    sigmas = (error / (chance * (1 - chance) / draws).sqrt())[frequent]
    assert sigmas.abs().max() < 5.5
    # the mean square of so many is 1, give or take 5 times its own standard error
    assert abs(sigmas.square().mean() - 1) < 5 * (2 / frequent.sum()) ** 0.5


def test_numbers_below_the_smallest_normal_one_keep_their_step() -> None:
    """2^-9 for e4m3: a quarter of a step rounds up with a quarter of all words."""
    values = torch.full((4096,), 2.0**-11)
    bits = torch.arange(4096) << 20
    got = round_stochastically(values, bits, mantissa=3, smallest=2.0**-6)
    assert set(got.tolist()) == {0.0, 2.0**-9}
    assert (got > 0).sum() == 1024


def store(name: str, rows: int = 2, heads: int = 3, key: int = 0, **settings: bool) -> StoredState:
    """Zeros of 5 channels and 20 states."""
    form = FORMATS[name]
    parts = {part: torch.zeros(rows, heads, *shape, dtype=dtype) for part, (shape, dtype) in form.parts(5, 20).items()}
    return StoredState(form, parts, 20, key=key, **settings)


def written(name: str, values: torch.Tensor, positions: list[int], key: int = 0) -> torch.Tensor:
    """The bytes of the same values in every row, stored after so many tokens."""
    stored = store(name, len(positions), values.shape[0], key)
    stored.write(values.expand(len(positions), *values.shape), torch.tensor(positions))
    return stored.parts["values"]


@STOCHASTIC_FORMAT
def test_chance_depends_on_seed_position_row_and_head_alone(name: str) -> None:
    """Positions that differ by 2^32 are different, and so are keys that differ in their upper half only."""
    values = torch.randn(5, 20).expand(3, 5, 20)
    first = written(name, values, [16, 16])
    assert torch.equal(written(name, values, [16, 16]), first)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0, 0], first[0, 1])
    for position, key in ((17, 0), (16 + 2**32, 0), (16, 1), (16, 2**32)):
        other = written(name, values, [position, 16], key)
        assert not torch.equal(other[0], first[0])
        assert torch.equal(other[1], first[1]) == (key == 0), "a row does not depend on another row's position"


@STOCHASTIC_FORMAT
def test_many_small_changes_add_up(name: str) -> None:
    """A tenth of a step at every flush, of which rounding to nearest keeps nothing; within five standard errors."""
    step = FORMATS[name].decode(FORMATS[name].encode(torch.full((1, 1), 1 + 1e-7), torch.tensor([[2**32 - 1]])), 1) - 1
    assert step == {"float16_sr": 2.0**-10, "fp8_sr": 2.0**-3}[name]
    stored, nearest, flushes = store(name), store("fp8"), 8
    for state in (stored, nearest):
        state.write(torch.ones(2, 3, 5, 20), torch.tensor([0, 0]))
    for flush in range(1, flushes + 1):
        for state in (stored, nearest):
            state.write(state.read() + step / 10, torch.tensor([16 * flush, 16 * flush]))
    risen = (stored.read() - 1) / step
    # each flush adds a step or none, with a chance of one in ten
    error = (0.1 * 0.9 * flushes / risen.numel()) ** 0.5
    assert (risen.mean() - 0.1 * flushes).abs() < 5 * error
    assert (nearest.read() == 1).all()


def test_random_words_are_uniform_and_unrelated() -> None:
    """Means and correlations within five standard errors of what they should be."""
    words = torch.cat([state_bits(torch.tensor([16, 16]), 2, 40, 40, key) for key in (0, 2**32, 2**33)])
    words = torch.cat([words, state_bits(torch.tensor([32, 48]), 2, 40, 40, key=0)]).flatten(2).flatten(0, 1)
    assert words.min() >= 0
    assert words.max() < 2**32
    unit = (words.double() / 2**32 - 0.5) * 12**0.5  # of mean 0 and variance 1
    assert (unit.mean(1).abs() * 1600**0.5).max() < 5
    between = unit @ unit.T / 1600
    assert (between - between.diag().diag()).abs().max() * 1600**0.5 < 5
    assert ((unit[:, 1:] * unit[:, :-1]).mean(1).abs() * 1599**0.5).max() < 5


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "fp8_sr", "float16_sr"])
def test_a_stored_state_writes_the_chosen_rows_only(name: str) -> None:
    stored = store(name, rows=3)
    addresses = {part: tensor.data_ptr() for part, tensor in stored.parts.items()}
    stored.write(torch.randn(3, 3, 5, 20), torch.tensor([3, 3, 3]))
    before = {part: tensor.clone() for part, tensor in stored.parts.items()}
    later = torch.randn(3, 3, 5, 20) * 100
    stored.write(later, torch.tensor([9, 9, 9]), torch.tensor([False, True, False]))
    for part, tensor in stored.parts.items():
        assert torch.equal(tensor[[0, 2]], before[part][[0, 2]])
        assert not torch.equal(tensor[1], before[part][1])
    assert {part: tensor.data_ptr() for part, tensor in stored.parts.items()} == addresses
    assert (stored.read()[1] - later[1]).norm() < 0.2 * later[1].norm()


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "fp8_sr", "float16_sr"])
def test_a_transposed_state_has_a_scale_per_value_channel_all_the_same(name: str) -> None:
    """Gated DeltaNet's layout is another view of the same parts."""
    straight, turned = store(name), store(name, transposed=True)
    values, positions = torch.randn(2, 3, 5, 20) * torch.logspace(-3, 3, 5)[:, None], torch.tensor([4, 8])
    straight.write(values, positions)
    turned.write(values.transpose(-1, -2), positions)
    assert all(torch.equal(part, turned.parts[name]) for name, part in straight.parts.items())
    assert torch.equal(turned.read(), straight.read().transpose(-1, -2))


@pytest.mark.parametrize("name", ["fp8", "fp8_sr", "float16_sr", "nvfp4"])
def test_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes and values as all at once, and rows that are left out keep theirs."""
    values, positions = torch.randn(5, 2, 8, 16), torch.arange(5) * 7
    chosen = torch.tensor([True, False, True, True, False])
    results = []
    for most in (stored_states.MOST_VALUES, 2 * 2 * 8 * 16, 1):
        monkeypatch.setattr(stored_states, "MOST_VALUES", most)
        parts = {n: torch.ones(5, 2, *shape).to(dtype) for n, (shape, dtype) in FORMATS[name].parts(8, 16).items()}
        state = StoredState(FORMATS[name], parts, 16, key=3)
        state.write(values, positions, chosen)
        results.append([*state.parts.values(), state.read()])
    assert all(torch.equal(one, other) for one, other in zip(results[0], results[1], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(results[0], results[2], strict=True))
