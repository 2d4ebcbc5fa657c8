"""Which implementation runs: the choice, what is refused, what is said, and copies of caches."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Iterator

import pytest
import torch
from packaging.version import Version

import replay_transformers as rt
from replay_transformers import implementation
from replay_transformers.implementation import Implementations
from tests.support.cached import assert_logits, feed, ids, model_for
from tests.support.models import full_logits

OPERATORS = ("mamba2", "gated_delta", "causal_conv")
FLOAT, DOUBLE = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """What has been logged already: nothing."""
    fresh: set[tuple[str, str]] = set()
    monkeypatch.setattr(implementation, "_said", fresh)
    return fresh


def test_rings_that_are_too_long_for_the_kernels() -> None:
    narrow = Implementations("mamba2", "triton", refusal="the rings are longer than the kernels take")
    with pytest.raises(ValueError, match="the rings are longer than the kernels take"):
        narrow.choose(FLOAT, FLOAT)
    assert copy.deepcopy(narrow).refusal == narrow.refusal
    model = model_for("nemotron_h-M")
    for window, is_too_long in ((600, True), (16, False)):
        layer = rt.ReplayCache(model.config, rt.ReplayConfig(window=window)).replay_layers[0]
        assert (layer._recurrence.refusal is not None) == is_too_long


@ON_CPU
def test_a_refusal_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = model_for("nemotron_h-M")
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(impl="triton"))
    with rt.enable(), torch.no_grad(), pytest.raises(ValueError, match="not on a GPU"):
        feed(model, cache, ids(1, 3))
    assert cache.cursor.fresh
    assert not cache.cursor.broken
    assert not cache.replay_layers[0].buffers()


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_reference_takes_everything(operator: str) -> None:
    chosen = Implementations(operator, "reference")
    assert chosen.triton is None
    for tensor in (FLOAT, DOUBLE, torch.zeros(2, requires_grad=True), torch.zeros(2, device="meta")):
        assert chosen.choose(tensor, tensor).__name__ == f"replay_transformers.kernels.{operator}.reference"


@ON_CPU
@pytest.mark.parametrize("operator", OPERATORS)
def test_auto_is_the_reference_on_a_cpu(operator: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whether Triton's interpreter is switched on or not; said once."""
    chosen = Implementations(operator, "auto")
    with caplog.at_level(logging.INFO, logger="replay_transformers.implementation"):
        for _ in range(3):
            assert chosen.choose(FLOAT, FLOAT) is chosen.reference
        assert Implementations(operator, "auto").choose(FLOAT) is chosen.reference
    assert caplog.messages == [
        f"{operator} steps run on the reference implementation (the tensors are on cpu, not on a GPU)"
    ]


@ON_CPU
@pytest.mark.parametrize("operator", OPERATORS)
def test_triton_runs_in_its_interpreter(operator: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    chosen = Implementations(operator, "triton")
    with caplog.at_level(logging.INFO, logger="replay_transformers.implementation"):
        assert chosen.choose(FLOAT, FLOAT).__name__ == f"replay_transformers.kernels.{operator}.triton"
        chosen.choose(FLOAT, FLOAT)
    assert caplog.messages == [f"{operator} steps run on the triton implementation (in Triton's interpreter)"]


@ON_CPU
def test_an_explicit_choice_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    chosen = Implementations("mamba2", "triton")
    learns = torch.zeros(2, requires_grad=True)
    for operands, why in (
        ((DOUBLE, FLOAT), "torch.float64"),
        ((FLOAT, DOUBLE), "torch.float64"),
        ((FLOAT, learns), "gradients"),
    ):
        with pytest.raises(ValueError, match=rf"impl='triton' cannot run here: .*{why}.*impl='reference'"):
            chosen.choose(*operands)
    with torch.no_grad():
        assert chosen.choose(FLOAT, learns) is chosen.triton
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="the tensors are on cpu, not on a GPU"):
        Implementations("mamba2", "triton").choose(FLOAT, FLOAT)


@ON_CPU
def test_without_triton(without_triton: None) -> None:
    """`auto` goes on without it, an explicit choice says that it is missing."""
    automatic = Implementations("mamba2", "auto")
    assert automatic.triton is None
    assert automatic.choose(FLOAT, FLOAT) is automatic.reference
    with pytest.raises(ValueError, match="impl='triton' cannot run here: triton is not installed"):
        Implementations("mamba2", "triton").choose(FLOAT, FLOAT)


@ON_CPU
def test_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are not even imported; the message says which one is needed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(implementation, "installed_triton", lambda: Version("3.2.0"))
    with pytest.raises(ValueError, match=r"triton 3\.5 or newer is needed, found 3\.2\.0"):
        Implementations("mamba2", "triton").choose(FLOAT, FLOAT)


@pytest.mark.parametrize("impl", ["auto", "reference", "triton"])
def test_copies_choose_alike(impl: str) -> None:
    chosen = Implementations("gated_delta", impl)
    for other in (copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen))):
        assert (other.operator, other.impl) == ("gated_delta", impl)
        assert other.reference is chosen.reference
        assert other.triton is chosen.triton


@ON_CPU
@pytest.mark.usefixtures("enabled")
def test_caches_on_triton_are_copied_and_pickled() -> None:
    """In mid-ring; the copies go on by themselves."""
    pytest.importorskip("triton")
    model, tokens = model_for("nemotron_h-M*"), ids(1, 5)
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=3, max_draft=0, impl="triton"))
    feed(model, cache, tokens[:, :4], 3, 1)
    truth = full_logits(model, tokens)[:, 4:]
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert {layer.config.impl for layer in other.replay_layers} == {"triton"}
        assert_logits(feed(model, other, tokens[:, 4:]), truth)
        assert int(other.get_seq_length()) == 5


def test_a_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, without it; what is logged holds no frame, in which a cache could live on."""
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.delitem(sys.modules, "replay_transformers.kernels.gated_delta.library", raising=False)
    implementation._import_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert implementation._import_library("gated_delta") is None
    finally:
        implementation._import_library.cache_clear()
    (record,) = [
        record for record in caplog.records if "fla is installed and cannot be imported" in record.getMessage()
    ]
    assert isinstance(record.args, tuple)
    assert all(isinstance(value, str) for value in record.args)
