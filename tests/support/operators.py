"""One interface to the recurrent operators, for tests that hold for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from replay_transformers.kernels.gated_delta import reference as gated_delta_reference
from replay_transformers.kernels.mamba2 import reference as mamba2_reference
from tests.kernels import oracles

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Geometry:
    """Heads of width ``head_dim`` in ``groups`` groups (key heads) of width ``state_dim``."""

    heads: int = 4
    groups: int = 2
    head_dim: int = 12
    state_dim: int = 16

    def __str__(self) -> str:
        return f"{self.heads}x{self.head_dim}-{self.groups}x{self.state_dim}"


# several groups, one group, one head per group; widths that are no multiple of any block
GEOMETRIES = [Geometry(), Geometry(3, 1, 80, 8), Geometry(6, 3, 5, 7), Geometry(2, 2, 12, 24), Geometry(8, 2, 4, 80)]


class Operator:
    """What the tests need of an operator; tokens are dicts of tensors ``[rows, T, ...]``."""

    name: str
    ring_names: tuple[str, ...]  # of the records that a fold reads, in the order of its arguments
    log_decay: str  # the token's time step or log-decay

    def __init__(self, kernel: ModuleType) -> None:
        self.kernel = kernel

    def __repr__(self) -> str:
        return self.name

    def draw(self, rows: int, count: int, geometry: Geometry, dtype: torch.dtype = torch.float64) -> Tensors:
        """Random tokens: activations in ``dtype``, log-decays in float32 or wider."""
        raise NotImplementedError

    def state_shape(self, geometry: Geometry) -> tuple[int, int, int]:
        """Of one row's state."""
        return geometry.heads, geometry.head_dim, geometry.state_dim

    def parameters(self, geometry: Geometry, dtype: torch.dtype = torch.float64) -> Tensors:
        """The layer's own tensors, beside its tokens."""
        return {}

    def rings(self, tokens: Tensors, capacity: int) -> Tensors:
        """Zeroed rings for tokens like these."""
        raise NotImplementedError

    def step(self, tokens: Tensors, parameters: Tensors, **arguments: Any) -> torch.Tensor:
        """`replay_step`."""
        return self.kernel.replay_step(*tokens.values(), *parameters.values(), **arguments)

    def scan(self, tokens: Tensors, parameters: Tensors, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`scan`."""
        return self.kernel.scan(*tokens.values(), *parameters.values(), **arguments)

    def fold_operands(self, rings: Tensors, parameters: Tensors) -> list[torch.Tensor]:
        """What `fold` and `folded_state` take after the state."""
        return [rings[name] for name in self.ring_names]

    def oracle(
        self, tokens: Tensors, parameters: Tensors, state: torch.Tensor, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence token by token."""
        function = getattr(oracles, self.name)
        return function(*tokens.values(), *parameters.values(), state=state, dtype=dtype)


class Mamba2(Operator):
    """Mamba-2."""

    name = "mamba2"
    ring_names = ("ring_x", "ring_b", "ring_dt")
    log_decay = "dt"

    def draw(self, rows: int, count: int, geometry: Geometry, dtype: torch.dtype = torch.float64) -> Tensors:
        wide = torch.promote_types(torch.float32, dtype)
        return {
            "x": torch.randn(rows, count, geometry.heads, geometry.head_dim).to(dtype),
            "dt": torch.nn.functional.softplus(torch.randn(rows, count, geometry.heads) - 1).to(wide),
            "B": torch.randn(rows, count, geometry.groups, geometry.state_dim).to(dtype),
            "C": torch.randn(rows, count, geometry.groups, geometry.state_dim).to(dtype),
        }

    def parameters(self, geometry: Geometry, dtype: torch.dtype = torch.float64) -> Tensors:
        wide = torch.promote_types(torch.float32, dtype)
        return {"A": -torch.rand(geometry.heads).to(wide), "D": torch.randn(geometry.heads).to(wide)}

    def rings(self, tokens: Tensors, capacity: int) -> Tensors:
        x, dt, B = tokens["x"], tokens["dt"], tokens["B"]
        rows, _, heads, head_dim = x.shape
        return {
            "ring_x": x.new_zeros(rows, heads, capacity, head_dim),
            "ring_b": B.new_zeros(rows, B.shape[2], capacity, B.shape[3]),
            "ring_dt": dt.new_zeros(rows, heads, capacity),
        }

    def fold_operands(self, rings: Tensors, parameters: Tensors) -> list[torch.Tensor]:
        return [*super().fold_operands(rings, parameters), parameters["A"]]


class GatedDelta(Operator):
    """Gated DeltaNet."""

    name = "gated_delta"
    ring_names = ("ring_k", "ring_v", "ring_g", "ring_beta")
    log_decay = "g"

    def state_shape(self, geometry: Geometry) -> tuple[int, int, int]:
        return geometry.heads, geometry.state_dim, geometry.head_dim

    def draw(self, rows: int, count: int, geometry: Geometry, dtype: torch.dtype = torch.float64) -> Tensors:
        wide = torch.promote_types(torch.float32, dtype)
        return {
            "q": torch.randn(rows, count, geometry.groups, geometry.state_dim).to(dtype),
            "k": torch.randn(rows, count, geometry.groups, geometry.state_dim).to(dtype),
            "v": torch.randn(rows, count, geometry.heads, geometry.head_dim).to(dtype),
            "g": -0.3 * torch.nn.functional.softplus(torch.randn(rows, count, geometry.heads)).to(wide),
            "beta": torch.randn(rows, count, geometry.heads).sigmoid().to(dtype),
        }

    def rings(self, tokens: Tensors, capacity: int) -> Tensors:
        k, v, g, beta = (tokens[name] for name in ("k", "v", "g", "beta"))
        rows, _, heads, head_dim = v.shape
        return {
            "ring_k": k.new_zeros(rows, k.shape[2], capacity, k.shape[3]),
            "ring_v": v.new_zeros(rows, heads, capacity, head_dim),
            "ring_g": g.new_zeros(rows, heads, capacity),
            "ring_beta": beta.new_zeros(rows, heads, capacity),
            "ring_d": v.new_zeros(rows, heads, capacity, head_dim),
        }


MAMBA2, GATED_DELTA = Mamba2(mamba2_reference), GatedDelta(gated_delta_reference)
OPERATORS: list[Operator] = [MAMBA2, GATED_DELTA]
EVERY_OPERATOR = pytest.mark.parametrize("operator", OPERATORS, ids=str)


def assert_close(got: torch.Tensor, truth: torch.Tensor, tolerance: float = 1e-11) -> None:
    """Within ``tolerance`` of the largest true value, everywhere.

    The default is for float64: a step sums at most a few hundred products, each within 2.2e-16, and the triangular
    solve amplifies by its condition, about 21 at 16 tokens; that leaves a factor of ten.
    """
    assert got.shape == truth.shape
    error = (got.double() - truth).abs().max().item()
    bound = tolerance * max(1.0, truth.abs().max().item())
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def part(tokens: Tensors, start: int | None, stop: int | None) -> Tensors:
    """Tokens ``start .. stop - 1``."""
    return {name: tensor[:, start:stop] for name, tensor in tokens.items()}


def join(first: Tensors, second: Tensors) -> Tensors:
    """One behind the other."""
    return {name: torch.cat([first[name], second[name]], dim=1) for name in first}


def length(tokens: Tensors) -> int:
    """Number of tokens."""
    return next(iter(tokens.values())).shape[1]


def folds(position: Tensors, tokens: int, window: int) -> torch.Tensor:
    """What each row folds by the flush rule in a step of so many tokens: its committed records if it is due."""
    due = position["committed"] + position["pending"] + tokens > window
    return torch.where(due, position["committed"], 0)


def cursor(base: list[int], committed: list[int], pending: list[int]) -> Tensors:
    """The pointers as the operators take them."""
    return {
        name: torch.tensor(values, dtype=torch.int64)
        for name, values in (("base", base), ("committed", committed), ("pending", pending))
    }
