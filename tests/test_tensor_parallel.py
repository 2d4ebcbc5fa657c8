"""Two processes that share a model by tensor parallelism, on the CPU; tests/gpu has the same on two GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replay_transformers.patches.agreement import agreement
from tests.support.models import FAMILIES
from tests.support.tensor_parallel import check_two_processes


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes(family: str, tmp_path: Path) -> None:
    check_two_processes(family, tmp_path, on_gpus=False)


def test_who_has_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: Any = SimpleNamespace()
    assert agreement(alone) is None
    shared: Any = SimpleNamespace(_tp_size=2)
    assert agreement(shared) is None, "no processes"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(NotImplementedError, match="split over 2 of 4 processes"):
        agreement(shared)
