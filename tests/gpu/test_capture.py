"""CUDA graphs without inductor: captured once, replayed over flushes, other prompts and later calls."""

from typing import Any

import pytest
import torch
from transformers import CompileConfig

import replay_transformers as rt
from replay_transformers.patches import capture
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import FAMILIES, build_nemotron_h, greedy_without_cache, prompt

pytestmark = [pytest.mark.usefixtures("enabled"), pytest.mark.no_poison]

# without experts, whose choice of kernels is not the subject here
MODELS = {"qwen3_5": FAMILIES["qwen3_5"], "nemotron_h": lambda: build_nemotron_h("M*-M")}


@pytest.fixture(autouse=True)
def _full_precision() -> Any:
    """Token identity is a float32 claim: no tf32 anywhere."""
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every captured graph."""
    made: list[int] = []
    record = capture.record
    monkeypatch.setattr(capture, "record", lambda *arguments: made.append(1) or record(*arguments))
    return made


def _inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompt(3, 9, [0, 1, 5], seed=seed).items()}


def _arguments(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 40, "do_sample": False, "compile_config": CompileConfig(backend="cudagraphs"), **more}


@pytest.mark.parametrize("family", MODELS)
def test_one_graph_for_all_steps_and_calls(family: str, captures: list[int]) -> None:
    model = MODELS[family]().cuda()
    arguments = _arguments(cache_implementation="replay_static", cache_config={"window": 7})
    allocated = []
    for seed in range(4):
        inputs = _inputs(seed)
        output = model.generate(**inputs, **arguments)
        assert torch.equal(output, greedy_without_cache(model, inputs["input_ids"], inputs["attention_mask"], 40))
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert len(captures) == 1
    assert allocated[-1] == allocated[-2]


@pytest.mark.parametrize("family", MODELS)
def test_the_state_advances_once_per_step(family: str, captures: list[int]) -> None:
    model, inputs = MODELS[family]().cuda(), _inputs()
    states, kept = [], []
    for compiled in (True, False):
        cache = rt.ReplayCache(model.config, rt.ReplayConfig(window=5), max_cache_len=64)
        arguments = _arguments(**{CACHE_ARGUMENT: cache}, return_dict_in_generate=True, output_logits=True)
        if not compiled:
            arguments |= {"compile_config": None, "disable_compile": True}
        kept.append(torch.stack(model.generate(**inputs, **arguments).logits))
        assert int(cache.get_seq_length()) == 9 + 39
        states.append(cache.state(0))
    assert len(captures) == 1
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=2e-4)
    torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-4)
