"""The libraries' scans over prompts against the reference, on every GPU while the first one is current."""

from __future__ import annotations

import pytest
import torch

from replay_transformers.implementation import LIBRARIES
from tests.support.libraries import is_there, scan_errors

# Their products are of bfloat16 numbers, each 2^-9 off: 0.2%, a few of them one after another; a scan on the wrong
# stream or of another state is off by more than half.
TOLERANCE = 0.02


@pytest.mark.no_poison
@pytest.mark.parametrize("index", range(torch.cuda.device_count()))
@pytest.mark.parametrize("operator", LIBRARIES)
def test_scans(operator: str, index: int) -> None:
    errors = scan_errors(operator, f"cuda:{index}") if is_there(operator) else None
    if errors is None:
        pytest.skip(f"{LIBRARIES[operator]} is not installed")
    assert max(map(max, errors)) <= TOLERANCE


@pytest.mark.no_poison
@pytest.mark.parametrize("operator", LIBRARIES)
def test_scans_of_more_rows_than_a_library_takes(operator: str) -> None:
    errors = scan_errors(operator, "cuda:0", many=True) if is_there(operator) else None
    if errors is None:
        pytest.skip(f"{LIBRARIES[operator]} is not installed")
    assert max(map(max, errors)) <= TOLERANCE
