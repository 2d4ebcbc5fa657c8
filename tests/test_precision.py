"""Accuracy of narrow states: a separate copy that is read, decay skip, stochastic rounding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import replay_transformers as rt
from replay_transformers.kernels.formats import READOUTS, StoredState
from tests.support.cached import assert_states, feed, ids, model_for
from tests.support.lone_layer import KINDS, LoneLayer, draw, geometry
from tests.support.operators import Tensors, part
from tests.support.precision import assert_copies_are_fresh, fill_with_nan, parts, spoil, stored
from tests.support.snapshots import Snapshot

pytestmark = pytest.mark.usefixtures("enabled")

WINDOW = 4
# what the only state-space layer of these models is given depends on nothing but the tokens
LONE = pytest.mark.parametrize("name", ["nemotron_h-M", "qwen3_5-no-attention"])
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EVERY_READOUT = pytest.mark.parametrize("readout", READOUTS)
FIXED = pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])


def new(model: Any, fixed: bool = False, window: int = WINDOW, **settings: Any) -> rt.ReplayCache:
    return rt.ReplayCache(
        model.config, rt.ReplayConfig(window=window, **settings), max_cache_len=120 if fixed else None
    )


# -- a copy to read ---------------------------------------------------------------------------------------------------


@FIXED
@EVERY_READOUT
@LONE
def test_what_is_wrong_in_the_copy_lives_until_the_next_flush(name: str, readout: str, fixed: bool) -> None:
    """Any part of it changes the outputs before the flush, and nothing else: what follows is the same to the bit."""
    model, tokens = model_for(name), ids(2, 70)
    start = new(model, fixed, readout=readout)
    feed(model, start, tokens[:, :8], 7, 1)
    for wrong in parts(start.replay_layers[0].readout):
        cache, twin, same = start.fork(), start.fork(), start.fork()
        spoil(parts(cache.replay_layers[0].readout)[wrong])
        copy = parts(same.replay_layers[0].readout)[wrong]
        copy.copy_(copy.clone())
        assert_states(cache.state(0), twin.state(0))
        flushed = 0
        for step in range(8, 8 + WINDOW):
            assert twin.cursor.base is not None
            before = twin.cursor.base.clone()
            outputs = [feed(model, one, tokens[:, step : step + 1]) for one in (cache, twin, same)]
            flushed += int((twin.cursor.base > before).all())
            if flushed:
                assert torch.equal(outputs[0], outputs[1]), "the flush's own step reads the new copy"
            else:
                assert (outputs[0] - outputs[1]).abs().max() > 0.1
            assert torch.equal(outputs[1], outputs[2])
        assert flushed == 1, "the last of these steps"

        # of Gated DeltaNet's derived `d` the slots that were folded differ, which nothing reads any more
        assert set(Snapshot(twin).changes(cache)) <= {"0.d"}
        assert torch.equal(cache.state(0), twin.state(0))
        later = tokens[:, 8 + WINDOW : 60]
        assert torch.equal(feed(model, cache, later), feed(model, twin, later))


@EVERY_READOUT
@LONE
def test_a_fold_never_reads_the_copy(name: str, readout: str) -> None:
    """NaN in all of it: state() and flush() do not see it, and flush() makes a good copy again."""
    model, tokens = model_for(name), ids(2, 20)
    cache = new(model, readout=readout)
    feed(model, cache, tokens[:, :10], 7, 1, 1, 1)
    twin = cache.fork()
    fill_with_nan(cache.replay_layers[0], "readout")
    broken = cache.fork()
    assert feed(model, broken, tokens[:, 10:11]).isnan().all(), "steps do read it"
    assert torch.equal(cache.state(0), twin.state(0))
    cache.flush()
    twin.flush()
    assert Snapshot(twin).changes(cache) == []
    assert_copies_are_fresh(cache)


@FIXED
@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16", "fp8_sr"])
@LONE
def test_the_state_is_the_same_whatever_is_read(name: str, checkpoint: str, fixed: bool) -> None:
    """To the bit, after steps, blocks, a second prompt and flushes: copies of every format against none."""
    model, tokens = model_for(name), ids(2, 60)
    splits = [9, *[1] * 10, 3, 2, *[1] * 8, 13, *[1] * 15]
    plain = new(model, fixed, checkpoint=checkpoint)
    logits = feed(model, plain, tokens, *splits)
    kept = {name: tensor for name, tensor in stored(plain).items() if "checkpoint" in name}
    assert len(kept) == (2 if checkpoint == "fp8_sr" else 1)
    for readout in READOUTS:
        cache = new(model, fixed, checkpoint=checkpoint, readout=readout)
        got = feed(model, cache, tokens, *splits)
        assert torch.equal(cache.state(0), plain.state(0))
        assert all(torch.equal(stored(cache)[name], tensor) for name, tensor in kept.items())
        if checkpoint == "float32":  # float32's own rounding moves them by 4e-5 at most, tests/support/cached.py says
            error = (got - logits).abs().max()
            assert error < 1e-4 if readout == "float32" else error > 1e-4
        elif checkpoint == "fp8_sr" and readout in ("float32", "bfloat16", "fp8"):
            assert torch.equal(got, logits), "such a copy is exact"


@functools.cache
def slow(kind: str, memory: int, **settings: Any) -> torch.Tensor:
    """Outputs of 400 steps of a layer that remembers for ``memory`` tokens."""
    shape = geometry(kind)
    dtype = torch.float64 if settings["checkpoint"] == "float64" else torch.float32
    return LoneLayer(shape, memory, dtype, window=WINDOW, **settings).steps(draw(shape, 2, 400, memory))


def relative_error(got: torch.Tensor, truth: torch.Tensor, start: int, stop: int) -> float:
    return ((got - truth)[:, start:stop].norm() / truth[:, start:stop].norm()).item()


@EVERY_KIND
@pytest.mark.parametrize("name", ["bfloat16", "float16_sr", "fp8", "fp8_sr", "nvfp4"])
def test_the_error_grows_in_one_copy_and_not_in_two(kind: str, name: str) -> None:
    """A layer that forgets by a factor of e in 80 windows, 100 windows long, against float64.

    One copy takes a random walk, as long as the state remembers: its error is the root of so many roundings. The other
    is rounded once.
    """
    memory = 80 * WINDOW
    truth = slow(kind, memory, checkpoint="float64")
    shared = slow(kind, memory, checkpoint=name)
    separate = slow(kind, memory, checkpoint="float32", readout=name.removesuffix("_sr"))
    early, late = (20, 60), (300, 400)
    # over fewer states than a model has, the error of one bin is known to about a tenth
    assert relative_error(separate, truth, *late) < 1.2 * relative_error(separate, truth, *early)
    assert relative_error(shared, truth, *late) > 2 * relative_error(shared, truth, *early)
    assert relative_error(shared, truth, *late) > 5 * relative_error(separate, truth, *late)


@EVERY_KIND
def test_how_much_a_separate_copy_gains_follows_the_memory(kind: str) -> None:
    """The root of the roundings that a state remembers: about 3 at 20 windows, more at 80, next to nothing at 2."""
    ratios = []
    for windows in (2, 20, 80):
        truth, shared, separate = (
            slow(kind, windows * WINDOW, **settings)
            for settings in (
                {"checkpoint": "float64"},
                {"checkpoint": "fp8"},
                {"checkpoint": "float32", "readout": "fp8"},
            )
        )
        ratios.append(relative_error(shared, truth, 300, 400) / relative_error(separate, truth, 300, 400))
    # the squares of the roundings of a window fade by exp(-2 / windows) until the next
    roundings = [1 / (1 - torch.tensor(-2 / windows).exp().item()) for windows in (2, 20, 80)]
    for ratio, count in zip(ratios, roundings, strict=True):
        assert 0.75 < ratio / count**0.5 < 1.35, (ratios, roundings)


# -- decay skip -------------------------------------------------------------------------------------------------------

# of one token and head
DECAYS: dict[str, tuple[float, ...]] = {
    "weak": (-0.02, -0.01, -0.005, -1e-9),
    "strong": (-3.0, -9.0, -0.7, -30.0),
    "mixed": (-0.3, -2.0, -0.05, -12.0),
    "bursts": (-1e-9, -20.0, -0.02, -0.3),
}
MEMORY = 20


def with_decay(tokens: Tensors, kind: str, logs: tuple[float, ...], is_shifting: bool = False) -> Tensors:
    """The tokens with a log-decay per head, which moves on to the next head at every token if it is shifting."""
    count = tokens["raw"].shape[1]
    place = torch.arange(count)[:, None] * int(is_shifting) + torch.arange(4)
    values = torch.tensor(logs, dtype=torch.float64)[place % 4].expand(tokens["raw"].shape[0], count, 4)
    if kind == "mamba2":
        return tokens | {"dt": -values * MEMORY}  # A is -1 / memory
    return tokens | {"g": values}


def lone(kind: str, exact: bool = True, **settings: Any) -> LoneLayer:
    dtype = torch.float64 if exact else torch.float32
    settings = {"checkpoint": "float64" if exact else "float32", "window": WINDOW, "max_draft": 3} | settings
    return LoneLayer(geometry(kind), MEMORY, dtype, **settings)


def reading_norms(kind: str, tokens: Tensors) -> torch.Tensor:
    """``||C_t||``, or ``||q_t||`` as it is used, by value head: ``[rows, T, heads]``."""
    shape = geometry(kind)
    keys = shape.groups * shape.state_dim
    norms = tokens["raw"].double()[..., keys : 2 * keys].unflatten(-1, (shape.groups, shape.state_dim)).norm(dim=-1)
    if kind == "gated_delta":
        norms = norms / (norms.square() + 1e-6).sqrt() * shape.state_dim**-0.5
    return norms.repeat_interleave(shape.heads // shape.groups, dim=-1)


@functools.cache
def exact(kind: str, decay: str) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Tokens; their outputs; the largest spectral norm so far of the state before each, ``[rows, T, heads]``."""
    tokens = with_decay(draw(geometry(kind), 2, 60, MEMORY), kind, DECAYS[decay], is_shifting=decay == "bursts")
    layer, outputs, norms = lone(kind), [], [torch.zeros(2, 4, dtype=torch.float64)]
    for step in range(60):
        outputs.append(layer.step(part(tokens, step, step + 1)))
        norms.append(torch.linalg.matrix_norm(layer.layer.state(), 2))
    return tokens, torch.cat(outputs, dim=1), torch.stack(norms[:-1], dim=1).cummax(dim=1).values


