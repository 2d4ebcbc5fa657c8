"""Slots, the flush rule, sums of log-decays, and what the kernels import."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from replay_transformers.kernels.decay import at_least_float32, segment_sums, suffix_sums
from replay_transformers.kernels.ring import gather_records, record_slots, rows_due, write_records

ROOT = Path(__file__).parents[2]


@given(st.lists(st.integers(-20, 2**40), min_size=1, max_size=3), st.integers(0, 9), st.integers(1, 9))
@example([2**31 - 3, 2**33 + 5, -4], 9, 7)  # no 32-bit arithmetic
def test_slots_are_positions_modulo_capacity(starts: list[int], length: int, capacity: int) -> None:
    slots = record_slots(torch.tensor(starts), length, capacity)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [[(start + i) % capacity for i in range(length)] for start in starts]


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 20), st.integers(1, 30), st.integers(0, 29))
def test_the_flush_rule(committed: int, pending: int, tokens: int, window: int, early: int) -> None:
    pointers = (torch.tensor([committed, 0]), torch.tensor([pending, 0]))
    due = rows_due(*pointers, tokens, window, torch.tensor([early, 0]))
    assert due.tolist() == [committed + pending + tokens > window - early, tokens > window]


@pytest.mark.parametrize("dim", [1, 2])
def test_records_come_back_in_order(dim: int) -> None:
    """Written over the ring's end, read by age; dead entries are zero even where the ring holds NaN."""
    shape = [2, 3, 4]
    shape.insert(dim, 5)
    ring = torch.full(shape, float("nan"), dtype=torch.bfloat16)
    shape[dim] = 3
    values = torch.randn(shape, requires_grad=True)
    write_records(ring, record_slots(torch.tensor([4, 2]), 3, 5), values, dim)
    assert not ring.requires_grad
    live = torch.tensor([[True, True, True, False], [False, True, True, False]])
    records = gather_records(ring, record_slots(torch.tensor([4, 2]), 4, 5), live, dim).movedim(dim, 1)
    expected = values.detach().bfloat16().movedim(dim, 1)
    assert torch.equal(records[0, :3], expected[0])
    assert torch.equal(records[1, 1:3], expected[1, 1:])
    assert (records[:, 3] == 0).all()
    assert (records[1, 0] == 0).all()


@given(st.lists(st.floats(-200, 0, width=32), min_size=1, max_size=12))
def test_sums_over_segments(logs: list[float]) -> None:
    """float64 against math.fsum-like sums of Python floats: 12 terms up to 200 round by less than 1e-12."""
    tensor = torch.tensor(logs, dtype=torch.float64)
    after, total = suffix_sums(tensor)
    segments = segment_sums(tensor)
    n = len(logs)
    torch.testing.assert_close(total.item(), sum(logs), rtol=0, atol=1e-12)
    torch.testing.assert_close(after.tolist(), [float(sum(logs[j + 1 :])) for j in range(n)], rtol=0, atol=1e-12)
    expected = [[float(sum(logs[j + 1 : t + 1])) if j <= t else float("-inf") for j in range(n)] for t in range(n)]
    torch.testing.assert_close(segments.tolist(), expected, rtol=0, atol=1e-12)


def test_a_segment_does_not_feel_what_lies_outside_it() -> None:
    """Differences of prefix sums would lose all 1e-3 next to 1e6 in float32."""
    logs = torch.tensor([-1e6, -1e-3, -2e-3, -1e6])
    segments, (after, _) = segment_sums(logs), suffix_sums(logs[:3])
    assert segments[2, 0] == torch.tensor(-1e-3) + torch.tensor(-2e-3)
    assert after[0] == torch.tensor(-2e-3) + torch.tensor(-1e-3)
    assert segments.exp().isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_computing_dtype(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert at_least_float32(dtype) == wide


IMPORT_ALONE = """
import importlib, pkgutil, sys, types
root, what, *forbidden = sys.argv[1:]
package = types.ModuleType("replay_transformers")  # the folder only, without the package's own imports
package.__path__ = [root]
sys.modules["replay_transformers"] = package
for name in forbidden:
    assert name not in sys.modules, name
    sys.modules[name] = None  # importing it raises
kernels = importlib.import_module("replay_transformers.kernels")
found = [module.name for module in pkgutil.walk_packages(kernels.__path__, "replay_transformers.kernels.")]
found = [name for name in found if not name.endswith(".library")]  # these import libraries that need a GPU
chosen = [name for name in found if what == "everything" or name.endswith(".reference")]
for name in chosen:
    importlib.import_module(name)
print(*chosen)
"""


def import_alone(what: str, *forbidden: str) -> set[str]:
    """Import kernel modules in a process that cannot import the forbidden packages; the modules' names."""
    command = [sys.executable, "-c", IMPORT_ALONE, str(ROOT), what, *forbidden]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return {name.removeprefix("replay_transformers.kernels.") for name in result.stdout.split()}


def test_references_import_neither_transformers_nor_triton() -> None:
    found = import_alone("references", "transformers", "triton")
    assert {"mamba2.reference", "gated_delta.reference", "causal_conv.reference"} <= found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_no_kernel_imports_transformers() -> None:
    assert {"ring", "decay", "saturate", "mamba2.reference"} <= import_alone("everything", "transformers")
