"""Tiny models whose output depends on their state, one builder per family.

With the library's default initialisation tiny models hardly depend on their recurrent state, so a broken cache passes.
`make_state_matter` redraws the weights so that it does; `assert_state_matters` checks it.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from replay_transformers.cache import ReplayCache
from tests.support.generation import CACHE_ARGUMENT

VOCABULARY = 97
PAD, BOS, EOS = 0, 1, 2

NEMOTRON_PATTERN = "M*-ME"


def make_state_matter(model: Any, seed: int = 0) -> Any:
    """Redraw weights: slow decay, strong convolution, variance-preserving matrices. Returns the model in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4.0)
            elif "conv1d" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
            elif parameter.ndim >= 2 and "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        for module in model.modules():
            if type(module).__name__ == "NemotronHMamba2Mixer":
                # stock disagrees with itself below the limit: open it on both sides for equality tests
                module.time_step_limit = (0.0, float("inf"))
    return model.eval()


def _ids() -> dict[str, Any]:
    return {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": None}


def qwen3_5_config(layer_types: list[str] | None = None, **overrides: Any) -> Any:
    """Two key heads, four value heads, one attention layer."""
    layer_types = layer_types or ["linear_attention", "full_attention", "linear_attention"]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 8192,
        **_ids(),
    }
    return transformers.Qwen3_5TextConfig(**(settings | overrides))


def build_qwen3_5(layer_types: list[str] | None = None, seed: int = 0, **overrides: Any) -> Any:
    """Qwen3.5 (text), float32."""
    torch.manual_seed(seed)
    return make_state_matter(transformers.Qwen3_5ForCausalLM(qwen3_5_config(layer_types, **overrides)), seed)


def build_qwen3_5_moe(seed: int = 0, **overrides: Any) -> Any:
    """Qwen3.5-MoE (text), float32."""
    torch.manual_seed(seed)
    layer_types = ["linear_attention", "full_attention", "linear_attention"]
    settings = qwen3_5_config(layer_types).to_dict()
    settings.pop("model_type", None)
    settings.pop("architectures", None)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    config = transformers.Qwen3_5MoeTextConfig(**(settings | experts | overrides))
    return make_state_matter(transformers.Qwen3_5MoeForCausalLM(config), seed)


def build_qwen3_next(seed: int = 0, **overrides: Any) -> Any:
    """Qwen3-Next, float32."""
    torch.manual_seed(seed)
    layer_types = ["linear_attention", "full_attention", "linear_attention"]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "layer_types": layer_types,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        **_ids(),
    }
    return make_state_matter(
        transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**(settings | overrides))), seed
    )


def nemotron_h_config(pattern: str = NEMOTRON_PATTERN, **overrides: Any) -> Any:
    """Two groups, four Mamba-2 heads of an awkward width; M: Mamba-2, *: attention, -: mlp, E: experts."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "max_position_embeddings": 8192,
        **_ids(),
    }
    return transformers.NemotronHConfig(**(settings | overrides))


def build_nemotron_h(pattern: str = NEMOTRON_PATTERN, seed: int = 0, **overrides: Any) -> Any:
    """Nemotron-H, float32, the time step's limit open."""
    torch.manual_seed(seed)
    return make_state_matter(transformers.NemotronHForCausalLM(nemotron_h_config(pattern, **overrides)), seed)


FAMILIES: dict[str, Callable[..., Any]] = {"qwen3_5": build_qwen3_5, "nemotron_h": build_nemotron_h}
# where the choice of kernels for experts, which is made by counts of tokens, is not the subject
WITHOUT_EXPERTS: dict[str, Callable[[], Any]] = {
    "qwen3_5": build_qwen3_5,
    "nemotron_h": lambda: build_nemotron_h("M*-M"),
}
# heads as wide as their states, as the published ones of Qwen3.5 are: what is turned round keeps its shape
SQUARE: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: build_qwen3_5(linear_key_head_dim=16, linear_value_head_dim=16),
    "nemotron_h": lambda: build_nemotron_h("M*-M", mamba_head_dim=16),
}
ALL_FAMILIES: dict[str, Callable[..., Any]] = {
    **FAMILIES,
    "qwen3_5_moe": build_qwen3_5_moe,
    "qwen3_next": build_qwen3_next,
}


def prompt(rows: int, length: int, pads: list[int] | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids ``[rows, length]`` that never contain special ids, with ``pads[i]`` columns of left padding in row i.

    Always with an explicit attention mask: `generate` would infer one from a generated pad id otherwise.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads or []):
        ids[row, :count] = PAD
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids ``[B, T]`` of left-padded rows, as `generate` makes them."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def full_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits ``[B, T, vocabulary]`` of one forward without a cache: the truth for a model."""
    mask = torch.ones_like(ids) if mask is None else mask
    keep = {"logits_to_keep": 0}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False, **keep).logits


def greedy_without_cache(model: Any, ids: torch.Tensor, mask: torch.Tensor, steps: int) -> torch.Tensor:
    """Greedy continuation ``[B, T + steps]``, a full forward per token."""
    for _ in range(steps):
        token = full_logits(model, ids, mask)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
    return ids


def cached_forward(model: Any, cache: ReplayCache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """One forward of the new tokens ``ids``; ``mask`` covers everything seen so far including them. Logits.

    Where the rows differ in length, the mask covers at least the padding, and the positions are left to the patches.
    """
    seen = int(cache.get_seq_length())
    is_ragged = isinstance(cache, ReplayCache) and cache.cursor.ragged
    if mask is None and not is_ragged:
        mask = torch.ones(ids.shape[0], seen + ids.shape[1], dtype=torch.long)
    with torch.no_grad():
        return model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=None if is_ragged else positions(mask)[:, -ids.shape[1] :],
            use_cache=True,
            logits_to_keep=0,
            **{CACHE_ARGUMENT: cache},
        ).logits


def assert_state_matters(model: Any, minimum: float = 0.1) -> None:
    """Zeroing the recurrent state after a prompt must move the next logits by far more than any tolerance used."""
    cache = ReplayCache(model.config)
    ids = prompt(1, 24)["input_ids"]
    cached_forward(model, cache, ids)
    forked = cache.fork()
    for layer in forked.replay_layers:
        assert layer.checkpoint is not None
        layer.checkpoint.zero_()
    token = torch.tensor([[5]])
    moved = (cached_forward(model, cache, token) - cached_forward(model, forked, token)).abs().max().item()
    assert moved > minimum, f"zeroing the state moves the logits by {moved:.2g} only: the test could not fail"
