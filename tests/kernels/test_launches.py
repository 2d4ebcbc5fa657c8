"""What one step of the Triton kernels launches, and how often it touches each element of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replay_transformers.kernels.launch import Launch, override
from tests.support.kernels import INTERPRETED, KERNELS, OPERATORS_IN_TRITON, make_case
from tests.support.operators import Geometry, Operator
from tests.support.precisions import Precise

KERNEL = pytest.importorskip("triton").runtime.jit.KernelInterface
# of rows with 5 and 2 committed records; None promises that no row is due, of zeros only the GPU knows
FOLDS = {"None": None, "zeros": [0, 0], "one row": [5, 0], "all": [5, 2]}
EVERY_FOLD = pytest.mark.parametrize("folds", FOLDS.values(), ids=FOLDS)
# as the modules' docstrings say: where rows may be due, and where such rows have a state in a format of its own
FOLDING = {"mamba2": ["prepare", "step"], "gated_delta": ["prepare", "step", "fold"]}
STORED = ["prepare", "stored_fold", "stored_step"]


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """The interpreter takes its time for each."""
    launch = Launch(block=16, warps=1, share=4)
    with override("mamba2", launch), override("gated_delta", launch):
        yield


class Noted:
    """A kernel in a module that notes its launches."""

    def __init__(self, kernel: Any, note: Callable[[], None], calls: Calls) -> None:
        self.kernel, self.note, self.calls = kernel, note, calls

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*operands: Any, **sizes: Any) -> None:
            self.note()
            self.calls.is_inside = True  # the interpreter copies operands with operators of torch's
            try:
                self.kernel[grid](*operands, **sizes)
            finally:
                self.calls.is_inside = False

        return launch


class Calls(TorchDispatchMode):
    """The kernels of a module that steps launch, in their order, and what else they run."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.module: ModuleType = KERNELS[name]
        self.launched: list[str] = []
        self.operators: list[str] = []
        self.is_inside = False
        for kernel, value in list(vars(self.module).items()):
            if isinstance(value, KERNEL):

                def note(short: str = kernel.removeprefix(f"{name}_")) -> None:
                    self.launched.append(short)

                monkeypatch.setattr(self.module, kernel, Noted(value, note, self))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        if not (self.is_inside or is_view or func is torch.ops.aten.empty.memory_format):
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))

    def replay_step(self, *operands: Any, **arguments: Any) -> torch.Tensor:
        """The module's, watched."""
        with self:
            return self.module.replay_step(*operands, **arguments)


@OPERATORS_IN_TRITON
@EVERY_FOLD
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_what_a_step_launches(
    operator: Operator, count: int, folds: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that are documented, each once, and no operator of torch's that takes time."""
    calls = Calls(operator.name, monkeypatch)
    make_case(operator, Geometry(2, 1, 5, 6), count, folds=folds).run(calls)
    assert calls.launched == (["prepare", "step"] if folds is None else FOLDING[operator.name])
    assert calls.operators == []


@OPERATORS_IN_TRITON
@pytest.mark.parametrize("folds", [None, [5, 0]], ids=["None", "one row"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("checkpoint", "readout"), [("fp8", None), ("float32", "nvfp4")])
def test_what_a_step_on_a_stored_state_launches(
    operator: Operator,
    checkpoint: str,
    readout: str | None,
    count: int,
    folds: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third kernel folds rows that may be due before they are read."""
    calls = Calls(operator.name, monkeypatch)
    Precise(make_case(operator, Geometry(2, 1, 5, 6), count, folds=folds), checkpoint, readout).run(calls)
    assert calls.launched == [kernel for kernel in STORED if folds is not None or "fold" not in kernel]
    assert calls.operators == []


class Touches:
    """How often a step loads and stores each element of the checkpoint; only in the interpreter."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self.module = KERNELS[name]
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def masked_load(builder: Any, places: Any, mask: Any, *rest: Any) -> Any:
            self.note(self.loads, places, mask)
            return load(builder, places, mask, *rest)

        def masked_store(builder: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.note(self.stores, places, mask)
            return store(builder, places, value, mask, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", masked_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", masked_store)

    def note(self, counts: torch.Tensor, places: Any, mask: Any) -> None:
        """Count the addresses that lie in the checkpoint."""
        bytes_in = torch.from_numpy(places.data[mask.data].astype("int64")) - self.first
        inside = bytes_in[(bytes_in >= 0) & (bytes_in < counts.numel() * self.size)]
        counts += torch.bincount(inside // self.size, minlength=counts.numel()).view_as(counts)

    def replay_step(self, *operands: Any, state: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The module's, watched."""
        self.first, self.size = state.data_ptr(), state.itemsize
        self.loads, self.stores = (torch.zeros(state.shape, dtype=torch.int64) for _ in range(2))
        return self.module.replay_step(*operands, state=state, **arguments)


@pytest.mark.skipif(not INTERPRETED, reason="loads are watched in Triton's interpreter")
@OPERATORS_IN_TRITON
@pytest.mark.parametrize("folds", [None, [5, 0]], ids=["None", "one row"])
@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, torch.float32), (1, torch.bfloat16), (2, torch.float32), (5, torch.bfloat16), (8, torch.float32)],
    ids=["1-f32", "1-bf16", "2-f32", "5-bf16", "8-f32"],
)
def test_how_often_a_step_reads_the_checkpoint(
    operator: Operator, count: int, dtype: torch.dtype, folds: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every element once, and none is written; in rows that are due once more, and written once.

    Heads of more channels than a block has, and of more states than are read at a time.
    """
    touches = Touches(operator.name, monkeypatch)
    make_case(operator, Geometry(1, 1, 20, 140), count, folds=folds, state_dtype=dtype).run(touches)
    for row, folded in enumerate(folds or [0, 0]):
        assert set(touches.loads[row].unique().tolist()) == {2 if folded else 1}
        assert set(touches.stores[row].unique().tolist()) == {1 if folded else 0}
