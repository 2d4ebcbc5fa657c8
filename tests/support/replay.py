"""Steps a recurrent operator as a cache does, with an oracle beside it."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.operators import Geometry, Operator, Tensors, cursor, folds, join, length, part


class Replay:
    """Steps an operator as a cache does, every row with a cursor of its own.

    Per row it also keeps the tokens not yet committed and the oracle's state before them, so that the truth about any
    step, whatever was rejected before, is a plain recurrence over what the row has really seen.

    Args:
        operator: the operator. geometry: its shapes. window: of the flush rule.
        max_pending: tokens that may be uncommitted when a step starts. max_tokens: tokens in one step.
        first: absolute position of the first token, per row.
        dtype: of the activations. oracle_dtypes: of the recurrences beside it.
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
        self.state = torch.randn(self.rows, *operator.state_shape(geometry)).to(wide)
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
        arguments = {"folds": folds(self.cursor, count, self.window), **arguments}
        output = self.operator.step(tokens, self.parameters, state=self.state, **self.rings, **self.cursor, **arguments)
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
