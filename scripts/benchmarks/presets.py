"""The models that are measured: configurations of released ones, and two tiny ones for trying the scripts on a CPU."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from replay_transformers.geometry import STATE_SPACE, LayerGeometry, layer_geometries


@dataclass(frozen=True, eq=False)
class Preset:
    """A model by its configuration.

    Args:
        name: how the command line calls it.
        model_class, config_class: names of classes of transformers.
        settings: the configuration's arguments.
        ssm_layers: state-space layers of the whole model.
        billions: parameters of the whole model, in billions.
    """

    name: str
    model_class: str
    config_class: str
    settings: dict[str, Any]
    ssm_layers: int
    billions: float

    def config(self, layers: int | None = None) -> Any:
        """The configuration, of the first ``layers`` layers if given: the pattern of layer types stays as it is."""
        settings = dict(self.settings)
        if layers is not None and "hybrid_override_pattern" in settings:
            settings["hybrid_override_pattern"] = settings["hybrid_override_pattern"][:layers]
        elif layers is not None:
            settings["num_hidden_layers"] = layers
        return getattr(transformers, self.config_class)(**settings)

    def geometries(self, layers: int | None = None) -> list[LayerGeometry]:
        """All layers, in order."""
        return layer_geometries(self.config(layers))

    def geometry(self) -> LayerGeometry:
        """The state-space layer; all of a model's are alike."""
        return next(layer for layer in self.geometries() if layer.kind in STATE_SPACE)

    def build(self, device: str, dtype: torch.dtype, layers: int | None = None) -> Any:
        """The model with the class's own initialisation; on the device "meta" without weights."""
        with torch.device(device):
            return getattr(transformers, self.model_class)._from_config(self.config(layers), dtype=dtype)

    @property
    def is_tiny(self) -> bool:
        """Whether it is here for trying the scripts only."""
        return self.name.startswith("tiny-")


def load_presets() -> dict[str, Preset]:
    """All presets by name."""
    facts = json.loads(Path(__file__).with_suffix(".json").read_text())
    return {name: Preset(name, **fields) for name, fields in facts.items()}


def chosen_presets(names: list[str] | None) -> list[Preset]:
    """The named presets, or the four released models; raises ValueError for a name that does not exist."""
    presets = load_presets()
    unknown = set(names or ()) - set(presets)
    if unknown:
        raise ValueError(f"--preset got {', '.join(sorted(unknown))}, expected any of {', '.join(presets)}")
    return [preset for name, preset in presets.items() if (name in names if names else not preset.is_tiny)]


def parameter_count(model: torch.nn.Module) -> int:
    """Parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def layers_that_fit(preset: Preset, budget: int, bytes_per_parameter: int = 2) -> int:
    """How many of the model's first layers have at most ``budget`` bytes of weights, embeddings included.

    The cut lies before a state-space layer that follows another kind of layer, so that the types keep their pattern.

    Raises:
        ValueError: not even the shortest cut fits.
    """
    model = preset.build("meta", torch.bfloat16)
    layers = list(model.base_model.layers)
    kinds = [geometry.kind in STATE_SPACE for geometry in preset.geometries()]
    used = bytes_per_parameter * (parameter_count(model) - sum(map(parameter_count, layers)))
    best = 0
    for index, layer in enumerate(layers):
        used += bytes_per_parameter * parameter_count(layer)
        is_cut = index + 1 == len(layers) or (kinds[index + 1] and not kinds[index])
        if used <= budget and is_cut:
            best = index + 1
    if not best:
        raise ValueError(f"no part of {preset.name} fits into {budget / 2**30:.1f} GiB of weights")
    return best