@pytest.mark.parametrize("threshold", [1e-7, 1e-3, 0.1, 0.5])
@pytest.mark.parametrize("decay", DECAYS)
@EVERY_KIND
def test_what_decay_skip_leaves_out_is_bounded(kind: str, decay: str, threshold: float) -> None:
    """Of every output and head, by the threshold times the largest state so far times what reads it; in float64."""
    tokens, truth, states = exact(kind, decay)
    splits = [9, *[1] * 9, 3, *[1] * 6, 4, 2, *[1] * 7, 11, *[1] * 9]
    got = lone(kind, decay_skip=threshold).steps(tokens, *splits)
    full = lone(kind, decay_skip=1e-300).steps(tokens, *splits)  # which nothing falls under
    assert torch.equal(got, full) == (decay == "weak"), "something is left out where something is forgotten"
    error = (got - truth).norm(dim=-1)
    bound = threshold * states * reading_norms(kind, tokens)
    # 1e-12: what float64 rounds off in sums of a few hundred products
    assert (error <= bound + 1e-12 * truth.abs().max()).all(), (error / bound).max()


@EVERY_KIND
def test_the_state_after_decay_skip_is_bounded(kind: str) -> None:
    """By the threshold times the largest state so far, however many windows there were."""
    tokens, _, norms = exact(kind, "mixed")
    skipping, full = lone(kind, decay_skip=0.3), lone(kind)
    for step in range(60):
        skipping.step(part(tokens, step, step + 1))
        full.step(part(tokens, step, step + 1))
        error = torch.linalg.matrix_norm(skipping.layer.state() - full.layer.state(), 2)
        assert (error <= 0.3 * norms[:, step] + 1e-12).all()
    assert error.max() > 0


