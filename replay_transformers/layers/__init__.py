"""The state-space layers of a replay cache: one module per operator, and the table that finds them."""

from replay_transformers.layers.base import ReplayLayer
from replay_transformers.layers.gated_delta import GatedDeltaReplayLayer
from replay_transformers.layers.mamba2 import Mamba2ReplayLayer

__all__ = ["LAYER_CLASSES", "GatedDeltaReplayLayer", "Mamba2ReplayLayer", "ReplayLayer"]

# kind of a layer's geometry -> its class
LAYER_CLASSES: dict[str, type[ReplayLayer]] = {"mamba2": Mamba2ReplayLayer, "gated_delta": GatedDeltaReplayLayer}
