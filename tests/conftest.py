"""For every test: one thread, no network, a seed, a fresh compiler, poisoned memory.

Slow tests and those for a GPU are skipped with a reason.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

# Before transformers, tokenizers and triton are imported, here or in a subprocess.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"

import hypothesis
import numpy as np
import pytest
import torch
from torch.utils._device import _device_constructors

from tests import poison

# Two test processes with two threads each, on two cores, ran 200 times slower than with one thread each.
torch.set_num_threads(1)
torch.set_num_interop_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels then run on the CPU

hypothesis.settings.register_profile("here", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")

# `with torch.device(...)` remembers torch.empty and its relatives at its first use: now, before they are poisoned.
_device_constructors()

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow; --run-slow runs it")
    skip_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(skip_slow)
        if GPU_TESTS in item.path.parents and not torch.cuda.is_available():
            item.add_marker(skip_gpu)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Whatever ran before in this process: graphs, shapes that were seen, code that is not compiled again."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("no_poison") is None:
        for owner, name, wrapper in poison.wrappers:
            monkeypatch.setattr(owner, name, wrapper)


@pytest.fixture
def enabled() -> Iterator[None]:
    """transformers patched for the length of a test."""
    import replay_transformers

    with replay_transformers.enable():
        yield
