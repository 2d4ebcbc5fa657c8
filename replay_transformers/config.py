"""Settings of a replay cache."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from replay_transformers.kernels.formats import CHECKPOINTS, FORMATS, READOUTS, PlainFormat

__all__ = ["ReplayConfig"]

IMPLEMENTATIONS = ("auto", "reference", "triton")
DRAFT_LENGTHS = ("adaptive", "fixed", "off")
MOST_RECORDS = 512  # of a ring that the Triton kernels work on: they hold all keys of a group at once


@dataclass(frozen=True)
class ReplayConfig:
    """Settings of a replay cache; validated at construction, immutable afterwards.

    Args:
        window: tokens between two flushes of a row, 1 or more. 1 writes the state at every step, like eager decoding.
        max_draft: how many of the last tokens `crop` can reject while the cache records, 0 or more.
        checkpoint: precision of the recurrent state that enters the recurrence: "float32" (whatever the model's
            dtype), "bfloat16", "float16" (saturates at 65,504), "fp8" (e4m3, a scale per row of the state), "nvfp4"
            (e2m1, a scale per 16 values), "float16_sr" or "fp8_sr" (with stochastic rounding), or "float64" (for
            oracles).
        readout: precision of a separate copy that steps read, and no flush: "float32", "bfloat16", "float16", "fp8" or
            "nvfp4". It is made anew from the checkpoint at every flush. None: steps read the checkpoint.
        decay_skip: heads whose records scale the checkpoint by less than this do not read it, and forget it when they
            flush: at least 0 (off) and less than 1. An output is off by at most this times the norm of the largest
            state so far and that of C (Gated DeltaNet: of q).
        impl: what runs the steps: "auto" (Triton kernels on a GPU, the reference elsewhere, for float64 and where
            gradients are asked for), "reference" (plain PyTorch) or "triton". An explicit choice never falls back.
            Forwards of more than ``max_draft + 1`` tokens are scanned, with "auto" by flash-linear-attention or
            mamba-ssm where they are installed. "auto" also updates small states eagerly, and takes the reference for
            rings of more than 512 records.
        draft_length: how many tokens assisted generation drafts per round: "adaptive" (as many as pay, by what was
            accepted and how long rounds took; none where drafts do not pay), "fixed" (as many as the drafter may) or
            "off" (none).
        seed: of stochastic rounding, 0 or more and less than 2^32. The same seed and the same tokens in the same rows
            round alike.

    Raises:
        ValueError: a value of the wrong type or out of range.
        NotImplementedError: a setting that this version does not support yet.
    """

    window: int = 16
    max_draft: int = 8
    checkpoint: str = "float32"
    readout: str | None = None
    decay_skip: float = 0.0
    impl: str = "auto"
    draft_length: str = "adaptive"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_int("window", self.window, minimum=1)
        _check_int("max_draft", self.max_draft, minimum=0)
        if self.checkpoint not in CHECKPOINTS:
            raise ValueError(f"checkpoint must be one of {CHECKPOINTS}, got {self.checkpoint!r}")
        if self.readout is not None and self.readout not in READOUTS:
            raise ValueError(f"readout must be None or one of {READOUTS}, got {self.readout!r}")
        if isinstance(self.decay_skip, bool) or not isinstance(self.decay_skip, (int, float)):
            raise ValueError(f"decay_skip must be a number from 0 to 1, got {self.decay_skip!r}")
        if not 0 <= self.decay_skip < 1:
            raise ValueError(f"decay_skip must lie in [0, 1), got {self.decay_skip!r}")
        _check_int("seed", self.seed, minimum=0)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be less than 2^32, got {self.seed}")
        if self.draft_length not in DRAFT_LENGTHS:
            raise ValueError(f"draft_length must be one of {DRAFT_LENGTHS}, got {self.draft_length!r}")
        if self.impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, got {self.impl!r}")
        if self.impl == "triton" and self.checkpoint == "float64":
            raise ValueError("impl='triton' has no checkpoint='float64': take another checkpoint, or impl='auto'")
        if self.impl == "triton" and self.capacity > MOST_RECORDS:
            raise ValueError(
                f"impl='triton' takes rings of at most {MOST_RECORDS} records, window={self.window} and "
                f"max_draft={self.max_draft} make {self.capacity}: choose smaller ones, or impl='auto'"
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any] | None) -> "ReplayConfig":
        """Build from a dict of field names, as `generate(cache_config=...)` takes it; None gives the defaults.

        Raises:
            ValueError: not a mapping, or a key that is no field.
        """
        if settings is None:
            return cls()
        names = [field.name for field in fields(cls)]
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"cache_config must be a dict with keys out of {names}, got {type(settings).__name__}: {settings!r}; a "
                "ReplayConfig has to_dict()"
            )
        unknown = [key for key in settings if key not in names]
        if unknown:
            raise ValueError(f"cache_config has unknown keys {unknown}; a replay cache takes {names}")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """The settings as a plain dict; `from_dict` is the inverse."""
        return asdict(self)

    @property
    def is_plain(self) -> bool:
        """Whether the state is one tensor of floats, read and written as it is by every head."""
        return isinstance(FORMATS[self.checkpoint], PlainFormat) and self.readout is None and not self.decay_skip

    @property
    def max_step(self) -> int:
        """Longest forward, in tokens, that goes through the ring; longer ones are scanned chunk by chunk."""
        return self.max_draft + 1

    @property
    def capacity(self) -> int:
        """Slots of a ring.

        A step finds at most ``max_live`` records and appends ``max_step`` without touching any of them, even where the
        same launch folds them.
        """
        return self.max_live + self.max_step

    @property
    def max_live(self) -> int:
        """Most records that a row holds between two forwards.

        A forward that would leave more than ``window`` folds what is committed; at most ``max_draft`` of them are not.
        """
        return max(self.window, self.max_draft + self.max_step)


def _check_int(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an int of at least {minimum}, got {type(value).__name__}: {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
