"""Equality on a GPU is claimed in float32: no tf32 anywhere. flash-linear-attention uses it, so it is left out."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

sys.modules.setdefault("fla", None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Grows with every CUDA graph that our own backend captures, by the device it is on."""
    from replay_transformers.patches import capture  # not before flash-linear-attention is left out

    made: list[torch.device] = []
    record = capture.record

    def counting(function: Any, operands: Any) -> Any:
        made.append(operands[0].device)
        return record(function, operands)

    monkeypatch.setattr(capture, "record", counting)
    return made
