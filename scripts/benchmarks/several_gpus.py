"""Models that do not fit one GPU: built where they run, their layers dealt out over several, spread by accelerate."""

from itertools import accumulate
from typing import Any

import torch

from .presets import Preset


def devices_for(device: str, gpus: int) -> list[str]:
    """The devices that a model is spread over; a single one is ``device`` itself.

    On a CPU it is the CPU so many times, to try the scripts.

    Raises:
        ValueError: there are fewer GPUs than that.
    """
    if torch.device(device).type == "cuda" and torch.cuda.device_count() < gpus:
        raise ValueError(f"--gpus is {gpus}, and {torch.cuda.device_count()} of them are visible")
    if gpus == 1 or device == "cpu":
        return [device] * gpus
    if device != "cuda":
        raise ValueError(f"--gpus {gpus} takes the first GPUs of --device cuda, got --device {device}")
    return [f"cuda:{index}" for index in range(gpus)]


def devices_of(model: Any) -> list[torch.device]:
    """Where the weights are; the first device is that of the inputs and outputs."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


def is_spread(model: Any) -> bool:
    """Whether accelerate moves what goes from layer to layer."""
    return hasattr(model, "hf_device_map")


def deal(sizes: list[int], hands: int) -> tuple[int, ...]:
    """Cut a list into runs whose largest sum is as small as it can be, and the others as even: their lengths.

    Raises:
        ValueError: fewer elements than runs.
    """
    if len(sizes) < hands:
        raise ValueError(f"{len(sizes)} layers cannot be spread over {hands} GPUs")
    sums = [0, *accumulate(sizes)]
    # elements dealt out so far -> the best way to: the largest sum, the sum of squares, the lengths
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(hands):
        best = {
            end: min(
                (max(largest, sums[end] - sums[begin]), squares + (sums[end] - sums[begin]) ** 2, (*cut, end - begin))
                for begin, (largest, squares, cut) in best.items()
                if begin < end
            )
            for end in range(min(best) + 1, len(sums))
        }
    return best[len(sizes)][2]


def layer_map(model: Any, devices: list[str]) -> dict[str, str]:
    """Which part of a model goes where, for accelerate: runs of consecutive layers, balanced by bytes.

    What comes before the layers goes with the first of them, the final norm and the head with the last. A head that
    shares the embedding's weights stays with it.
    """
    base, prefix = model.base_model, model.base_model_prefix
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    heads = {name: module for name, module in model.named_children() if name != prefix}
    others = {f"{prefix}.{name}": module for name, module in base.named_children() if name != "layers"}
    last = {name for name in others if "norm" in name} | (set() if is_tied else set(heads))
    sizes = [byte_count(layer) for layer in base.layers]
    for name, module in {**others, **({} if is_tied else heads)}.items():
        sizes[-1 if name in last else 0] += byte_count(module)
    runs = zip(devices, deal(sizes, len(devices)), strict=True)
    places = [device for device, length in runs for _ in range(length)]
    layers = {f"{prefix}.layers.{index}": device for index, device in enumerate(places)}
    return layers | {name: devices[-1 if name in last else 0] for name in (*others, *heads)}


def byte_count(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def build_in_places(preset: Preset, devices: list[str], dtype: torch.dtype, layers: int) -> tuple[Any, dict[str, str]]:
    """The model with the class's own initialisation, every part made where it belongs, and the map of its parts."""
    model = preset.build("meta", dtype, layers)
    places = layer_map(model, devices)
    for name, device in places.items():
        model.get_submodule(name).to_empty(device=device)
    model.init_weights()  # also ties a head to the embedding again, and restores buffers that no checkpoint has
    return model, places


def spread(model: Any, places: dict[str, str]) -> None:
    """Let accelerate move what goes from part to part, as `from_pretrained(device_map=...)` does; in place.

    Inputs come from the first part's device, and outputs go back to it.
    """
    from accelerate import dispatch_model

    first = places[f"{model.base_model_prefix}.layers.0"]
    skipped = model._skip_keys_device_placement
    dispatch_model(model, places, main_device=first, skip_keys=skipped, force_hooks=True)


def prepare(model: Any) -> None:
    """Within `replay_transformers.enable()`: patch the forwards that accelerate's hooks hold, which `generate` does."""
    ids = torch.ones(1, 2, dtype=torch.int64, device=model.device)
    model.generate(ids, max_new_tokens=1, do_sample=False, cache_implementation="replay")
