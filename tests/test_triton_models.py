"""Whole models on the Triton kernels, in Triton's interpreter; `tests/gpu` has the same on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers.kernels.launch import Launch, override
from tests.support import models
from tests.support.cached import assert_logits, assert_states, feed, ids, model_for
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import greedy_without_cache, prompt
from tests.support.precision import parts, spoil

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.usefixtures("enabled"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="models on the CPU, in the interpreter"),
]
EVERY_MODEL = pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
EVERY_SHORT_MODEL = pytest.mark.parametrize("name", ["qwen3_5-attention-last", "nemotron_h-M*"])


@pytest.fixture(autouse=True)
def _few_programs() -> Any:
    """The interpreter takes its time for each."""
    with override("mamba2", Launch(16, 1, 4)), override("gated_delta", Launch(16, 1, 4)):
        yield


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel ran."""
    from tests.support.kernels import KERNELS

    counts = dict.fromkeys(KERNELS, 0)
    for name, module in KERNELS.items():

        def counting(*arguments: Any, _name: str = name, _launch: Any = module._launch) -> torch.Tensor:
            counts[_name] += 1
            return _launch(*arguments)

        monkeypatch.setattr(module, "_launch", counting)
    return counts


def config(impl: str = "triton", **settings: Any) -> rt.ReplayConfig:
    return rt.ReplayConfig(**{"window": 3, "max_draft": 0, "impl": impl, **settings})


@pytest.mark.parametrize(
    ("name", "implementation", "pads"),
    [
        ("qwen3_5", "replay_static", [0, 3]),
        ("nemotron_h-M*M", "replay_static", [0, 3]),
        ("qwen3_5-attention-last", "replay", [0]),
        ("nemotron_h-M*", "replay", [0]),
    ],
)
def test_greedy_tokens(name: str, implementation: str, pads: list[int], launched: dict[str, int]) -> None:
    """The reference's tokens and those of decoding without a cache, over two flushes."""
    model, inputs, steps = model_for(name), prompt(len(pads), 5, pads), 5
    arguments = {"max_new_tokens": steps, "do_sample": False, "cache_implementation": implementation}
    settings = {"window": 2, "max_draft": 0}
    output = model.generate(**inputs, **arguments, cache_config={**settings, "impl": "triton"})
    operator = "mamba2" if name.startswith("nemotron_h") else "gated_delta"
    assert launched[operator] >= steps - 1
    layers = launched[operator] // (steps - 1)
    assert launched["causal_conv"] == launched[operator] + layers  # the prompt's as well
    assert torch.equal(output, model.generate(**inputs, **arguments, cache_config={**settings, "impl": "reference"}))
    assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], steps))


@EVERY_SHORT_MODEL
def test_blocks_and_rollback(name: str) -> None:
    """Blocks of several tokens with rejections across flushes: the logits and states of a forward without a cache."""
    model, tokens, draft = model_for(name), ids(1, 8), ids(1, 3, seed=1)
    cache = rt.ReplayCache(model.config, config(max_draft=3))
    cache.activate_past_recording()
    truth = models.full_logits(model, tokens)
    seen = 0
    for block, rejected in ((3, 1), (1, 2), (2, 0), (1, 3), (1, 0)):
        accepted = tokens[:, seen : seen + block]
        got = feed(model, cache, torch.cat([accepted, draft[:, :rejected]], dim=1), block + rejected)
        assert_logits(got[:, :block], truth[:, seen : seen + block])
        cache.crop(-rejected)
        seen += block
    reference = rt.ReplayCache(model.config, config("reference"))
    feed(model, reference, tokens, seen)
    for layer, other in zip(cache.replay_layers, reference.replay_layers, strict=True):
        assert_states(layer.state(), other.state())


