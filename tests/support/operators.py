"""One interface to the recurrent operators, and a driver that steps them as a cache does, with an oracle beside it."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

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

    def __init__(self, kernel: ModuleType) -> None:
        self.kernel = kernel

    def __repr__(self) -> str:
        return self.name

    def draw(self, rows: int, count: int, geometry: Geometry, dtype: torch.dtype = torch.float64) -> Tensors:
        """Random tokens: activations in ``dtype``, log-decays in float32 or wider."""
        raise NotImplementedError

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
            "ring_d": g.new_zeros(rows, heads, capacity, head_dim),
        }


OPERATORS: list[Any] = [Mamba2(mamba2_reference), GatedDelta(gated_delta_reference)]


def part(tokens: Tensors, start: int | None, stop: int | None) -> Tensors:
    """Tokens ``start .. stop - 1``."""
    return {name: tensor[:, start:stop] for name, tensor in tokens.items()}


def join(first: Tensors, second: Tensors) -> Tensors:
    """One behind the other."""
    return {name: torch.cat([first[name], second[name]], dim=1) for name in first}


def length(tokens: Tensors) -> int:
    """Number of tokens."""
    return next(iter(tokens.values())).shape[1]


def cursor(base: list[int], committed: list[int], pending: list[int]) -> Tensors:
    """The pointers as the operators take them."""
    return {
        name: torch.tensor(values, dtype=torch.int64)
        for name, values in (("base", base), ("committed", committed), ("pending", pending))
    }


class Replay:
    """Steps an operator as a cache does, every row with a cursor of its own.

    Per row it also keeps the tokens not yet committed and the oracle's state before them, so that the truth about any
    step, whatever was rejected before, is a plain recurrence over what the row has really seen.

    Args:
        operator: the operator. geometry: its shapes. window: of the flush rule.
        max_pending: tokens that may be uncommitted when a step starts. max_tokens: tokens in one step.
        first: absolute position of the first token, per row.
        dtype: of the activations. oracle_dtype: of the recurrence beside it.
    """

    def __init__(
        self,
        operator: Operator,
        geometry: Geometry,
        window: int,
        *,
        max_pending: int = 8,
        max_tokens: int = 8,
        first: tuple[int, ...] = (0,),
        dtype: torch.dtype = torch.float64,
        oracle_dtypes: tuple[torch.dtype, ...] = (torch.float64,),
    ) -> None:
        self.operator, self.window, self.rows = operator, window, len(first)
        self.capacity = max(window, max_pending + max_tokens) + max_tokens
        self.parameters = operator.parameters(geometry, dtype)
        nothing = operator.draw(self.rows, 0, geometry, dtype)
        self.rings = operator.rings(nothing, self.capacity)
        wide = torch.promote_types(torch.float32, dtype)
        self.state = torch.randn(self.rows, geometry.heads, geometry.head_dim, geometry.state_dim).to(wide)
        self.base, self.committed, self.pending = list(first), [0] * self.rows, [0] * self.rows
        # per row: tokens not committed yet, and per dtype the state before them
        self.tail = [part({n: t[row : row + 1] for n, t in nothing.items()}, 0, 0) for row in range(self.rows)]
        self.before = {d: [self.state[row : row + 1].to(d) for row in range(self.rows)] for d in oracle_dtypes}

    @property
    def cursor(self) -> Tensors:
        """``base, committed, pending`` as tensors."""
        return cursor(self.base, self.committed, self.pending)

    def due(self, tokens: int) -> list[bool]:
        """Which rows flush in a step of so many tokens."""
        return [h + u + tokens > self.window for h, u in zip(self.committed, self.pending, strict=True)]

    def append(self, tokens: Tensors, **arguments: Any) -> tuple[torch.Tensor, dict[torch.dtype, torch.Tensor]]:
        """One step; its output and, per dtype, the oracle's."""
        count = length(tokens)
        truth: dict[torch.dtype, torch.Tensor] = {}
        for dtype, before in self.before.items():
            rows = []
            for row in range(self.rows):
                seen = join(self.tail[row], {name: tensor[row : row + 1] for name, tensor in tokens.items()})
                output, _ = self.operator.oracle(seen, self.parameters, before[row], dtype)
                rows.append(output[:, length(self.tail[row]) :])
            truth[dtype] = torch.cat(rows)
        output = self.operator.step(
            tokens, self.parameters, state=self.state, **self.rings, **self.cursor, window=self.window, **arguments
        )
        for row, due in enumerate(self.due(count)):
            if due:
                self.base[row], self.committed[row] = self.base[row] + self.committed[row], 0
            self.pending[row] += count
            self.tail[row] = join(self.tail[row], {name: tensor[row : row + 1] for name, tensor in tokens.items()})
        return output, truth

    def settle(self, row: int, accepted: int, still_pending: int = 0) -> None:
        """Commit a row's ``accepted`` oldest pending tokens, keep the next ones pending, reject the others."""
        assert accepted + still_pending <= self.pending[row]
        for dtype, before in self.before.items():
            taken = part(self.tail[row], 0, accepted)
            _, before[row] = self.operator.oracle(taken, self.parameters, before[row], dtype)
        self.tail[row] = part(self.tail[row], accepted, accepted + still_pending)
        self.committed[row] += accepted
        self.pending[row] = still_pending

    def settle_all(self) -> None:
        """Commit everything."""
        for row in range(self.rows):
            self.settle(row, self.pending[row])

    def folded(self) -> torch.Tensor:
        """The operator's state after every live record."""
        count = torch.tensor(self.committed) + torch.tensor(self.pending)
        operands = self.operator.fold_operands(self.rings, self.parameters)
        return self.operator.kernel.folded_state(self.state, *operands, base=torch.tensor(self.base), count=count)

    def true_state(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The oracle's state after every live record."""
        states = [
            self.operator.oracle(self.tail[row], self.parameters, self.before[dtype][row], dtype)[1]
            for row in range(self.rows)
        ]
        return torch.cat(states)

    def live(self) -> torch.Tensor:
        """bool ``[rows, capacity]``: slots of records that are committed or pending."""
        mask = torch.zeros(self.rows, self.capacity, dtype=torch.bool)
        for row in range(self.rows):
            for age in range(self.committed[row] + self.pending[row]):
                mask[row, (self.base[row] + age) % self.capacity] = True
        return mask
