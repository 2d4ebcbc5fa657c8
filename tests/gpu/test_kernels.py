"""The Triton kernels on a GPU: real geometries and batches, addresses beyond 32 bits, CUDA graphs, compiled decoding.

Tolerances and claims about bytes as in `tests.support.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from replay_transformers.kernels.causal_conv import reference as conv_reference
from tests.support.kernels import (
    DEVICE,
    KERNELS,
    OPERATORS_IN_TRITON,
    Case,
    assert_as_good,
    bits,
    check_case,
    from_projection,
    make_case,
)
from tests.support.models import WITHOUT_EXPERTS, greedy_without_cache, prompt
from tests.support.operators import GATED_DELTA, MAMBA2, Geometry, Operator, Tensors

WINDOW = 16
LARGE = 2**31  # elements, from which on int32 offsets overflow
# heads, groups (key heads), width of a head, of a state: of four released models
REAL: list[tuple[Operator, Geometry]] = [
    (MAMBA2, Geometry(96, 8, 80, 128)),
    (MAMBA2, Geometry(128, 8, 64, 128)),
    (GATED_DELTA, Geometry(32, 16, 128, 128)),
    (GATED_DELTA, Geometry(64, 16, 128, 128)),
]
EVERY_GEOMETRY = pytest.mark.parametrize(
    ("operator", "geometry"), REAL, ids=[f"{operator}-{geometry}" for operator, geometry in REAL]
)
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)


def spread(rows: int, count: int, window: int = WINDOW) -> dict[str, Any]:
    """Rows everywhere in their windows, some with pending records; those that are due by the rule fold."""
    committed = [(window - 7 * row) % (window + 1) for row in range(rows)]
    pending = [0 if c == window else min(row % 3, window - c) for row, c in enumerate(committed)]
    due = [c if c + p + count > window else 0 for c, p in zip(committed, pending, strict=True)]
    return {"committed": tuple(committed), "pending": tuple(pending), "folds": due, "capacity": window + 2 * count}


@EVERY_GEOMETRY
@STATES
@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_real_sizes(operator: Operator, geometry: Geometry, state_dtype: torch.dtype, rows: int, count: int) -> None:
    case = make_case(operator, geometry, count, dtype=torch.bfloat16, state_dtype=state_dtype, **spread(rows, count))
    case.tokens = from_projection(case.tokens)
    case.max_records = WINDOW if count % 4 else None
    check_case(case)


@EVERY_GEOMETRY
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [1, 7])
def test_short_windows(operator: Operator, geometry: Geometry, window: int, count: int) -> None:
    check_case(make_case(operator, geometry, count, dtype=torch.bfloat16, **spread(8, count, window)))


@EVERY_GEOMETRY
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("log_decay", [-100.0, -1e-8])
def test_strong_and_weak_decay(operator: Operator, geometry: Geometry, count: int, log_decay: float) -> None:
    check_case(make_case(operator, geometry, count, dtype=torch.bfloat16, log_decay=log_decay, **spread(5, count)))


@EVERY_GEOMETRY
@pytest.mark.parametrize("count", [1, 5, 11])
def test_float32_activations(operator: Operator, geometry: Geometry, count: int) -> None:
    check_case(make_case(operator, geometry, count, **spread(5, count)))


@EVERY_GEOMETRY
def test_no_row_folds(operator: Operator, geometry: Geometry) -> None:
    check_case(make_case(operator, geometry, 1, dtype=torch.bfloat16, **spread(5, 1) | {"folds": None}))


def with_rows(case: Case, rows: torch.Tensor) -> Case:
    """The case with these of its rows (int64 ``[n]``)."""

    def taken(tensors: Tensors) -> Tensors:
        return {name: tensor.index_select(0, rows) for name, tensor in tensors.items()}

    folds = None if case.folds is None else case.folds.index_select(0, rows)
    changed = {name: taken(getattr(case, name)) for name in ("tokens", "buffers", "position")}
    return replace(case, **changed, folds=folds, exact={}, history={})


@pytest.mark.no_poison
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize(("operator", "geometry"), [REAL[1], REAL[3]], ids=["mamba2", "gated_delta"])
def test_a_state_of_more_than_two_to_the_31_elements(operator: Operator, geometry: Geometry) -> None:
    """Three rows, repeated: every repetition gives the same bits, and the first and the last are right."""
    small = make_case(
        operator, geometry, committed=(5, 16, 3), pending=(1, 0, 2), folds=[5, 16, 0], dtype=torch.bfloat16,
        state_dtype=torch.bfloat16,
    )  # fmt: skip
    per_row = small.buffers["state"][0].numel()
    repeats = LARGE // (3 * per_row) + 1
    large = with_rows(small, torch.arange(3 * repeats, device=DEVICE) % 3)
    assert large.buffers["state"].numel() > LARGE
    got = large.triton()
    del large
    reference, exact, eager = small.reference(), small.truth(), small.eager()
    for place in (slice(0, 3), slice(-3, None)):
        assert_as_good(got.output[place], exact.output, reference.output, eager.output)
        state = got.buffers["state"][place]
        assert torch.equal(bits(state[2]), bits(small.buffers["state"][2]))
        assert_as_good(
            *(s[:2] for s in (state, exact.buffers["state"], reference.buffers["state"], eager.buffers["state"]))
        )
    for tensor in (got.output, *got.buffers.values()):
        rows = bits(tensor).unflatten(0, (repeats, 3))
        assert all(torch.equal(rows[i], rows[0]) for i in range(repeats))


@EVERY_GEOMETRY
@pytest.mark.parametrize("count", [1, 4])
def test_a_captured_step_follows_the_cursor(operator: Operator, geometry: Geometry, count: int) -> None:
    """One CUDA graph, replayed with other cursors, folds and tokens: the bits of an ordinary step."""
    case = make_case(operator, geometry, count, dtype=torch.bfloat16, **spread(3, count))
    assert case.folds is not None
    kept = replace(case, tokens=copies(case.tokens), buffers=copies(case.buffers), position=copies(case.position))
    kernel, operands = KERNELS[operator.name], [*case.tokens.values(), *case.parameters.values()]

    def step() -> torch.Tensor:
        return kernel.replay_step(*operands, **case.buffers, **case.position, folds=case.folds, max_records=WINDOW)

    replayed, output = capture(step)
    for shift in range(3):
        position = {name: tensor.roll(shift) for name, tensor in kept.position.items()}
        folds = (kept.position["committed"] * (torch.arange(3, device=DEVICE) != shift)).roll(shift)
        tokens = {name: tensor.roll(shift, dims=0) for name, tensor in kept.tokens.items()}
        buffers = {name: tensor.nan_to_num(0.5).roll(shift, dims=0) for name, tensor in kept.buffers.items()}
        expected = replace(
            kept, tokens=tokens, buffers=buffers, position=position, folds=folds, max_records=WINDOW
        ).triton()
        for static, now in ((case.tokens, tokens), (case.buffers, buffers), (case.position, position)):
            for name, tensor in static.items():
                tensor.copy_(now[name])
        case.folds.copy_(folds)
        replayed()
        assert torch.equal(output, expected.output)
        assert all(torch.equal(bits(case.buffers[name]), bits(tensor)) for name, tensor in expected.buffers.items())


@EVERY_GEOMETRY
@pytest.mark.parametrize("count", [1, 4])
def test_a_step_that_begins_early_waits_for_what_it_needs(
    operator: Operator, geometry: Geometry, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of one that waits for the kernel before it; other tokens each time, so that nothing old is the same."""
    kernel = KERNELS[operator.name]
    if not kernel.overlapping(torch.device(DEVICE)):
        pytest.skip("this GPU has no programmatic dependent launch")
    case = make_case(operator, geometry, count, dtype=torch.bfloat16, **spread(64, count))
    tokens = [{name: tensor.roll(shift, dims=0) for name, tensor in case.tokens.items()} for shift in range(20)]
    early = [case.run(kernel, tokens=those) for those in tokens]
    monkeypatch.setattr(kernel, "overlapping", lambda device: {})
    for those, got in zip(tokens, early, strict=True):
        expected = case.run(kernel, tokens=those)
        assert torch.equal(got.output, expected.output)
        assert all(torch.equal(bits(got.buffers[name]), bits(expected.buffers[name])) for name in expected.buffers)


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def capture(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A function that replays the captured step, and where its output lies."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    return graph.replay, output


@EVERY_GEOMETRY
@pytest.mark.parametrize("due", [None, [5, 0]], ids=["no folds", "folds"])
def test_the_registered_operator_is_as_declared(operator: Operator, geometry: Geometry, due: list[int] | None) -> None:
    case = make_case(operator, geometry, 2, dtype=torch.bfloat16, folds=due)
    fixed = [*case.tokens.values(), *case.parameters.values(), *case.buffers.values(), *case.position.values()]
    torch.library.opcheck(KERNELS[operator.name]._operator, (*(t.nan_to_num() for t in fixed), case.folds, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize(("rows", "channels"), [(1, 8192), (64, 10240), (5, 12288)])
def test_convolutions(rows: int, channels: int, count: int, dtype: torch.dtype) -> None:
    projection = torch.randn(rows, count, channels + 100, device=DEVICE).to(dtype)
    case = {
        "inputs": projection[..., 50:-50],
        "weight": torch.randn(channels, 1, 4, device=DEVICE).to(dtype).squeeze(1),
        "bias": torch.randn(channels, device=DEVICE).to(dtype),
        "ring": torch.randn(rows, 24, channels, device=DEVICE).to(dtype),
        "position": torch.arange(rows, device=DEVICE) * 7 % 50,
    }
    rings = [case["ring"].clone(), case["ring"].clone(), case["ring"].double()]
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in case.items()}
    got = KERNELS["causal_conv"].conv_step(**case | {"ring": rings[0]})
    narrow = conv_reference.conv_step(**case | {"ring": rings[1]})
    assert_as_good(got, conv_reference.conv_step(**wide | {"ring": rings[2]}), narrow)
    assert torch.equal(rings[0], rings[1])
    torch.library.opcheck(KERNELS["causal_conv"]._operator, (*case.values(), True))


@pytest.mark.no_poison
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("count", [1, 4])
def test_a_convolutions_ring_of_more_than_two_to_the_31_elements(count: int) -> None:
    """Rows that are alike wherever they lie."""
    channels, slots = 10240, 24
    rows = LARGE // (slots * channels) + 2
    row = {
        "inputs": torch.randn(1, count, channels, device=DEVICE).to(torch.bfloat16),
        "ring": torch.randn(1, slots, channels, device=DEVICE).to(torch.bfloat16),
        "position": torch.tensor([37], device=DEVICE),
    }
    others = {
        "weight": torch.randn(channels, 4, device=DEVICE).to(torch.bfloat16),
        "bias": torch.randn(channels, device=DEVICE).to(torch.bfloat16),
    }
    many = {name: tensor.expand(rows, *tensor.shape[1:]).contiguous() for name, tensor in row.items()}
    assert many["ring"].numel() > LARGE
    got = KERNELS["causal_conv"].conv_step(**many, **others)
    expected = KERNELS["causal_conv"].conv_step(**row, **others)
    assert (got == expected).all()
    assert torch.equal(many["ring"][-1], row["ring"][0])
    assert torch.equal(many["ring"][0], row["ring"][0])


@pytest.mark.no_poison
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize(("operator", "geometry"), [REAL[1], REAL[3]], ids=["mamba2", "gated_delta"])
def test_an_updated_state_of_more_than_two_to_the_31_elements(operator: Operator, geometry: Geometry) -> None:
    """Rows that are alike wherever they lie."""
    state = torch.randn(1, *operator.state_shape(geometry), device=DEVICE)
    rows = LARGE // state.numel() + 2
    tokens = [tensor.to(DEVICE) for tensor in operator.draw(1, 1, geometry, torch.bfloat16).values()]
    parameters = [tensor.to(DEVICE) for tensor in operator.parameters(geometry, torch.float32).values()]
    many = state.expand(rows, *state.shape[1:]).contiguous()
    assert many.numel() > LARGE
    repeated = [tensor.expand(rows, *tensor.shape[1:]).contiguous() for tensor in tokens]
    got = KERNELS[operator.name].update(*repeated, *parameters, state=many)
    expected = KERNELS[operator.name].update(*tokens, *parameters, state=state)
    assert (got == expected).all()
    assert torch.equal(many[-1], state[0])
    assert torch.equal(many[0], state[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@OPERATORS_IN_TRITON
def test_on_another_device_than_the_current_one(operator: Operator) -> None:
    case = make_case(operator, Geometry(), 2, folds=[5, 0])
    expected = case.triton()

    def moved(tensors: Any) -> Any:
        return {name: tensor.to("cuda:1") for name, tensor in tensors.items()}

    names = ("tokens", "parameters", "buffers", "position")
    other = replace(case, **{name: moved(getattr(case, name)) for name in names}, folds=case.folds.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    got = other.triton()
    assert torch.equal(got.output.cpu(), expected.output.cpu())
    assert all(torch.equal(bits(got.buffers[name]).cpu(), bits(t).cpu()) for name, t in expected.buffers.items())


@pytest.mark.no_poison
@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_compiled_decoding_replays_graphs(family: str) -> None:
    """Inductor with CUDA graphs over flushes; the second call, with another prompt, replays the first one's graphs."""
    model = WITHOUT_EXPERTS[family]().cuda()
    for seed in range(2):
        inputs = {name: tensor.cuda() for name, tensor in prompt(3, 9, [0, 1, 5], seed=seed).items()}
        output = model.generate(
            **inputs,
            max_new_tokens=24,
            do_sample=False,
            cache_implementation="replay_static",
            cache_config={"window": 7, "impl": "triton"},
            compile_config=CompileConfig(fullgraph=True, mode="reduce-overhead", dynamic=False),
        )
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 24))
