"""Models with a head for multi-token prediction that is right now and then, and its rounds under observation."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

import replay_transformers as rt
from replay_transformers.generation.drafters.mtp import MultiTokenPrediction
from replay_transformers.generation.rows import Rows
from tests.support import models

HAS_MTP = Version(transformers.__version__) >= Version("5.23.0")
NEEDS_MTP = pytest.mark.skipif(not HAS_MTP, reason="transformers before 5.23 has no use_mtp")
STEPS = 24
PADS = [0, 3, 6, 1, 0]


def last_states(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The target's last hidden states ``[B, T, hidden]``, without a cache."""
    places = models.positions(mask)
    with torch.no_grad():
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False, output_hidden_states=True
        )
    return output.hidden_states[-1]


def grown(ids: torch.Tensor) -> Rows:
    """One row ``[1, T]`` whose last token has been generated."""
    rows = Rows(ids[:, :-1], None, models.PAD)
    rows.append(ids[:, -1:], torch.ones(1, dtype=torch.int64))
    rows.read()
    return rows


def fed(model: Any, head: Any, ids: torch.Tensor) -> MultiTokenPrediction:
    """A drafter of which the head has seen one row of tokens ``[1, T]``, with the target's true states."""
    rows = grown(ids)
    drafter = MultiTokenPrediction(head, 1, transformers.LogitsProcessorList(), do_sample=False)
    drafter.start(rows, last_states(model, ids[:, :-1], torch.ones_like(ids[:, :-1])))
    return drafter


@functools.cache
def sample_qwen3_5() -> Any:
    """The trained model, whose checkpoint has a head."""
    return transformers.AutoModelForCausalLM.from_pretrained(rt.sample_model("qwen3_5"), dtype=torch.float32)


@functools.cache
def nemotron_h() -> Any:
    """A tiny model, and a head briefly fitted to what it generates from `inputs`."""
    model = models.build_nemotron_h("M*-M", num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "moe"])
    with rt.enable():
        models.assert_state_matters(model)
    with_head(model, _fitted(model))
    return model


MODELS = {"qwen3_5": sample_qwen3_5, "nemotron_h": nemotron_h}


def inputs(family: str, rows: int = 5) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the left; the first row has no padding."""
    return {name: value[:rows] for name, value in _inputs(family).items()}


@functools.cache
def _inputs(family: str) -> dict[str, torch.Tensor]:
    if family == "nemotron_h":
        return models.prompt(5, 11, PADS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(rt.sample_model("qwen3_5"), padding_side="left")
    words = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        "
    texts = [words, "import os\nimport sys\n\n", "def add(a, b):\n    return a", "for i in range(10):\n", words[:60]]
    return dict(tokenizer(texts, return_tensors="pt", padding=True))


@functools.cache
def truth(family: str) -> torch.Tensor:
    """Greedy decoding with a full forward per token."""
    given = inputs(family)
    return models.greedy_without_cache(MODELS[family](), given["input_ids"], given["attention_mask"], STEPS)


def with_head(model: Any, weights: dict[str, torch.Tensor]) -> Path:
    """Save such weights of a head as the checkpoint of the model; returns the folder, which is removed at exit."""
    folder = tempfile.TemporaryDirectory()
    model.held_folder = folder
    save_file({name: value.contiguous() for name, value in weights.items()}, Path(folder.name) / "model.safetensors")
    model.config.name_or_path = folder.name
    return Path(folder.name)


def random_nemotron_h_head(model: Any) -> Any:
    """Blocks with random weights; norms are ones."""
    from replay_transformers.patches import mtp_nemotron_h

    config = mtp_nemotron_h.head_config(model.config)
    layers = mtp_nemotron_h.blocks(model, config).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.fill_(1.0)
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        for buffer in layers.buffers():
            buffer.zero_()
    return mtp_nemotron_h.NemotronHHead(model, layers, config)


def random_qwen3_5_head(model: Any) -> dict[str, torch.Tensor]:
    """Weights of a head under their names in a checkpoint: the model's last layer again, and a random projection."""
    hidden = model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.0.{name}": value for name, value in model.model.layers[-1].state_dict().items()}
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    weights |= {f"{name}.weight": torch.zeros(hidden) for name in norms}  # they multiply by one more
    return {f"mtp.{name}": value for name, value in weights.items()}


def released(layers: Any) -> dict[str, torch.Tensor]:
    """The weights of Nemotron-H's head under the names of released checkpoints: experts one by one."""
    weights = {}
    for name, value in layers.state_dict().items():
        if ".experts." in name:
            before, after = name.split(".experts.")
            weights |= {f"mtp.layers.{before}.experts.{i}.{after}.weight": part for i, part in enumerate(value)}
        else:
            weights[f"mtp.layers.{name}"] = value
    return weights


def _fitted(model: Any, steps: int = 20) -> dict[str, torch.Tensor]:
    """A head fitted to the model's next states on the sequences that it generates."""
    given = models.prompt(5, 11, PADS)
    ids = models.greedy_without_cache(model, given["input_ids"], given["attention_mask"], STEPS)
    mask = torch.cat([given["attention_mask"], torch.ones_like(ids[:, : ids.shape[1] - 11])], dim=1)
    states, head = last_states(model, ids, mask), random_nemotron_h_head(model)
    optimizer = torch.optim.Adam([p for p in head.layers.parameters() if p.requires_grad], lr=1e-2)
    causal = torch.ones(ids.shape[1] - 2, ids.shape[1] - 2).tril().bool() & mask[:, None, :-2].bool()
    causal = (causal | torch.eye(ids.shape[1] - 2).bool())[:, None]
    with torch.enable_grad():
        for _ in range(steps):
            ahead = head.run(model.get_input_embeddings()(ids[:, 1:-1]), states[:, :-2], causal, ids, {})
            wanted = mask[:, :-2].bool()
            loss = (ahead - states[:, 1:-1])[wanted].square().mean()
            loss = loss + cross_entropy(model.lm_head(ahead)[wanted], ids[:, 2:][wanted])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return released(head.layers)
