"""A stand-in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Recorder:
    """Stands in for `capture.record` on a CPU: recording changes nothing, replaying fills the same outputs again."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, function: Any, inputs: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Callable[[], None]]:
        self.recorded += 1
        held = list({id(tensor): tensor for tensor in [*inputs, *_constants(function)]}.values())
        before = [tensor.clone() for tensor in held]
        with torch.no_grad():
            outputs = function(*inputs)
            for tensor, values in zip(held, before, strict=True):
                tensor.copy_(values)

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                for output, value in zip(outputs, function(*inputs), strict=True):
                    output.copy_(value)

        return outputs, replay


def _constants(function: Any) -> list[torch.Tensor]:
    """Tensors that dynamo put into the graph instead of passing them as inputs."""
    return [value for value in vars(function).get("_buffers", {}).values() if value is not None]
