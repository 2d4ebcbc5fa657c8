"""Every format of the state at real sizes on a GPU, in graphs, and through `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

pytest.importorskip("triton")

from replay_transformers.kernels.formats.stored import readable
from tests.gpu.test_kernels import EVERY_GEOMETRY, LARGE, REAL, spread, with_rows
from tests.support.generation import returned_cache
from tests.support.kernels import DEVICE, KERNELS, Result, bits, make_case
from tests.support.models import FAMILIES, SQUARE, WITHOUT_EXPERTS, prompt
from tests.support.operators import Geometry, Operator
from tests.support.precisions import EVERY_PRECISION, Precise, clone, part_rows, parts_of

FOUR_MODELS = pytest.mark.parametrize(("operator", "geometry"), [REAL[0], REAL[2]], ids=["mamba2", "gated_delta"])


@EVERY_GEOMETRY
@EVERY_PRECISION
def test_real_sizes(operator: Operator, geometry: Geometry, checkpoint: str, readout: str | None) -> None:
    Precise(make_case(operator, geometry, 1, dtype=torch.bfloat16, **spread(5, 1)), checkpoint, readout).check()


@FOUR_MODELS
@EVERY_PRECISION
@pytest.mark.parametrize("count", [4, 8, 11])
def test_more_tokens(operator: Operator, geometry: Geometry, checkpoint: str, readout: str | None, count: int) -> None:
    Precise(make_case(operator, geometry, count, dtype=torch.bfloat16, **spread(3, count)), checkpoint, readout).check()


@FOUR_MODELS
@pytest.mark.parametrize(("checkpoint", "readout"), [("float32", None), ("float32", "fp8"), ("nvfp4", None)])
def test_decay_skip(operator: Operator, geometry: Geometry, checkpoint: str, readout: str | None) -> None:
    """A threshold under which some heads fall and others do not."""
    Precise(make_case(operator, geometry, 1, dtype=torch.bfloat16, **spread(5, 1)), checkpoint, readout, 0.1).check()


@pytest.mark.xdist_group("large")
@pytest.mark.no_poison
@pytest.mark.parametrize(("operator", "geometry"), [REAL[1], REAL[3]], ids=["mamba2", "gated_delta"])
@pytest.mark.parametrize(("checkpoint", "readout"), [("nvfp4", None), ("float32", "fp8")])
def test_states_of_more_than_two_to_the_31_elements(
    operator: Operator, geometry: Geometry, checkpoint: str, readout: str | None
) -> None:
    """Also two in a byte. Three rows, repeated: every repetition gives the same bits, the first and last are right."""
    small = Precise(
        make_case(operator, geometry, committed=(5, 16, 3), pending=(1, 0, 2), folds=[5, 16, 0], dtype=torch.bfloat16),
        checkpoint,
        readout,
    )
    small.check()
    per_row = min(state["values"][0].numel() for state in map(parts_of, (small.state, small.readout)) if state)
    repeats = LARGE // (3 * per_row) + 1
    rows = torch.arange(3 * repeats, device=DEVICE) % 3
    large = Precise.__new__(Precise)
    large.case, large.decay_skip = with_rows(small.case, rows), 0.0
    large.state, large.readout = part_rows(small.state, rows), part_rows(small.readout, rows)
    got, state, copy = large.run(KERNELS[operator.name])
    del large
    assert parts_of(state)["values"].numel() > LARGE
    for part in (torch.arange(3, device=DEVICE), torch.arange(3 * repeats - 3, 3 * repeats, device=DEVICE)):
        found = Result(got.output[part], {name: ring[part] for name, ring in got.buffers.items()})
        small.compare(found, part_rows(state, part), part_rows(copy, part))
    for tensor in (got.output, *got.buffers.values(), *parts_of(state).values(), *parts_of(copy).values()):
        repeated = bits(tensor).unflatten(0, (repeats, 3))
        assert all(torch.equal(repeated[i], repeated[0]) for i in range(repeats))


@FOUR_MODELS
@pytest.mark.parametrize("name", ["fp8_sr", "float16_sr"])
def test_a_replayed_graph_draws_new_random_numbers(operator: Operator, geometry: Geometry, name: str) -> None:
    """The same fold at another position of the row rounds otherwise, at the same one alike."""
    case = make_case(operator, geometry, 1, dtype=torch.bfloat16, committed=(16,), pending=(0,), folds=[16])
    precise = Precise(case, name, None)
    state, rings = clone(precise.state), {n: ring.clone() for n, ring in case.buffers.items() if n != "state"}
    base = case.position["base"].clone()
    arguments: dict[str, Any] = {**case.position, "base": base, "folds": case.folds, "state": state, **rings}
    operands = [*case.tokens.values(), *case.parameters.values()]
    start = {n: part.clone() for n, part in state.parts.items()}

    def restore() -> None:
        for n, part in state.parts.items():
            part.copy_(start[n])

    step = KERNELS[operator.name].replay_step
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        step(*operands, **arguments)
    stream.synchronize()
    restore()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        step(*operands, **arguments)
    seen = []
    capacity = rings[next(iter(rings))].shape[2]
    for moved in (0, capacity, 0):  # the same slots
        restore()
        base.copy_(case.position["base"] + moved)
        graph.replay()
        torch.cuda.synchronize()
        seen.append({n: part.clone() for n, part in parts_of(state).items()})
    assert all(torch.equal(seen[0][n], seen[2][n]) for n in seen[0])
    assert not torch.equal(seen[0]["values"], seen[1]["values"])


SETTINGS = pytest.mark.parametrize(
    "settings", [{"readout": "fp8"}, {"readout": "nvfp4"}, {"checkpoint": "fp8_sr"}], ids=str
)


def _check_generate(model: Any, settings: dict[str, Any], **calling: Any) -> None:
    """The logits of the reference up to values that are rounded to the other side, over flushes: the first of a prompt
    that lies in the ring, then of two steps each. Such a value may also decide between two tokens; from there on the
    row is left out."""
    inputs = prompt(3, 9, [0, 1, 5])
    arguments: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    arguments |= {"output_logits": True, "cache_config": {"window": 2, **settings}}
    truth = model.generate(**inputs, **arguments, cache_implementation="replay")
    cuda = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    output = model.to(DEVICE).generate(**cuda, **arguments, **calling)
    want, got = torch.stack(truth.logits[:6]), torch.stack(output.logits[:6]).cpu()
    tokens = output.sequences.cpu()
    same = torch.stack([(tokens == truth.sequences)[:, : 9 + step].all(1) for step in range(6)])
    assert same[-1].any()
    assert (got - want)[same].norm() <= 1e-2 * want[same].norm()
    cursors = [returned_cache(found).cursor.tensors()[0].cpu() for found in (truth, output)]
    assert torch.equal(*cursors)
    assert cursors[0].min() > 9


@pytest.mark.usefixtures("enabled")
@pytest.mark.no_poison
@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@SETTINGS
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family: str, settings: dict[str, Any], implementation: str) -> None:
    _check_generate(FAMILIES[family](), settings, cache_implementation=implementation, disable_compile=True)


@pytest.mark.usefixtures("enabled")
@pytest.mark.no_poison
@SETTINGS
@pytest.mark.parametrize("family", SQUARE)
def test_heads_as_wide_as_their_states(family: str, settings: dict[str, Any]) -> None:
    _check_generate(SQUARE[family](), settings, cache_implementation="replay_static", disable_compile=True)


@pytest.mark.usefixtures("enabled")
@pytest.mark.no_poison
@SETTINGS
@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_generate_in_graphs(family: str, settings: dict[str, Any], captures: list[torch.device]) -> None:
    """Recorded at the second step, replayed from then on."""
    graphs = {"cache_implementation": "replay_static", "compile_config": CompileConfig(backend="cudagraphs")}
    _check_generate(WITHOUT_EXPERTS[family](), settings, **graphs)
    assert len(captures) == 1


def test_a_stored_state_reads_alike_on_both_devices() -> None:
    operator, geometry = REAL[0]
    precise = Precise(make_case(operator, geometry, 1, **spread(2, 1)), "nvfp4", "fp8")
    for state in (precise.state, precise.readout):
        on_cpu = state.with_parts({name: part.cpu() for name, part in state.parts.items()})
        assert torch.equal(readable(on_cpu, torch.float32), readable(state, torch.float32).cpu())
