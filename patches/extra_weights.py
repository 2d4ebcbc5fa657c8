"""Weights of a model's checkpoint that transformers leaves out when it loads the model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

__all__ = ["check_left_out", "left_out"]

FLOATS = ("F64", "F32", "BF16", "F16")  # as safetensors names them


def check_left_out(model: Any, prefix: str) -> None:
    """Check that there are weights under a prefix, and that they can be used as they are.

    Args:
        model: as `from_pretrained` made it; its `config.name_or_path` is a folder or a name on the hub.
        prefix: "mtp." for example. Something like "model." or "language_model." may stand before it.

    Raises:
        ValueError: there is no checkpoint in safetensors, or it has no such weight.
        NotImplementedError: quantised weights.
    """
    count = 0
    for name, opened, stored in _stored(model, prefix):
        count += 1
        if opened.get_slice(stored).get_dtype() not in FLOATS:
            raise NotImplementedError(
                f"{prefix}{name} in the checkpoint of {type(model).__name__} is quantised "
                f"({opened.get_slice(stored).get_dtype()}), which is not supported"
            )
    if not count:
        raise ValueError(
            f"the checkpoint of {type(model).__name__} ({model.config.name_or_path!r}) has no weights {prefix}*"
        )


def left_out(model: Any, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors under a prefix by their names behind it, on the CPU. Arguments and errors as in `check_left_out`."""
    return {name: opened.get_tensor(stored) for name, opened, stored in _stored(model, prefix)}


def _stored(model: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
    """Name behind the prefix, open file and name there of every such tensor."""
    for file in _files(model, prefix):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for stored in opened.keys():  # noqa: SIM118 (not a dict)
                if _is_under(stored, prefix):
                    yield stored[stored.index(prefix) + len(prefix) :], opened, stored


def _files(model: Any, prefix: str) -> list[Any]:
    """The files of the checkpoint that hold tensors under the prefix."""
    source = model.config.name_or_path
    if not source:
        raise ValueError(
            f"{type(model).__name__} was not loaded from a checkpoint, where its weights {prefix}* would be"
        )
    with _explained(model, prefix):
        revision = getattr(model.config, "_commit_hash", None)
        optional = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **optional)
        if index is None:
            return [cached_file(source, SAFE_WEIGHTS_NAME, revision=revision)]
        with open(index, encoding="utf-8") as opened:
            places = json.load(opened)["weight_map"]
        shards = sorted({shard for name, shard in places.items() if _is_under(name, prefix)})
        return [cached_file(source, shard, revision=revision) for shard in shards]


@contextmanager
def _explained(model: Any, prefix: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{type(model).__name__} was loaded from {model.config.name_or_path!r}, where no weights {prefix}* in "
            f"safetensors can be read: {error}"
        ) from error


def _is_under(name: str, prefix: str) -> bool:
    return name.startswith(prefix) or f".{prefix}" in name
