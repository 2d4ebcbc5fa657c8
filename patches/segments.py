"""A traced graph in pieces, each on one device: a CUDA graph cannot hold more."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.passes.split_module import split_module

__all__ = ["devices_of", "in_pieces"]


def devices_of(node: torch.fx.Node) -> set[torch.device]:
    """Of the tensors that a node gives, as dynamo saw them."""
    return {value.device for value in _tensors(node.meta.get("example_value"))}


def in_pieces(graph_module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[str, bool]]:
    """The same computation in the same order, as calls of pieces.

    Returns:
        A module that calls the pieces, and the name of each piece with whether all its tensors are on one device.
        Operations between devices are pieces of their own.
    """
    numbers, kinds = dict[torch.fx.Node, int](), list[frozenset[torch.device]]()
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        devices = frozenset(devices_of(node).union(*map(devices_of, node.all_input_nodes)))
        if not kinds or (devices and devices != kinds[-1]):
            kinds.append(devices)
        numbers[node] = len(kinds) - 1
    pieces = split_module(graph_module, graph_module, numbers.__getitem__, keep_original_order=True)
    return pieces, {f"submod_{number}": len(devices) <= 1 for number, devices in enumerate(kinds)}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
