"""Loads what a command works on, and turns what can go wrong into one line."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from replay_transformers.config import ReplayConfig
from replay_transformers.geometry import layer_geometries
from replay_transformers.samples import SAMPLE_MODELS

__all__ = ["DTYPES", "CommandError", "Loaded", "check_source", "first_line", "load", "looks_local", "replay_config"]

LIKENESS = 0.75  # of two names, as difflib measures it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CommandError(Exception):
    """An error of the user's or of their surroundings, told in one line."""


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode with its tokenizer, and what to call it."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as in `DTYPES`."""
        return str(self.model.dtype).removeprefix("torch.")

    def encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask`` of a prompt, int64 ``[1, T]`` on the model's device.

        Raises:
            CommandError: a prompt of no tokens.
        """
        encoded = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        if encoded["input_ids"].numel() == 0:
            raise CommandError("the prompt is empty: give it at least one token")
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def load(source: str | Path, dtype: str, device: str | None) -> Loaded:
    """Load a model and its tokenizer, after checking that a replay cache supports it.

    Args:
        source: a folder, or the model's name on the hub.
        dtype: a key of `DTYPES`.
        device: as torch names it; None takes a GPU if there is one.

    Raises:
        CommandError: it cannot be loaded, or is not supported.
    """
    place, folder = _device(device), Path(source)
    check_source(source)
    try:
        layer_geometries(AutoConfig.from_pretrained(source))
        tokenizer = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype])
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError, RuntimeError, SafetensorError) as error:
        raise CommandError(f"cannot load {str(source)!r}: {first_line(error)}") from error
    if len(tokenizer) == 0:
        raise CommandError(f"there is no tokenizer in {str(source)!r}")
    return Loaded(folder.resolve().name if folder.is_dir() else str(source), model.to(place).eval(), tokenizer)


def replay_config(settings: dict[str, Any]) -> ReplayConfig:
    """The settings of a cache; raises CommandError where they are out of range."""
    try:
        return ReplayConfig(**settings)
    except (ValueError, NotImplementedError) as error:
        raise CommandError(str(error)) from error


def check_source(source: str | Path) -> None:
    """Raise CommandError for a folder that is not there or a misspelt sample model: nobody asks the hub for those."""
    if looks_local(source):
        if not Path(source).is_dir():
            raise CommandError(f"there is no folder {str(source)!r}")
    elif get_close_matches(str(source), SAMPLE_MODELS, n=1, cutoff=LIKENESS):
        raise CommandError(f"there is no model {str(source)!r}; the sample models are {', '.join(SAMPLE_MODELS)}")


def looks_local(source: str | Path) -> bool:
    """Whether a source is meant as a path rather than as a name on the hub."""
    folder = Path(source)
    return folder.exists() or folder.is_absolute() or str(source).startswith((".", "~"))


def _device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "meta":
        raise CommandError("cannot use device 'meta': it holds no values")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"cannot use device {device!r}: {first_line(error)}") from error
    return torch.device(device)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next one if that is announced; its type if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__
