"""Launch configurations: what is looked up, what overrides it, which tables are refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_transformers.kernels import launch, launch_table
from replay_transformers.kernels.folds import LIST, FoldLaunch
from replay_transformers.kernels.launch import Launch, choose
from replay_transformers.kernels.launch_table import DEFAULT, OPERATORS, Entry, find

CPU = torch.device("cpu")
# of the state, in float32, per thread, which has 255 registers; Gated DeltaNet streams it
MOST_VALUES_PER_THREAD = {"mamba2": 128, "gated_delta": 512, "causal_conv": 128}


@pytest.fixture(autouse=True)
def _tables_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(launch.VARIABLE, raising=False)
    launch.reload()
    yield
    launch.reload()


def entry(
    block: int,
    *,
    gpu: str = DEFAULT,
    operator: str = "mamba2",
    shape: tuple[int, int] = (64, 128),
    tokens: str = "1-8",
    least: int = 0,
) -> Entry:
    return Entry(gpu, operator, *shape, tokens, least, Launch(block, 1))


def block_for(entries: list[Entry], gpu: str = "GPU", **case: int) -> int:
    wanted = {"size": 100, "tokens": 1, "head_dim": 64, "state_dim": 128} | case
    return find(entries, gpu, "mamba2", **wanted).block


def test_the_gpus_own_entries_come_first() -> None:
    entries = [
        entry(2),
        entry(4, gpu="GPU", shape=(256, 256)),
        entry(8, gpu="GPU 2"),
        entry(16, operator="gated_delta"),
    ]
    assert block_for(entries) == 4
    assert block_for(entries, "GPU 2") == 8
    assert block_for(entries, "another") == 2
    with pytest.raises(ValueError, match=r"no launch configuration for 'causal_conv' on 'GPU'"):
        find(entries, "GPU", "causal_conv", 1, 1, 0, 0)


def test_the_nearest_shape_of_heads() -> None:
    entries = [entry(2, shape=(64, 64)), entry(4, shape=(64, 128)), entry(8, shape=(128, 128))]
    assert block_for(entries) == 4
    assert block_for(entries, head_dim=80) == 4
    assert block_for(entries, head_dim=96) == 8
    assert block_for(entries, state_dim=16) == 2
    assert block_for(entries, head_dim=512, state_dim=512) == 8


def test_the_nearest_number_of_tokens() -> None:
    entries = [entry(2, tokens="1"), entry(4, tokens="2-4"), entry(8, tokens="7-8"), entry(16, tokens="1-8")]
    assert [block_for(entries[:3], tokens=n) for n in (1, 2, 4, 5, 6, 7, 9)] == [2, 4, 4, 4, 8, 8, 8]
    assert [block_for(entries, tokens=n) for n in (1, 3, 6)] == [2, 4, 16]  # the narrowest of those that hold


def test_the_largest_size_that_is_not_above() -> None:
    entries = [entry(8, least=1000), entry(2, least=10), entry(4, least=100)]
    assert [block_for(entries, size=n) for n in (1, 10, 99, 100, 999, 1000, 10**9)] == [2, 2, 2, 4, 4, 8, 8]


def test_every_entry_suits_the_kernels() -> None:
    entries = launch_table.read(launch.TABLE)
    assert {line.operator for line in entries if line.gpu == DEFAULT} == set(OPERATORS)
    for line in entries:
        registers = line.launch.block * max(line.state_dim, 1) // (32 * line.launch.warps)
        assert registers <= MOST_VALUES_PER_THREAD[line.operator], line
        assert line.launch.block >= 4, line


@pytest.mark.parametrize("operator", OPERATORS)
def test_few_rows_are_not_launched_more_widely_than_many(operator: str) -> None:
    sizes = [2**n for n in range(6, 24)]
    for tokens in (1, 4):
        shares = [choose(operator, CPU, size, tokens, 128, 128).share for size in sizes]
        assert shares == sorted(shares)


def test_a_table_is_written_as_it_is_read(tmp_path: Path) -> None:
    entries = launch_table.read(launch.TABLE)
    launch_table.write(tmp_path / "table.json", reversed(entries))
    assert (tmp_path / "table.json").read_text() == launch.TABLE.read_text()


def test_a_gpu_is_asked_for_its_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def name(device: torch.device) -> str:
        asked.append(device)
        return "GPU"

    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    launch.gpu_name.cache_clear()
    for size in (1, 1, 5000):
        assert choose("mamba2", torch.device("cuda", 3), size, 1, 64, 128) == choose("mamba2", CPU, size, 1, 64, 128)
    launch.gpu_name.cache_clear()
    assert asked == [torch.device("cuda", 3)]


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_kernels_begin_early_where_the_gpu_can_do_it(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    from replay_transformers.kernels import overlap

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    overlapping = overlap.overlapping.__wrapped__
    assert overlapping(CPU) == {}
    assert overlapping(torch.device("cuda")) == ({"launch_pdl": True} if capability >= (9, 0) else {})
    monkeypatch.delattr(compiler.CUDAOptions, "launch_pdl")
    assert overlapping(torch.device("cuda")) == {}


@pytest.mark.parametrize("rows", [1, 2, 300, 5000])
@pytest.mark.parametrize("whole", [False, True])
def test_folds_have_programs_for_every_list_of_rows(rows: int, whole: bool) -> None:
    how = FoldLaunch(block=16, warps=1, stages=1, programs=8, whole=whole)
    assert (how.tile(80), how.tile(8), how.tile(8, 16)) == (16, 8, 16)
    assert (how.tiles(80), how.tiles(8)) == ((5, 1) if whole else (1, 1))
    programs, lists = how.grid(rows, 1, 80)
    assert lists * LIST >= rows > (lists - 1) * LIST
    assert programs >= 1
    assert programs * lists >= min(8, rows * (1 if whole else 5))


def test_override() -> None:
    usual, one, two = choose("mamba2", CPU, 1, 1, 64, 128), Launch(4, 4), Launch(32, 2, 8, 4)
    other = choose("gated_delta", CPU, 1, 1, 64, 128)
    with launch.override("mamba2", one):
        assert choose("mamba2", CPU, 1, 1, 64, 128) == one
        with contextlib.suppress(KeyError), launch.override("mamba2", two):
            assert choose("mamba2", CPU, 9, 9, 9, 9) == two
            assert choose("gated_delta", CPU, 1, 1, 64, 128) == other
            raise KeyError
        assert choose("mamba2", CPU, 1, 1, 64, 128) == one
    assert choose("mamba2", CPU, 1, 1, 64, 128) == usual
    with pytest.raises(ValueError, match="operator must be one of mamba2, gated_delta, causal_conv, got 'conv'"):
        launch.override("conv", one).__enter__()


@pytest.mark.parametrize("fields", [(3, 1), (8, 0), (8, 64), (8, 1, 3), (8, 1, 2, -1), (8.0, 1), (True, 1)])
def test_launches_that_no_kernel_can_have(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be a power of two, got|must be at most 32, got 64"):
        Launch(*fields)


def test_the_environments_table_adds_and_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    launch_table.write(path, [entry(32, least=5), entry(4, operator="gated_delta", shape=(16, 16))])
    before = {size: choose("gated_delta", CPU, size, 1, 128, 128) for size in (1, 5000)}
    monkeypatch.setenv(launch.VARIABLE, str(path))
    launch.reload()
    assert choose("mamba2", CPU, 5000, 1, 64, 128) == Launch(32, 1)  # in spite of the package's line from 4096 on
    assert choose("gated_delta", CPU, 1, 1, 16, 16) == Launch(4, 1)
    assert {size: choose("gated_delta", CPU, size, 1, 128, 128) for size in (1, 5000)} == before


GOOD = entry(8).to_fields()
BAD_TABLES: dict[str, tuple[Any, str]] = {
    "no list": ({}, "expected a list of entries in .*, got dict"),
    "no object": ([GOOD, 3], "entry 2 of .*: expected an object, got 3"),
    "operator": (
        [GOOD | {"operator": "mamba"}],
        "operator must be one of mamba2, gated_delta, causal_conv, got 'mamba'",
    ),
    "missing": ([{"operator": "mamba2"}], "expected the fields gpu, operator, head_dim.*, got operator"),
    "unknown": ([GOOD | {"stages": 3}], "expected the fields .*, got .*stages"),
    "heads of a convolution": ([GOOD | {"operator": "causal_conv"}], "expected the fields gpu, operator, tokens, from"),
    "gpu": ([GOOD | {"gpu": ""}], "gpu must be a name or 'default', got ''"),
    "head_dim": ([GOOD | {"head_dim": 0}], "head_dim must be an integer of at least 1, got 0"),
    "from": ([GOOD | {"from": -1}], "from must be an integer of at least 0, got -1"),
    "tokens": ([GOOD | {"tokens": 4}], "tokens must be like '1' or '2-8', got 4"),
    "backwards": ([GOOD | {"tokens": "8-2"}], "tokens must be like '1' or '2-8', got '8-2'"),
    "block": ([GOOD | {"block": 12}], "block must be a power of two, got 12"),
    "warps": ([GOOD | {"warps": 64}], "warps must be at most 32, got 64"),
    "twice": ([GOOD, GOOD | {"block": 16}], "entry 2 of .* is for the same case as an earlier one"),
}


@pytest.mark.parametrize(("content", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_tables(content: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    monkeypatch.setenv(launch.VARIABLE, str(path))
    with pytest.raises(ValueError, match=message):
        choose("mamba2", CPU, 1, 1, 64, 128)


@pytest.mark.parametrize("prepare", [lambda path: path.write_text("{"), lambda path: None], ids=["no JSON", "no file"])
def test_unreadable_tables(prepare: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    prepare(path)
    monkeypatch.setenv(launch.VARIABLE, str(path))
    with pytest.raises(ValueError, match=f"expected a JSON file at {path}, got "):
        choose("mamba2", CPU, 1, 1, 64, 128)
