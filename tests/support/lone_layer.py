"""One state-space layer of a cache without a model around it, on random tokens whose decay is chosen."""

from __future__ import annotations

from typing import Any

import torch

from replay_transformers.config import ReplayConfig
from replay_transformers.cursor import Cursor
from replay_transformers.geometry import LayerGeometry
from replay_transformers.layers import LAYER_CLASSES
from tests.support.operators import Tensors

KINDS = ("mamba2", "gated_delta")


def geometry(kind: str, heads: int = 4, groups: int = 2, head_dim: int = 16, state_dim: int = 32) -> LayerGeometry:
    """A convolution of two taps, of which `LoneLayer` uses the last one only."""
    return LayerGeometry(kind, heads=heads, groups=groups, head_dim=head_dim, state_dim=state_dim, conv_kernel=2)


def draw(shape: LayerGeometry, rows: int, tokens: int, memory: float, seed: int = 0) -> Tensors:
    """Random tokens ``[rows, tokens, ...]`` after which a state fades by a factor of e in about ``memory`` tokens.

    Heads differ by a factor of two. A Gated DeltaNet's state fades as much by what its tokens erase as by its decay.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = {"raw": torch.randn(rows, tokens, shape.conv_dim, generator=generator)}
    rate = (0.5 + torch.rand(rows, tokens, shape.heads, generator=generator)) / memory
    rate *= torch.linspace(0.7, 1.4, shape.heads)
    if shape.kind == "mamba2":
        return drawn | {"dt": rate * memory}
    beta = torch.rand(rows, tokens, shape.heads, generator=generator) * shape.state_dim / memory
    return drawn | {"g": -rate / 2, "beta": beta.clamp(max=1)}


class LoneLayer:
    """A layer with a cursor of its own.

    Args:
        shape: of the layer. memory: as in `draw`. dtype: of the activations.
        settings: fields of `ReplayConfig`.
    """

    def __init__(
        self, shape: LayerGeometry, memory: float, dtype: torch.dtype = torch.float32, **settings: Any
    ) -> None:
        config = ReplayConfig(impl="reference", **settings)
        self.shape, self.dtype, self.cursor = shape, dtype, Cursor(config)
        self.layer: Any = LAYER_CLASSES[shape.kind](shape, config, self.cursor)
        self.rate = torch.full((shape.heads,), -1 / memory, dtype=dtype)
        self.taps = torch.tensor([0.0, 1.0], dtype=dtype).expand(shape.conv_dim, 2)

    @torch.no_grad()
    def step(self, tokens: Tensors) -> torch.Tensor:
        """The output ``[rows, T, heads, head_dim]`` of one forward, in float64."""
        shape, numbers = self.shape, {name: tensor.to(self.dtype) for name, tensor in tokens.items()}
        mixed = self.layer.convolve(numbers["raw"], self.taps, None, None)
        keys = shape.groups * shape.state_dim
        first, second, values = mixed.split([keys, keys, shape.heads * shape.head_dim], dim=-1)
        values = values.unflatten(-1, (shape.heads, shape.head_dim))
        first, second = (part.unflatten(-1, (shape.groups, shape.state_dim)) for part in (first, second))
        if shape.kind == "mamba2":
            return self.layer.step(values, numbers["dt"], first, second, self.rate, None).double()
        return self.layer.step(second, first, values, numbers["g"], numbers["beta"]).double()

    def steps(self, tokens: Tensors, *splits: int) -> torch.Tensor:
        """Forwards of so many tokens each, without ``splits`` one at a time."""
        count = tokens["raw"].shape[1]
        parts = {name: tensor.split(list(splits) or 1, dim=1) for name, tensor in tokens.items()}
        forwards = len(splits) or count
        return torch.cat([self.step({name: part[i] for name, part in parts.items()}) for i in range(forwards)], dim=1)
