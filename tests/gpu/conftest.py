"""Equality on a GPU is claimed in float32: no tf32 anywhere. flash-linear-attention uses it, so it is left out."""

import sys
from collections.abc import Iterator

import pytest
import torch

sys.modules.setdefault("fla", None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed
