"""How much memory `generate` will need at its peak, predicted without weights or a GPU.

Weights and cache are counted on the device "meta". Activations are what is alive at most while a forward of the model's
own code runs there: once over the prompt, once over a single token. Three things do not run there and are accounted for
by the tensors that they make:

- attention by `scaled_dot_product_attention` and products grouped by expert: their output,
- the convolution, and state-space steps through the rings: their output (on a CPU plain PyTorch takes more),
- scans of the prompt by flash-linear-attention or mamba-ssm: `_LIBRARY_SCANS`. Plain scans do run.

The context of CUDA, buffers of the matrix libraries and what the allocator keeps in reserve are not in it.
"""

import copy
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import replay_transformers as rt
from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.gated_delta import reach as delta
from replay_transformers.kernels.mamba2 import reach as mamba
from replay_transformers.kernels.scans import scan_in_pieces
from replay_transformers.layers import ReplayLayer
from replay_transformers.patches.versions import generate_cache_name

__all__ = ["Load", "Peak", "layer_footprints", "meta_cache", "predict_peak", "uses_library", "weight_bytes"]

META = torch.device("meta")
GROUPED_PRODUCTS = [
    getattr(owner, name)
    for owner, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(owner, name)
]


@dataclass(frozen=True)
class Load:
    """What is asked of a model.

    Args:
        config: settings of the cache.
        length: tokens of attention, prompt included, as in ``replay_static``.
        prompt: tokens of the prompt, all in one forward.
        dtype: of weights and activations.
        library: prompts are scanned by flash-linear-attention or mamba-ssm.
    """

    config: rt.ReplayConfig
    length: int
    prompt: int
    dtype: torch.dtype
    library: bool = False


@dataclass(frozen=True)
class Peak:
    """Bytes for a batch; ``prefill`` and ``step`` are those of activations, each with its ``logits``."""

    rows: int
    weights: int
    cache: dict[str, int]
    logits: int
    prefill: int
    step: int

    @property
    def total(self) -> int:
        """At the worst moment."""
        return self.weights + sum(self.cache.values()) + max(self.prefill, self.step)


