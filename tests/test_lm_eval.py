"""The harness lm-eval on a replay cache: what it generates and scores is as with the stock cache.

Runs where lm_eval is installed (``pip install lm_eval``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import replay_transformers as rt
from tests.support.flushes import given_back

pytest.importorskip("lm_eval", reason="lm_eval is not installed")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

PROMPTS = ["def add(a, b):\n", "import os\nimport sys\nfor name in os.listdir", "class A:\n    def f(self):\n", "x = "]
SETTINGS: dict[str, dict[str, Any]] = {
    "by default": {},
    "replay": {"cache_implementation": "replay", "cache_config": {"window": 4}},
    "fixed shapes": {"cache_implementation": "replay_static"},
    "speculation": {"cache_implementation": "replay", "prompt_lookup_num_tokens": 3},
}


def generated(harness: HFLM, **more: Any) -> list[str]:
    arguments = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, **more}
    requests = [Instance("generate_until", {}, (prompt, arguments), i) for i, prompt in enumerate(PROMPTS)]
    return list(harness.generate_until(requests, disable_tqdm=True))


def scored(harness: HFLM) -> list[tuple[float, bool]]:
    request = Instance("loglikelihood", {}, ("def f(x):", " return x"), 0)
    return list(harness.loglikelihood([request], disable_tqdm=True))


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_as_with_the_stock_cache(family: str) -> None:
    folder = rt.sample_model(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    harness = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=3)
    texts, scores = generated(harness), scored(harness)
    assert all(texts)
    for name, settings in SETTINGS.items():
        with rt.enable(default=name == "by default"), given_back() as caches:
            assert generated(harness, **settings) == texts, name
            assert scored(harness) == scores
        assert caches, "a replay cache decoded"
