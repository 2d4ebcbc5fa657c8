"""Settings of a state's precision as text, and figures by bins of generated length."""

from dataclasses import dataclass
from typing import Any

import torch

from replay_transformers.config import ReplayConfig

SYNTAX = "checkpoint, then any of /readout, /wWINDOW and /sSKIP: fp8, float32/fp8, nvfp4/w4, float32/s0.001"
DEFAULT_GRID = (
    "float32", "float32/bfloat16", "float32/fp8", "float32/nvfp4", "bfloat16", "float16", "fp8", "fp8_sr", "nvfp4",
    "float32/nvfp4/w4", "nvfp4/w4", "float32/s0.001",
)  # fmt: skip
EDGES = (0, 64, 256, 1024, 4096, 16384)  # of the bins, in tokens behind the prompt


@dataclass(frozen=True)
class Setting:
    """The fields of a `ReplayConfig` that the precision depends on."""

    checkpoint: str
    readout: str | None = None
    window: int = 16
    decay_skip: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """From text (see `SYNTAX`). Names of formats are left for `ReplayConfig` to judge.

        Raises:
            ValueError: text that does not follow the syntax.
        """
        checkpoint, *parts = text.split("/")
        fields: dict[str, Any] = {}
        for part in parts:
            if part[:1] == "w" and part[1:].isdigit():
                name, value = "window", int(part[1:])
            elif part[:1] == "s" and _is_number(part[1:]):
                name, value = "decay_skip", float(part[1:])
            else:
                name, value = "readout", part
            if name in fields or not part:
                raise ValueError(f"expected {SYNTAX}, got {text!r}")
            fields[name] = value
        if not checkpoint:
            raise ValueError(f"expected {SYNTAX}, got {text!r}")
        return cls(checkpoint, **fields)

    @property
    def name(self) -> str:
        """Its text, window included."""
        return "/".join([*self._formats, f"w{self.window}", *self._skip])

    @property
    def label(self) -> str:
        """Its text without the window."""
        return "/".join([*self._formats, *self._skip])

    @property
    def read(self) -> str:
        """Name of the format that plain steps read."""
        return self.readout or self.checkpoint

    @property
    def _formats(self) -> list[str]:
        return [self.checkpoint, *filter(None, [self.readout])]

    @property
    def _skip(self) -> list[str]:
        return [f"s{self.decay_skip:g}"] if self.decay_skip else []

    def config(self, impl: str) -> ReplayConfig:
        """The cache's settings; raises what `ReplayConfig` raises for a format that it does not have."""
        return ReplayConfig(
            window=self.window,
            checkpoint=self.checkpoint,
            readout=self.readout,
            decay_skip=self.decay_skip,
            impl=impl,
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_grid(names: list[str] | None) -> list[Setting]:
    """The settings asked for, or the default ones, each once."""
    return list(dict.fromkeys(Setting.parse(name) for name in names or DEFAULT_GRID))


def parse_precisions(names: list[str], impl: str) -> list[Setting]:
    """Settings ``checkpoint[/readout][/sSKIP]``, each once.

    Raises:
        ValueError: another syntax, a window, or what `ReplayConfig` refuses for ``impl``.
    """
    settings = parse_grid(names)
    for setting in settings:
        if setting.window != Setting.window:
            raise ValueError(f"expected checkpoint[/readout][/sSKIP], got {setting.name!r} with a window of its own")
        setting.config(impl)
    return settings


def bins(steps: int) -> list[tuple[int, int]]:
    """Ranges of steps between the edges; the last one ends with the steps."""
    ends = [*(edge for edge in EDGES[1:] if edge < steps), steps]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def short(value: float | torch.Tensor, digits: int = 6) -> float:
    """Rounded to so many digits, whatever its size."""
    return float(f"{float(value):.{digits}g}")


def place(begin: int, end: int) -> dict[str, int]:
    """A bin's range, for a record."""
    return {"from": begin, "to": end}