def weight_bytes(*parts: torch.nn.Module | torch.Tensor) -> int:
    """Bytes of the parameters and buffers of modules, and of tensors; shared ones once."""
    found: dict[int, int] = {}
    for part in parts:
        tensors = [part] if isinstance(part, torch.Tensor) else [*part.parameters(), *part.buffers()]
        found |= {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(found.values())


def meta_cache(config: Any, load: Load, rows: int = 1) -> rt.ReplayCache:
    """A cache without memory for ``rows`` sequences; raises what `ReplayCache` raises."""
    cache = rt.ReplayCache(config, load.config, max_cache_len=load.length)
    cache.allocate(rows, load.dtype, META)
    return cache


def layer_footprints(cache: rt.ReplayCache) -> list[dict[str, int]]:
    """`memory_footprint` of each layer by itself."""
    lone = copy.copy(cache)
    footprints = []
    for layer in cache.layers:
        lone.layers = [layer]
        footprints.append(lone.memory_footprint())
    return footprints


def uses_library(cache: rt.ReplayCache, dtype: torch.dtype) -> bool:
    """Whether prompts are scanned by a library that is installed, on a GPU that is there."""
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    return is_narrow and all(layer._recurrence.library is not None for layer in cache.replay_layers)


def predict_peak(model: Any, load: Load, rows: int) -> Peak:
    """The peak of a `generate` call with ``cache_implementation="replay_static"`` on one device.

    Args:
        model: on the device "meta", of a supported family.
        load: settings and lengths. rows: sequences in the batch.

    Raises:
        ValueError: the prompt is longer than ``load.length``.
        NotImplementedError, RuntimeError: an operation of the model cannot run without values.
    """
    cache = meta_cache(model.config, load, rows)
    with rt.enable():
        prefill = _alive_in_forward(model, load, rows, load.prompt)
        step = _alive_in_forward(model, load, rows, 1)
    # as the model computes them and in float32, as `generate` keeps them
    logits = rows * model.get_output_embeddings().weight.shape[0] * (load.dtype.itemsize + 4)
    return Peak(rows, weight_bytes(model), cache.memory_footprint(), logits, prefill, step)


def _alive_in_forward(model: Any, load: Load, rows: int, tokens: int) -> int:
    """Bytes of activations that are alive at the worst moment of a forward, and of the float32 copy of its logits."""
    cache = meta_cache(model.config, load, rows)
    _stand_in(cache, load)
    held = [*model.parameters(), *model.buffers()]
    held += [buffer for layer in cache.replay_layers for buffer in layer.buffers().values()]
    held += [buffer for layer in cache.attention_layers for buffer in vars(layer).values()]
    ids = torch.empty(rows, tokens, dtype=torch.int64, device=META)
    meter = _Meter(tensor for tensor in held if isinstance(tensor, torch.Tensor))
    with torch.no_grad(), meter, _OutputsOnly():
        arguments = {"attention_mask": torch.empty_like(ids), "logits_to_keep": 1, "use_cache": True}
        output = model(input_ids=ids, **{generate_cache_name(): cache}, **arguments)
        logits = output.logits[:, -1].to(torch.float32, copy=True)
        del output, logits
    return meter.most


class _Meter(TorchDispatchMode):
    """Counts the bytes of tensors on "meta" that operators make, for as long as they live.

    A question about values, which are not there, is answered with no.
    """

    def __init__(self, held: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return 0
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._see(tensor.untyped_storage())
        return output

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.alive += storage.nbytes()
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.alive -= count


class _OutputsOnly(TorchFunctionMode):
    """Attention, and products grouped by expert, that make their output and nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        if func in GROUPED_PRODUCTS:  # on "meta" for bfloat16 only
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return func(*args, **(kwargs or {}))


def _stand_in(cache: rt.ReplayCache, load: Load) -> None:
    """Have the cache's layers make on "meta" the tensors that they make on a GPU, without a cursor, which needs values.

    All state-space layers are alike, so that only the first one's plain scan, of many small operators, is run.
    """
    cursor: Any = cache.cursor
    cursor.is_starting = lambda before, layers: True
    for layer in cache.replay_layers:
        replaced: Any = layer
        replaced.convolve = _convolve
        replaced._run = functools.partial(_run, layer, load)


def _convolve(inputs: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str | None) -> torch.Tensor:
    return inputs.new_empty(inputs.shape)


def _run(
    layer: ReplayLayer,
    load: Load,
    operands: tuple[torch.Tensor, ...],
    update: Callable[..., torch.Tensor],
    replay: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """In place of `ReplayLayer._run`."""
    kind, values = layer.geometry.kind, operands[0] if layer.geometry.kind == "mamba2" else operands[2]
    if values.shape[1] <= load.config.max_step or (layer.order and not load.library):
        return values.new_empty(values.shape)
    reference = importlib.import_module(f"replay_transformers.kernels.{kind}.reference")
    if load.library:
        update = functools.partial(_library_scan, layer.geometry)
    after = torch.zeros(values.shape[0], dtype=torch.int64, device=META)
    return layer._scan(update, lambda *tensors: reference, list(operands), after)


def _library_scan(geometry: LayerGeometry, kernels: Any, *operands: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """In place of a layer's ``update``."""
    scan, reach = _LIBRARY_SCANS[geometry.kind]
    return scan_in_pieces(functools.partial(scan, geometry), operands, state, *reach(*operands))


def _mamba_scan(geometry: LayerGeometry, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """mamba-ssm: decays, a state per chunk before and after chunks are chained, the last state, products of B and C."""
    rows, tokens = x.shape[:2]
    chunks = -(-tokens // mamba.CHUNK)
    state = (rows, geometry.heads, geometry.head_dim, geometry.state_dim)
    make = functools.partial(torch.empty, dtype=torch.float32, device=META)
    output, decays = x.new_empty(x.shape), make(2, rows, geometry.heads, chunks, mamba.CHUNK)
    states = make(chunks, *state)
    chained, last = make(chunks, *state), make(*state)
    del states
    products = make(rows, chunks, geometry.groups, mamba.CHUNK, mamba.CHUNK)
    del decays, chained, products
    return output, last


def _delta_scan(
    geometry: LayerGeometry, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash-linear-attention: q and k per value head and normalised, v in a row, three intermediates of their size,
    the chunks' matrices, a state per chunk and the last one."""
    rows, tokens = v.shape[:2]
    chunks = -(-tokens // delta.CHUNK)
    state = (rows, geometry.heads, geometry.state_dim, geometry.head_dim)
    keys = [x.repeat_interleave(geometry.heads // geometry.groups, dim=2) for x in (q, k)]
    normalised = [torch.empty_like(x) for x in keys]
    values = [v.contiguous(), *(v.new_empty(v.shape) for _ in range(2)), torch.empty_like(keys[0])]
    matrices = v.new_empty(rows, tokens, geometry.heads, delta.CHUNK)
    states, last = v.new_empty(chunks, *state), torch.empty(state, dtype=torch.float32, device=META)
    output = v.new_empty(v.shape)
    del keys, normalised, values, matrices, states
    return output, last


_LIBRARY_SCANS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[int, int]]]] = {
    "mamba2": (_mamba_scan, mamba.reach),
    "gated_delta": (_delta_scan, delta.reach),
}