@pytest.mark.parametrize("readout", [None, "float32", "fp8", "nvfp4"])
@pytest.mark.parametrize("checkpoint", ["float32", "fp8"])
@EVERY_KIND
def test_a_forgotten_state_is_not_read_and_written_without_being_read(
    kind: str, checkpoint: str, readout: str | None
) -> None:
    """NaN in all that is stored of a head that forgets within a token: the same bits, now and ever after."""
    tokens = with_decay(draw(geometry(kind), 2, 40, MEMORY), kind, (-30.0, -0.02, -0.1, -0.3))
    clean, broken, reading = (
        lone(kind, exact=False, checkpoint=checkpoint, readout=readout, decay_skip=skip) for skip in (1e-6, 1e-6, 0.0)
    )
    for layer in (clean, broken, reading):
        layer.steps(part(tokens, 0, 12), 9, 1, 1, 1)
        layer.layer.flush()  # the next token is the first to forget
        layer.cursor.flushed()
    for layer in (broken, reading):
        for what in ("checkpoint", "readout"):
            fill_with_nan(layer.layer, what, heads=0)
    splits = [1, 1, 3, *[1] * 8, 2, *[1] * 13]
    expected, got = clean.steps(part(tokens, 12, 40), *splits), broken.steps(part(tokens, 12, 40), *splits)
    assert expected.isfinite().all()
    assert torch.equal(got, expected)
    assert reading.step(part(tokens, 12, 13))[:, :, 0].isnan().all()
    for name, tensor in broken.layer.buffers().items():
        assert torch.equal(tensor, clean.layer.buffers()[name]), name


