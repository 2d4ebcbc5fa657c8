"""What a cache stores of its states, in whatever format; and ways to spoil it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replay_transformers as rt
from replay_transformers.kernels.formats import FORMATS, StoredState
from replay_transformers.layers import ReplayLayer
from tests.support.models import FAMILIES
from tests.support.operators import Tensors

# checkpoints alone, copies beside an exact checkpoint, and both narrow
SHARED: list[dict[str, Any]] = [{"checkpoint": name} for name in ("bfloat16", "float16_sr", "fp8", "fp8_sr", "nvfp4")]
SEPARATE: list[dict[str, Any]] = [{"readout": name} for name in ("float32", "bfloat16", "float16", "fp8", "nvfp4")]
BOTH: list[dict[str, Any]] = [
    {"checkpoint": "fp8_sr", "readout": "nvfp4"},
    {"checkpoint": "bfloat16", "readout": "fp8"},
    {"checkpoint": "nvfp4", "readout": "float32"},
    {"checkpoint": "float64", "readout": "fp8", "decay_skip": 0.1},
]
EVERY_SETTING = SHARED + SEPARATE + BOTH


def label(settings: dict[str, Any]) -> str:
    """An id for a test."""
    return "-".join(str(value) for value in settings.values())


def parts(state: Any) -> Tensors:
    """The tensors of a checkpoint or of a copy by name, "values" first; none of None."""
    if state is None:
        return {}
    return state.parts if isinstance(state, StoredState) else {"values": state}


def stored(cache: rt.ReplayCache) -> Tensors:
    """Every tensor of a checkpoint or of a copy by layer and name; the cache's own."""
    return {
        f"{index}.{kind}.{name}": tensor
        for index, layer in enumerate(cache.replay_layers)
        for kind in ("checkpoint", "readout")
        for name, tensor in parts(getattr(layer, kind)).items()
    }


def copied(tensors: Tensors) -> Tensors:
    """Clones."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def changed(before: Tensors, after: Tensors) -> Tensors:
    """Per tensor, which rows differ in any bit: bool ``[B]``."""
    assert before.keys() == after.keys()
    return {name: (_bits(before[name]) != _bits(after[name])).flatten(1).any(1) for name in before}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def assert_copies_are_fresh(cache: rt.ReplayCache) -> None:
    """The copy decodes to what its format makes of the checkpoint as that is stored, to the bit."""
    config = cache.replay_config
    assert config.readout is not None
    form = FORMATS[config.readout]
    for layer in cache.replay_layers:
        values, copy = (
            state.read() if isinstance(state, StoredState) else state for state in (layer.checkpoint, layer.readout)
        )
        is_transposed = isinstance(layer.readout, StoredState) and layer.geometry.kind == "gated_delta"
        values = (values.transpose(-1, -2) if is_transposed else values).float()
        expected = form.decode(form.encode(values), values.shape[-1])
        assert torch.equal(copy, expected.transpose(-1, -2) if is_transposed else expected), "the copy is stale"


def spoil(tensor: torch.Tensor) -> None:
    """Other values in place, finite ones: twice the floats, and other signs of what is packed in bytes."""
    if tensor.dtype == torch.uint8:
        tensor.bitwise_xor_(0x80)
    else:
        tensor.mul_(2)


def fill_with_nan(layer: ReplayLayer, what: str, rows: Any = slice(None), heads: Any = slice(None)) -> None:
    """NaN in the "checkpoint" or the "readout" of some heads, whatever the format."""
    for tensor in parts(getattr(layer, what)).values():
        tensor[rows, heads] = 0x7F if tensor.dtype == torch.uint8 else float("nan")


WINDOW, MAX_DRAFT = 4, 3
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
EVERY = pytest.mark.parametrize("settings", EVERY_SETTING, ids=label)
SOME = pytest.mark.parametrize("settings", [SHARED[3], SEPARATE[4], *BOTH], ids=label)


def new(model: Any, fixed: bool = False, **settings: Any) -> rt.ReplayCache:
    """A cache of these tests; of fixed shapes if asked for."""
    config = rt.ReplayConfig(**({"window": WINDOW, "max_draft": MAX_DRAFT} | settings))
    return rt.ReplayCache(model.config, config, max_cache_len=64 if fixed else None)
