"""Formats of the recurrent state. A new one is a file in this folder and a line in `FORMATS`."""

import torch

from replay_transformers.kernels.formats.base import Format
from replay_transformers.kernels.formats.float16_sr import Float16Stochastic
from replay_transformers.kernels.formats.fp8 import Fp8
from replay_transformers.kernels.formats.nvfp4 import Nvfp4
from replay_transformers.kernels.formats.plain import PlainFormat
from replay_transformers.kernels.formats.stored import StoredState

__all__ = ["CHECKPOINTS", "FORMATS", "READOUTS", "Format", "PlainFormat", "StoredState"]

FORMATS: dict[str, Format] = {
    made.name: made
    for made in (
        PlainFormat("float32", torch.float32),
        PlainFormat("bfloat16", torch.bfloat16),
        PlainFormat("float16", torch.float16),
        PlainFormat("float64", torch.float64),
        Float16Stochastic("float16_sr"),
        Fp8("fp8"),
        Fp8("fp8_sr", is_stochastic=True),
        Nvfp4("nvfp4"),
    )
}
CHECKPOINTS = tuple(FORMATS)
# a copy that is only read gains nothing from random rounding, which keeps a mean over many folds
READOUTS = tuple(name for name, made in FORMATS.items() if not made.is_stochastic and name != "float64")