SOME_SETTINGS = pytest.mark.parametrize("settings", [{}, {"readout": "fp8"}, {"checkpoint": "nvfp4"}], ids=str)


@SOME_SETTINGS
@EVERY_KIND
def test_a_threshold_that_nothing_falls_under_changes_no_bit(kind: str, settings: dict[str, str]) -> None:
    """A step that may skip reads before it folds, as one does that has a copy to read."""
    tokens = draw(geometry(kind), 2, 40, MEMORY)
    with_it = lone(kind, exact=False, decay_skip=1e-300, **settings)
    without = lone(kind, exact=False, **(settings or {"readout": "float32"}))
    splits = [7, *[1] * 10, 3, *[1] * 20]
    assert torch.equal(with_it.steps(tokens, *splits), without.steps(tokens, *splits))
    for name, tensor in with_it.layer.buffers().items():
        assert torch.equal(tensor, without.layer.buffers()[name]), name


@SOME_SETTINGS
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5"])
def test_decay_skip_of_0_is_as_if_it_was_not_there(family: str, settings: dict[str, str]) -> None:
    """A model's logits, its whole cache, and that the state is read and written as a plain one."""
    model, tokens, splits = model_for(family), ids(2, 30), [7, *[1] * 10, 3, *[1] * 10]
    with_it, without = new(model, decay_skip=0.0, **settings), new(model, **settings)
    assert torch.equal(feed(model, with_it, tokens, *splits), feed(model, without, tokens, *splits))
    assert Snapshot(without).changes(with_it) == []
    assert with_it.replay_config.is_plain == (not settings)


# -- stochastic rounding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["fp8_sr", "float16_sr"])
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5"])
def test_a_seed_gives_the_same_bytes_again_and_another_one_others(family: str, checkpoint: str) -> None:
    """In every layer; and each layer has numbers of its own."""
    model, tokens = model_for(family), ids(2, 30)
    one, again, other = (new(model, checkpoint=checkpoint, seed=seed) for seed in (5, 5, 6))
    logits = [feed(model, cache, tokens, 7, *[1] * 23) for cache in (one, again, other)]
    assert torch.equal(logits[0], logits[1])
    assert Snapshot(one).changes(again) == []
    assert not torch.equal(logits[0], logits[2])
    for mine, its in zip(one.replay_layers, other.replay_layers, strict=True):
        assert not torch.equal(mine.checkpoint.parts["values"], its.checkpoint.parts["values"])
    keys = {layer.checkpoint.key for cache in (one, other) for layer in cache.replay_layers}
    assert len(keys) == 2 * len(one.replay_layers)


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5"])
def test_no_random_number_is_used_twice(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written, a layer's row has not been written at that position before: flushes, prompts, blocks."""
    write, seen = StoredState.write, []

    def note(self: StoredState, values: Any, positions: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        written = torch.ones_like(positions, dtype=torch.bool) if rows is None else rows
        seen.extend((self.key, row, int(positions[row])) for row in range(len(positions)) if written[row])
        write(self, values, positions, rows)

    monkeypatch.setattr(StoredState, "write", note)
    monkeypatch.setattr("replay_transformers.cursor.SPREAD_ROWS", 2)
    model, tokens = model_for(family), ids(3, 80)
    cache = new(model, checkpoint="fp8_sr", max_draft=3)
    feed(model, cache, tokens[:, :30], 7, *[1] * 10, 13)
    cache.flush()
    cache.activate_past_recording()
    for step in range(30, 60, 3):
        feed(model, cache, tokens[:, step : step + 3], 3)
        cache.crop(-torch.tensor([step % 3, 1, 2]))
        if step == 42:
            cache.flush()
    assert len(seen) > 20
    assert len(set(seen)) == len(seen)
