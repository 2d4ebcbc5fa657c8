"""What a model does that accelerate has spread over devices: decoding, beams, drafts and rollback as in one place.

The same bodies run on the CPU with weights offloaded, on pretended GPUs (`tests.support.devices`) and on real ones.
"""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import torch
from accelerate.hooks import remove_hook_from_submodules

import replay_transformers as rt
from tests.support.batches import observed
from tests.support.generation import CACHE_ARGUMENT
from tests.support.models import build_nemotron_h, build_qwen3_5, prompt
from tests.support.speculation import perturbed

STEPS = 12
LINEAR, FULL = "linear_attention", "full_attention"
# runs of state-space layers around attention, and attention first; no experts, which have no kernel for pretended GPUs
MODELS = {
    "qwen3_5": lambda: build_qwen3_5([LINEAR, LINEAR, FULL, LINEAR]),
    "nemotron_h": lambda: build_nemotron_h("MM*-M"),
    "qwen3_5-attention-first": lambda: build_qwen3_5([FULL, FULL, LINEAR, LINEAR, FULL]),
    "nemotron_h-attention-first": lambda: build_nemotron_h("*MM-M"),
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {},
}


def inputs(rows: int) -> dict[str, torch.Tensor]:
    """Prompts with a repetition for prompt lookup, padded on the left."""
    found = prompt(rows, 11, [0, 4, 1][:rows])
    found["input_ids"][:, 8:] = found["input_ids"][:, 5:8]
    return found


def splits(layers: int) -> dict[str, list[int]]:
    """On which of two devices each layer is."""
    return {
        "inside a run": [0] + [1] * (layers - 1),
        "first elsewhere": [1] + [0] * (layers - 1),
        "to and fro": [index % 2 for index in range(layers)],
        "last": [0] * (layers - 1) + [1],
    }


def device_map(model: Any, places: list[Any], first: Any, last: Any) -> dict[str, Any]:
    """One of accelerate's: where the layers are, what comes before them (``first``) and behind them (``last``).

    An output matrix that is the embedding is where that is.
    """
    layers = {f"model.layers.{index}": place for index, place in enumerate(places)}
    assert len(layers) == model.config.num_hidden_layers
    others = {f"model.{name}": last if "norm" in name else first for name, _ in model.model.named_children()}
    del others["model.layers"]
    head = first if model.config.get_text_config().tie_word_embeddings else last
    return {**others, **layers, "lm_head": head}


def spread(model: Any, split: list[int], devices: list[str]) -> Any:
    """A copy of the model on these devices: layer i on ``devices[split[i]]``, the embedding on the first of them."""
    return dispatched(model, [devices[place] for place in split], devices[0], devices[-1])


def dispatched(model: Any, places: list[Any], first: Any, last: Any) -> Any:
    """A copy of the model under accelerate's hooks: see `device_map`."""
    model = copy.deepcopy(model)
    accelerate.dispatch_model(model, device_map(model, places, first, last), main_device=first, force_hooks=True)
    return model


def gathered(model: Any) -> Any:
    """The model without hooks."""
    remove_hook_from_submodules(model)
    for name in ("hf_device_map", "to", "cuda"):
        model.__dict__.pop(name, None)
    return model


def generated(
    model: Any, name: str, rows: int, assistant: Any = None, device: str = "cpu", **more: Any
) -> torch.Tensor:
    """Sequences of one of `CALLS`, on the CPU. Drafts of the assistant are accepted now and then."""
    given = {key: value.to(device) for key, value in inputs(rows).items()}
    settings = {"cache_implementation": "replay", "cache_config": {"window": 4}} | more
    settings |= CALLS[name] | {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    if name != "assistant":
        return model.generate(**given, **settings).cpu()
    settings["cache_config"] = {"draft_length": "fixed"} | settings["cache_config"]  # whatever the clock says
    with observed(model) as rounds:
        sequences = model.generate(**given, **settings, assistant_model=assistant)
    assert max(rounds.accepted()) >= 2
    return sequences.cpu()


Call = tuple[str, str]  # of `CALLS`, and the cache's implementation
EVERY_CALL: list[Call] = [(name, implementation) for name in CALLS for implementation in ("replay", "replay_static")]


def sequences(
    model: Any, assistant: Any, calls: list[Call], device: str = "cpu", impl: str = "auto", **more: Any
) -> dict[Call, list[list[int]]]:
    """Of these calls, for three rows."""
    config = {"window": 4, "impl": impl}
    return {
        call: generated(
            model, call[0], 3, assistant, device, cache_implementation=call[1], cache_config=config, **more
        ).tolist()
        for call in calls
    }


def assistant_for(model: Any) -> Any:
    """A drafter that is mostly right."""
    return perturbed(model, 0.05)


def session(
    model: Any, device: str = "cpu", max_cache_len: int | None = None, **config: Any
) -> tuple[list[torch.Tensor], rt.ReplayCache]:
    """Logits and a state on the CPU, through a prompt, steps, rollbacks, chosen rows; and the cache."""
    config = {"window": 4, "max_draft": 5} | config
    cache = rt.ReplayCache(model.config, rt.ReplayConfig(**config), max_cache_len=max_cache_len)
    ids, found = prompt(3, 32)["input_ids"].to(device), list[torch.Tensor]()

    def feed(begin: int, end: int, rows: int = 3) -> None:
        with torch.no_grad():
            found.append(model(input_ids=ids[:rows, begin:end], **{CACHE_ARGUMENT: cache}).logits.cpu())

    def each(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    feed(0, 9)
    for place in range(9, 15):
        feed(place, place + 1)
    cache.activate_past_recording()
    feed(15, 19)
    cache.crop(-2)
    feed(17, 19)
    cache.reorder_cache(each(1, 1, 0))
    feed(19, 21)
    cache.crop(each(-1, 0, -2))
    for place in range(21, 24):
        feed(place, place + 1)
    cache.crop(each(0, -1, 0))
    cache.flush()
    cache.batch_select_indices(each(0, 2))
    feed(24, 25, rows=2)
    found += [cache.state(index).cpu() for index, layer in enumerate(cache.layers) if layer in cache.replay_layers]
    return found, cache


def assert_same(got: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    """Up to rounding in float32: other devices sum in another order. Logits are near 1."""
    for mine, its in zip(got, truth, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=2e-4)


def places_of(cache: rt.ReplayCache) -> list[str]:
    """Where the layers' buffers are, layer by layer; each on one device."""
    found = []
    for layer in (*cache.replay_layers, *cache.attention_layers):
        buffers = layer.buffers().values() if hasattr(layer, "buffers") else (layer.keys, layer.values)
        places = {str(buffer.device) for buffer in buffers}
        assert len(places) == 1
        found += places
    return found
