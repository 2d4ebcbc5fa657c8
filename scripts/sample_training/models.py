"""The four sample models: stock transformers classes, and the MTP heads that are trained beside the two larger ones."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from .tokenizer import BOS_ID, EOS_ID, PAD_ID, RECIPES

SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1
# Stock Nemotron-H clamps the time step of multi-token forwards from below and that of single-token forwards not at
# all. A trained step is far above this limit, so both give the same.
TIME_STEP_LIMIT = 1e-6


@dataclass(frozen=True)
class SampleModel:
    """One shipped folder: its name, whose tokenizer it uses, how it is built and trained, and whether it has MTP."""

    name: str
    family: str
    config: Callable[[], PreTrainedConfig]
    rate: float
    has_mtp: bool = False


def _qwen3_5_config(**sizes: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=RECIPES["qwen3_5"].vocab_size,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        head_dim=64,
        max_position_embeddings=4096,
        # The three sections cover the eight frequencies of a quarter of the head.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        **sizes,
    )


def qwen3_5_config() -> Qwen3_5TextConfig:
    """Eight layers, every fourth with full attention; the MTP layer is counted under released checkpoints' name."""
    config = _qwen3_5_config(
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    config.mtp_num_hidden_layers = 1
    config.mtp_use_dedicated_embeddings = False
    return config


def qwen3_5_draft_config() -> Qwen3_5TextConfig:
    """Four layers, the last with full attention."""
    return _qwen3_5_config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )


def _nemotron_h_config(**sizes: Any) -> NemotronHConfig:
    return NemotronHConfig(
        vocab_size=RECIPES["nemotron_h"].vocab_size,
        head_dim=64,
        n_groups=2,
        conv_kernel=4,
        chunk_size=32,
        time_step_min=TIME_STEP_LIMIT,
        max_position_embeddings=4096,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        **sizes,
    )


def nemotron_h_config() -> NemotronHConfig:
    """Five Mamba-2 layers, five MLPs and two attention layers; heads of 48, which no power of two divides evenly.

    The MTP head is an attention block and an MLP block.
    """
    return _nemotron_h_config(
        hybrid_override_pattern="M-M-M*-M-M*-",
        num_nextn_predict_layers=1,
        mtp_layers_block_type=["full_attention", "mlp"],
        hidden_size=224,
        intermediate_size=448,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_num_heads=8,
        mamba_head_dim=48,
        ssm_state_size=64,
    )


def nemotron_h_draft_config() -> NemotronHConfig:
    """Three Mamba-2 layers, three MLPs and one attention layer."""
    return _nemotron_h_config(
        hybrid_override_pattern="M-M*-M-",
        hidden_size=112,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        mamba_num_heads=6,
        mamba_head_dim=32,
        ssm_state_size=32,
    )


SAMPLE_MODELS = {
    sample.name: sample
    for sample in (
        SampleModel("qwen3_5", "qwen3_5", qwen3_5_config, 4e-3, has_mtp=True),
        SampleModel("qwen3_5_draft", "qwen3_5", qwen3_5_draft_config, 5e-3),
        SampleModel("nemotron_h", "nemotron_h", nemotron_h_config, 4e-3, has_mtp=True),
        SampleModel("nemotron_h_draft", "nemotron_h", nemotron_h_draft_config, 5e-3),
    )
}


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 model with random weights whose recurrent states remember for tens to thousands of tokens."""
    classes = {"qwen3_5_text": Qwen3_5ForCausalLM, "nemotron_h": NemotronHForCausalLM}
    model = classes[config.model_type](config).float()
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            module.reset_parameters()
        if hasattr(module, "dt_bias"):
            _spread_time_steps(module.dt_bias)
    return model


@torch.no_grad()
def _spread_time_steps(dt_bias: torch.Tensor) -> None:
    """Set ``dt_bias`` [heads] so that softplus gives steps spread evenly in log scale; stock GDN forgets at once."""
    low, high = (torch.tensor(step).log() for step in (SHORTEST_STEP, LONGEST_STEP))
    step = (low + (high - low) * torch.rand(dt_bias.shape)).exp()
    dt_bias.copy_(step + (-torch.expm1(-step)).log())


class MtpHead(nn.Module):
    """Predicts the token after the next one; its parameters are named as in released checkpoints, after ``mtp.``."""

    def forward(self, model: PreTrainedModel, next_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocabulary] for the token after ``next_ids``.

        Args:
            model: The main model, which lends its embedding, its rotary table and its output matrix.
            next_ids: [B, T] int64, the tokens at positions 1 to T.
            hidden: [B, T, width], the main model's states after its last norm at positions 0 to T - 1.
        """
        raise NotImplementedError


class QwenMtpHead(MtpHead):
    """Qwen3.5's: a projection of embedding and state, one decoder layer with full attention, a norm."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        config: Any = copy.deepcopy(model.config)
        config.layer_types = ["full_attention"]
        config.num_hidden_layers = 1
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, 0)])
        self.norm = Qwen3_5RMSNorm(width, eps)
        _draw_matrices(self, config.initializer_range)

    def forward(self, model: PreTrainedModel, next_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """As `MtpHead.forward` says."""
        embedded = model.get_input_embeddings()(next_ids)
        positions = torch.arange(1, next_ids.shape[1] + 1, device=next_ids.device).expand(3, 1, -1)
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        states = self.layers[0](
            self.fc(joined), position_embeddings=model.model.rotary_emb(embedded, positions), attention_mask=None
        )
        return model.lm_head(self.norm(states))


class NemotronMtpHead(MtpHead):
    """Nemotron-H's: blocks of the model's own kinds, without positions; the first one joins embedding and state."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        config: Any = copy.deepcopy(model.config)
        config.layers_block_type = config.mtp_layers_block_type
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList(NemotronHBlock(config, index) for index in range(len(config.layers_block_type)))
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        first.enorm, first.hnorm = NemotronHRMSNorm(width, eps), NemotronHRMSNorm(width, eps)
        first.eh_proj = nn.Linear(2 * width, width, bias=False)
        last.final_layernorm = NemotronHRMSNorm(width, eps)
        _draw_matrices(self, config.initializer_range)

    def forward(self, model: PreTrainedModel, next_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """As `MtpHead.forward` says."""
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        embedded = model.get_input_embeddings()(next_ids)
        states = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], dim=-1))
        for block in self.layers:
            states = block(states, attention_mask=None)
        return model.lm_head(last.final_layernorm(states))


def _draw_matrices(head: nn.Module, spread: float) -> None:
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=spread)


def build_head(model: PreTrainedModel) -> MtpHead:
    """A float32 head with random weights, for a model of either family."""
    heads: dict[str, Callable[[PreTrainedModel], MtpHead]] = {
        "qwen3_5_text": QwenMtpHead,
        "nemotron_h": NemotronMtpHead,
    }
    return heads[model.config.model_type](model).float()