@EVERY_SHORT_MODEL
def test_one_compiled_graph(name: str) -> None:
    """The registered operators under `generate`, with fixed shapes, over flushes."""
    compiling = CompileConfig(fullgraph=True, backend="aot_eager", mode=None, dynamic=False)
    compiling._compile_all_devices = True
    model, inputs = model_for(name), prompt(1, 5)
    output = model.generate(
        **inputs,
        max_new_tokens=5,
        do_sample=False,
        cache_implementation="replay_static",
        cache_config={"window": 2, "max_draft": 0, "impl": "triton"},
        compile_config=compiling,
    )
    assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 5))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nemotron_h-M*", {"readout": "fp8"}),
        ("qwen3_5-attention-last", {"readout": "nvfp4"}),
        ("nemotron_h-M*", {"checkpoint": "fp8_sr", "readout": "bfloat16"}),
        ("qwen3_5-attention-last", {"decay_skip": 0.3}),
    ],
    ids=str,
)
def test_precisions_under_generate(name: str, settings: dict[str, Any]) -> None:
    """Compiled, and token by token, the reference's logits, over flushes.

    A value that the two round to different sides moves a logit by no more than the rounding of one value does.
    """
    compiling = CompileConfig(fullgraph=True, backend="aot_eager", mode=None, dynamic=False)
    compiling._compile_all_devices = True
    model, inputs = model_for(name), prompt(2, 5, [0, 2])
    arguments: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "replay_static"}
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    outputs = [
        model.generate(
            **inputs, **arguments, cache_config={"window": 2, "max_draft": 0, "impl": impl, **settings}, **more
        )
        for impl, more in (("reference", {}), ("triton", {}), ("triton", {"compile_config": compiling}))
    ]
    truth, *others = (torch.stack(output.logits) for output in outputs)
    for got in others:
        assert (got - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.parametrize("settings", [{"readout": "fp8"}, {"checkpoint": "nvfp4"}], ids=str)
@pytest.mark.parametrize("family", models.SQUARE)
def test_heads_as_wide_as_their_states(family: str, settings: dict[str, str]) -> None:
    """What the prompt leaves in the state is stored the way round that the kernels read it."""
    model, tokens = models.SQUARE[family](), ids(2, 9)
    logits = []
    for impl in ("reference", "triton"):
        cache = rt.ReplayCache(model.config, config(impl, **settings))
        logits.append(feed(model, cache, tokens, 7, 1, 1)[:, 7:])
    truth, got = logits
    assert (got - truth).norm() <= 1e-2 * truth.norm()  # a value rounded to the other side


@EVERY_MODEL
def test_float64_is_refused(name: str) -> None:
    model = models.FAMILIES[name]().double()
    with pytest.raises(ValueError, match=r"impl='triton' cannot run here: a tensor is torch.float64"):
        model.generate(
            **prompt(1, 3),
            max_new_tokens=3,
            do_sample=False,
            cache_implementation="replay",
            cache_config={"impl": "triton"},
        )


@EVERY_SHORT_MODEL
def test_gradients_are_refused(name: str) -> None:
    model, tokens = model_for(name), ids(1, 3)
    cache = rt.ReplayCache(model.config, config(max_draft=4))
    with pytest.raises(ValueError, match=r"impl='triton' cannot run here: gradients are enabled"):
        model(input_ids=tokens, **{CACHE_ARGUMENT: cache})
    cache.reset()
    with torch.no_grad():
        model(input_ids=tokens, **{CACHE_ARGUMENT: cache})
    assert int(cache.get_seq_length()) == 3


@EVERY_SHORT_MODEL
def test_a_prompt_on_one_implementation_and_steps_on_the_other(name: str) -> None:
    """Caches of both hold the same: copied buffers continue on the other."""
    model, tokens = model_for(name), ids(1, 7)
    truth = models.full_logits(model, tokens)
    caches = [rt.ReplayCache(model.config, config(impl)) for impl in ("triton", "reference")]
    for cache in caches:
        feed(model, cache, tokens[:, :5], 3, 1, 1)
    for layer, other in zip(*(cache.replay_layers for cache in caches), strict=True):
        for key, buffer in layer.buffers().items():
            swapped = buffer.clone()
            buffer.copy_(other.buffers()[key])
            other.buffers()[key].copy_(swapped)
    for cache in caches:
        assert_logits(feed(model, cache, tokens[:, 5:]), truth[:, 5:])


@pytest.mark.parametrize("readout", ["bfloat16", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", ["nemotron_h-M", "qwen3_5-no-attention"])
def test_what_is_wrong_in_the_copy_lives_until_the_next_flush(name: str, readout: str) -> None:
    """As in the reference: outputs before the flush change, and nothing after it, to the bit."""
    model, tokens = model_for(name), ids(1, 12)
    cache = rt.ReplayCache(model.config, config(window=2, readout=readout))
    feed(model, cache, tokens[:, :6], 5, 1)
    twin = cache.fork()
    spoil(parts(cache.replay_layers[0].readout)["values"])
    is_flushed = []
    for step in range(6, 10):
        before = int(twin.cursor.base)
        outputs = [feed(model, one, tokens[:, step : step + 1]) for one in (cache, twin)]
        is_flushed.append(int(twin.cursor.base) > before)
        if any(is_flushed):
            assert torch.equal(*outputs)
        else:
            assert (outputs[0] - outputs[1]).abs().max() > 0.1
    assert is_flushed.index(True) == 1
    assert torch.equal(cache.state(0), twin.state(0))
