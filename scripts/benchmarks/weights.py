"""Random weights under which nothing overflows and the recurrent state matters."""

import math
from typing import Any

import torch

from .presets import Preset, layers_that_fit
from .several_gpus import build_in_places, spread

# Time steps times rates: a head remembers between two and some thousand tokens.
SHORTEST_STEP, LONGEST_STEP = 1e-2, 0.5
SLOWEST_RATE, FASTEST_RATE = 0.05, 1.0
SKIP = 0.1  # Mamba-2's D: with 1, as the class has it, the input drowns the state
# A layer adds the output of one of these to the residual stream. Scaled down by the depth, as in GPT-2, they keep
# rounding errors from growing from layer to layer.
OUTPUTS = ("out_proj", "o_proj", "down_proj")
# Random routers nearly like many experts, and rounding decides among them: what experts give is scaled down, or a few
# layers later two correct implementations have nothing in common. It costs no time.
EXPERTS, EXPERT_SCALE = ".experts.down_proj", 0.03


def build_model(
    preset: Preset, device: str | list[str], *, weight_bytes: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Any, int]:
    """A model in eval mode, built on the device, of as many of the preset's first layers as fit.

    Args:
        device: a list of several spreads the model over them, layer by layer.
        weight_bytes: the memory that weights may take, on all devices together.
        seed: of the weights.

    Returns:
        The model and its number of layers.
    """
    layers = layers_that_fit(preset, weight_bytes, dtype.itemsize)
    torch.manual_seed(seed)
    devices = [device] if isinstance(device, str) else device
    places: dict[str, str] = {}
    if len(devices) == 1:
        model = preset.build(devices[0], dtype, layers)
    else:
        model, places = build_in_places(preset, devices, dtype, layers)
    draw_weights(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval().requires_grad_(False)
    if places:
        spread(model, places)
    return model, layers


@torch.no_grad()
def draw_weights(model: Any, seed: int = 0) -> None:
    """Redraw matrices, convolutions, rates and time steps; norms and biases stay as the class made them.

    Every device has a generator of its own: the first one that of the seed, the others those of the next seeds.
    """
    generators: dict[torch.device, torch.Generator] = {}
    depth_scale = len(model.base_model.layers) ** -0.5
    for name, parameter in model.named_parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed + len(generators))
        generator = generators[device]
        if name.endswith("A_log"):
            rates = torch.empty_like(parameter).uniform_(SLOWEST_RATE, FASTEST_RATE, generator=generator)
            parameter.copy_(rates.log())
        elif name.endswith("dt_bias"):
            logs = torch.empty_like(parameter, dtype=torch.float32)
            steps = logs.uniform_(math.log(SHORTEST_STEP), math.log(LONGEST_STEP), generator=generator).exp()
            parameter.copy_(steps + (-torch.expm1(-steps)).log())  # the inverse of softplus
        elif name.endswith(".D"):
            parameter.fill_(SKIP)
        elif parameter.ndim >= 2:
            scale = depth_scale if any(output in name for output in OUTPUTS) else 1.0
            if EXPERTS in name:
                scale *= EXPERT_SCALE
            parameter.normal_(std=scale * parameter.shape[-1] ** -0.5, generator=generator)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # stock limits the steps of prompts and not those of decoding: without a limit, all paths agree
            module.time_step_limit = (0.0, float("inf"))


@torch.no_grad()
def assert_usable(model: Any) -> None:
    """Raise ValueError unless a short forward is finite and its last token feels the first one."""
    device = model.device
    ids = torch.arange(1, 17, device=device)[None] % model.config.vocab_size
    other = ids.clone()
    other[0, 0] += 1
    logits, moved = (model(input_ids=tokens, use_cache=False).logits[0, -1].float() for tokens in (ids, other))
    if not torch.isfinite(logits).all():
        raise ValueError("the random weights give logits that are not finite")
    if torch.equal(logits, moved):
        raise ValueError("the random weights forget: the first token of sixteen does not reach the last one's logits")
