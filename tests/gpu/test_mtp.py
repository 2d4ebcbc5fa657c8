"""Multi-token prediction on a GPU: the same tokens as without a cache, under CUDA graphs as well."""

import pytest
import torch

from tests.support.batches import observed
from tests.support.models import greedy_without_cache
from tests.support.mtp import MODELS, NEEDS_MTP, STEPS, inputs

pytestmark = [
    pytest.mark.usefixtures("enabled"),
    pytest.mark.no_poison,
    NEEDS_MTP,
]


@pytest.mark.parametrize("implementation", ["replay", "replay_static"])
@pytest.mark.parametrize("family", list(MODELS))
def test_greedy_equals_decoding_without_a_cache(family: str, implementation: str) -> None:
    """Twice: the second call of the fixed shapes replays the graphs of the first."""
    model = MODELS[family]().cuda()
    given = {name: tensor.cuda() for name, tensor in inputs(family).items()}
    expected = greedy_without_cache(model, given["input_ids"], given["attention_mask"], STEPS)
    arguments = {"use_mtp": True, "max_new_tokens": STEPS, "do_sample": False, "cache_implementation": implementation}
    for _ in range(2):
        output = model.generate(**given, **arguments, cache_config={"draft_length": "fixed"})
        assert torch.equal(output, expected)
    assert torch.equal(model.generate(**given, **arguments), expected)  # lengths by the clock
    if implementation == "replay":  # the hook that counts forwards would be compiled as well
        with observed(model) as rounds:
            model.generate(**given, **arguments, cache_config={"draft_length": "fixed"})
        rounds.check(accepting=2)
