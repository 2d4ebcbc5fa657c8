"""Two GPUs that share a model by tensor parallelism."""

from pathlib import Path

import pytest
import torch

from tests.support.models import FAMILIES
from tests.support.tensor_parallel import check_two_processes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes(family: str, tmp_path: Path) -> None:
    check_two_processes(family, tmp_path, on_gpus=True)
