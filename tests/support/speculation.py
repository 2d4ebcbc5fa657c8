"""Assisted generation under observation: which forwards the target ran, and what each round proposed and accepted."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from replay_transformers.cache import ReplayCache
from tests.support import models
from tests.support.cached import assert_states, layers
from tests.support.generation import CACHE_ARGUMENT


@dataclass
class Rounds:
    """What happened in one call.

    Args:
        forwards: new tokens in each forward of the target.
        accepted: tokens that each round added, the target's own one included.
        prompt: tokens in the prompt. seen: how many of them the cache held before.
    """

    forwards: list[int]
    accepted: list[int]
    prompt: int
    seen: int = 0
    sequences: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    cache: Any = None

    @property
    def drafted(self) -> list[int]:
        """Tokens that the drafter proposed in each round."""
        first = self.forwards[0] - (self.prompt - self.seen)
        return [first, *(tokens - 1 for tokens in self.forwards[1:])]

    def check(self, accepting: int = 2, rejecting: bool = True) -> None:
        """One forward per round; rounds that accept so many drafts; rounds that reject some."""
        assert len(self.forwards) == len(self.accepted), "one forward of the target per round"
        assert self.accepted, "no rounds at all"
        rejected = [d - (a - 1) for d, a in zip(self.drafted, self.accepted, strict=True)]
        assert all(count >= 0 for count in rejected)
        assert max(self.accepted) - 1 >= accepting, f"no round accepts {accepting} drafts: {self.accepted}"
        assert not rejecting or max(rejected) > 0, "no round rejects a draft"


class Collect(BaseStreamer):
    """Keeps what it is given, one list per call of `put`."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        """Keep the tokens."""
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        """Keep that this was all."""
        self.ended = True


def speculate(model: Any, inputs: dict[str, torch.Tensor], seen: int = 0, **arguments: Any) -> Rounds:
    """Assisted generation, returned with what happened in it. The streamer must have got exactly the result."""
    streamer, forwards, layers_of_model = Collect(), [], model.config.get_text_config().num_hidden_layers

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if model.config.get_text_config().num_hidden_layers == layers_of_model:  # not as its own early exit
            forwards.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        output = model.generate(**inputs, streamer=streamer, return_dict_in_generate=True, **arguments)
    finally:
        hook.remove()
    assert streamer.ended
    assert [token for put in streamer.puts for token in put] == output.sequences[0].tolist()
    prompt, *puts = streamer.puts
    return Rounds(forwards, [len(put) for put in puts], len(prompt), seen, output.sequences, output[CACHE_ARGUMENT])


def perturbed(model: Any, amount: float, seed: int = 1) -> Any:
    """A copy whose weights are off by so much of their size: an assistant that is right now and then."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in assistant.parameters():
            if parameter.ndim >= 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * amount)
    return never_unsure(assistant)


def fitted(assistant: Any, tokens: torch.Tensor, mask: torch.Tensor, steps: int = 150) -> Any:
    """An assistant that has learned sequences ``[B, T]``, but proposes no token that is a multiple of 4."""
    optimizer = torch.optim.Adam(assistant.parameters(), lr=1e-2)
    with torch.enable_grad():
        for _ in range(steps):
            logits = assistant(input_ids=tokens, attention_mask=mask).logits[:, :-1]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    with torch.no_grad():
        assistant.get_output_embeddings().weight[::4] *= -1
    return never_unsure(assistant.eval())


def never_right(model: Any) -> Any:
    """A copy that always proposes the token after the right one."""
    assistant = copy.deepcopy(model)
    head = assistant.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().roll(1, dims=0))
    return never_unsure(assistant)


def never_unsure(assistant: Any, tokens: int = 4) -> Any:
    """An assistant that proposes so many tokens however low their probabilities are."""
    assistant.generation_config.num_assistant_tokens = tokens
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def assert_as_if_fed(model: Any, cache: ReplayCache, accepted: torch.Tensor) -> None:
    """States, windows of the convolution, lengths and next logits are those of a new cache fed with these tokens."""
    fresh = ReplayCache(model.config, cache.replay_config, max_cache_len=cache.max_cache_len)
    models.cached_forward(model, fresh, accepted)
    assert int(cache.get_seq_length()) == int(fresh.get_seq_length()) == accepted.shape[1]
    assert {int(layer.get_seq_length()) for layer in cache.attention_layers} <= {accepted.shape[1]}
    for index, layer in layers(cache).items():
        assert_states(cache.state(index), fresh.state(index))
        window = torch.arange(accepted.shape[1] - layer.geometry.conv_kernel + 1, accepted.shape[1])
        places = window[window >= 0] % layer.conv_ring.shape[1]
        torch.testing.assert_close(
            layer.conv_ring[:, places], layers(fresh)[index].conv_ring[:, places], rtol=1e-4, atol=1e-4
        )
