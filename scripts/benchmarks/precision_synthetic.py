"""Layers whose states remember for many windows, on random inputs: one copy of the state against two.

A shared copy is rounded at every flush and read back by the next one, so that its error adds up over what the state
remembers. A separate copy is derived anew from a float32 state at every flush, and its error does not.
"""

import math
from typing import Any

import torch

from replay_transformers.config import ReplayConfig
from replay_transformers.cursor import Cursor
from replay_transformers.geometry import LayerGeometry
from replay_transformers.layers import LAYER_CLASSES, ReplayLayer

from .operators import Tensors
from .precision_grid import Setting, bins, place, short

WINDOWS = 20  # more than half of a state is left after so many
IMPL = "reference"
STOCHASTIC = "_sr"
KINDS = ("mamba2", "gated_delta")
DIMENSIONS: dict[str, int] = {"heads": 4, "groups": 2, "head_dim": 32, "state_dim": 64, "conv_kernel": 4}


def separate(setting: Setting) -> Setting:
    """A float32 state with a copy to read in the setting's format, rounded to nearest."""
    return Setting("float32", setting.checkpoint.removesuffix(STOCHASTIC), setting.window)


class Inputs:
    """Random tokens of a layer, float32, drawn step by step; the decay is such that the state remembers.

    Args:
        kind: of the layer. geometry: its shapes. rows: of the batch. window: of the caches.
    """

    def __init__(self, kind: str, geometry: LayerGeometry, rows: int, window: int) -> None:
        self.kind, self.geometry, self.rows = kind, geometry, rows
        self.most = math.log(2) / (WINDOWS * window)  # of -log decay, per token
        self.generator = torch.Generator().manual_seed(0)
        self.rate = -self.most * torch.linspace(0.5, 1, geometry.heads)  # A of Mamba-2

    def draw(self) -> Tensors:
        """One token: ``raw [rows, 1, channels]`` goes through the convolution, the others past it."""
        geometry = self.geometry
        numbers = {"raw": torch.randn(self.rows, 1, geometry.conv_dim, generator=self.generator)}
        uniform = torch.rand(2, self.rows, 1, geometry.heads, generator=self.generator)
        if self.kind == "mamba2":
            return numbers | {"dt": 0.5 + uniform[0] / 2}
        # a token erases beta / state_dim of a random state: less than a fifth in so many windows
        beta = uniform[1] * self.most * geometry.state_dim / 4
        return numbers | {"g": -self.most * (0.5 + uniform[0] / 4), "beta": beta.clamp(max=1)}

    def log_decay(self, token: Tensors) -> torch.Tensor:
        """Of a random state in one step, ``[rows, 1, heads]``."""
        if self.kind == "mamba2":
            return token["dt"] * self.rate
        return token["g"] - token["beta"] / self.geometry.state_dim


class Subject:
    """A cache layer with a cursor of its own.

    Args:
        setting: its precision; float64 for the truth, which also computes in it.
        inputs: what it will take in.
    """

    def __init__(self, setting: Setting, inputs: Inputs) -> None:
        config: ReplayConfig = setting.config(IMPL)
        self.inputs, geometry = inputs, inputs.geometry
        self.dtype = torch.float64 if setting.checkpoint == "float64" else torch.float32
        self.layer: Any = LAYER_CLASSES[inputs.kind](geometry, config, Cursor(config))
        assert isinstance(self.layer, ReplayLayer)
        self.taps = torch.zeros(geometry.conv_dim, geometry.conv_kernel, dtype=self.dtype)
        self.taps[:, -1] = 1  # the convolution passes on what it gets

    def step(self, token: Tensors) -> torch.Tensor:
        """The layer's output ``[rows, heads * head_dim]`` in float64."""
        geometry, rows = self.inputs.geometry, self.inputs.rows
        numbers = {name: tensor.to(self.dtype) for name, tensor in token.items()}
        mixed = self.layer.convolve(numbers["raw"], self.taps, None, None)
        keys = geometry.groups * geometry.state_dim
        values, first, second = mixed.split([geometry.heads * geometry.head_dim, keys, keys], dim=-1)
        values = values.view(rows, 1, geometry.heads, geometry.head_dim)
        first, second = (part.view(rows, 1, geometry.groups, geometry.state_dim) for part in (first, second))
        if self.inputs.kind == "mamba2":
            output = self.layer.step(values, numbers["dt"], first, second, self.inputs.rate.to(self.dtype), None)
        else:
            output = self.layer.step(first, second, values, numbers["g"], numbers["beta"])
        return output.reshape(rows, -1).double()


@torch.no_grad()
def measure_synthetic(kind: str, setting: Setting, rows: int, steps: int) -> dict[str, Any]:
    """Relative error of the output against float64, of the shared and of the separate copy, and their ratio."""
    geometry = LayerGeometry(kind, **DIMENSIONS)
    inputs = Inputs(kind, geometry, rows, setting.window)
    chosen = {"shared": setting, "separate": separate(setting)}
    subjects = {name: Subject(one, inputs) for name, one in chosen.items()}
    truth = Subject(Setting("float64", window=setting.window), inputs)
    squares = {name: torch.zeros(steps, rows, dtype=torch.float64) for name in (*subjects, "truth")}
    logs = torch.zeros(geometry.heads)
    for index in range(steps):
        token = inputs.draw()
        logs += inputs.log_decay(token).mean((0, 1)) / steps
        want = truth.step(token)
        squares["truth"][index] = want.square().sum(1)
        for name, subject in subjects.items():
            squares[name][index] = (subject.step(token) - want).square().sum(1)
    kept = float((logs.min() * WINDOWS * setting.window).exp())
    return {
        "kind": kind, "checkpoint": setting.checkpoint, "window": setting.window, "separate": chosen["separate"].name,
        "rows": rows, "windows": WINDOWS, "kept_after_windows": short(kept, 3), "status": "measured",
        "bins": [_bin(squares, *ends) for ends in bins(steps)],
    }  # fmt: skip


def _bin(squares: Tensors, begin: int, end: int) -> dict[str, Any]:
    sums = {name: values[begin:end].sum(0) for name, values in squares.items()}  # [rows]
    errors = {name: (sums[name].sum() / sums["truth"].sum()).sqrt() for name in ("shared", "separate")}
    rows = (sums["shared"] / sums["separate"]).sqrt()
    ratio = errors["shared"] / errors["separate"]
    return place(begin, end) | {
        "shared": short(errors["shared"]),
        "separate": short(errors["separate"]),
        "ratio": short(ratio) if ratio.isfinite() else None,
        "ratio_rows": [short(rows.min()), short(rows.max())] if rows.isfinite().all() else None,
    }
