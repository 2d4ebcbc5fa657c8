"""Counts the bytes of a cache's buffers that operators read and write, one decode step at a time.

Nothing is derived from a model's shapes: a `TorchDispatchMode` looks at the tensors that every operator is given, so
it sees what PyTorch's dispatcher sees. Kernels launched past the dispatcher are not counted, and neither are the
temporaries that operators hand to each other.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from replay_transformers.layers import ReplayLayer

__all__ = ["KINDS", "StepTraffic", "TrafficCounter", "cache_buffers", "count_steps", "mean_traffic", "whole_windows"]

KINDS = ("state", "ring", "convolution")
REPLAY_KINDS = {"checkpoint": "state", "readout": "state", "conv_ring": "convolution"}  # the other buffers are rings

# What operators read and write. One that is not named here touches its operands in full; a view touches nothing.
SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
SHAPE_ONLY |= {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}
# read as many elements of their first operand as they return
GATHERING = {"gather", "index_select", "index", "take", "embedding"}
# in-place operators that do not read what they overwrite; the scattering ones below do not either, except ADDING
OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
ADDING = {"scatter_add_", "scatter_reduce_", "index_add_", "index_reduce_"}


def _listed(destination: torch.Tensor, operands: dict[str, Any]) -> int:
    return operands["index"].numel()


def _along_dim(destination: torch.Tensor, operands: dict[str, Any]) -> int:
    size = destination.shape[operands["dim"]] if destination.ndim else 1
    return operands["index"].numel() * (destination.numel() // max(size, 1))


def _masked(destination: torch.Tensor, operands: dict[str, Any]) -> int:
    return int(operands["mask"].expand_as(destination).sum())


def _indexed(destination: torch.Tensor, operands: dict[str, Any]) -> int:
    one = torch.empty(1, dtype=torch.bool, device=destination.device)
    return torch.ops.aten.index(one.expand(destination.shape), operands["indices"]).numel()


# in-place operators that write part of their destination -> how many of its elements
SCATTERING: dict[str, Callable[[torch.Tensor, dict[str, Any]], int]] = {
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_", "put_"), _listed),
    **dict.fromkeys(("index_copy_", "index_add_", "index_fill_", "index_reduce_"), _along_dim),
    **dict.fromkeys(("masked_fill_", "masked_scatter_"), _masked),
    **dict.fromkeys(("index_put_", "_index_put_impl_"), _indexed),
}


def _address(tensor: torch.Tensor) -> int:
    """The address of the memory behind a tensor; 0 if it has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _elements(tensor: torch.Tensor) -> int:
    """Distinct elements of a view: what is broadcast or overlaps counts once."""
    if tensor.numel() == 0:
        return 0
    strides = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    span = 1 + sum((size - 1) * stride for size, stride in strides)
    return min(math.prod(size for size, _ in strides), span)


def _bind(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The operands that were passed, each with its place in the operator's schema."""
    arguments = func._schema.arguments
    positional = list(zip(arguments, args, strict=False))
    return positional + [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _destination(name: str, argument: Any, tensor: torch.Tensor, operands: dict[str, Any]) -> tuple[int, int]:
    """Elements of an operator's destination that it writes, and those that it reads."""
    written = SCATTERING[name](tensor, operands) if name in SCATTERING else _elements(tensor)
    if name in SCATTERING:
        reads = name in ADDING or bool(operands.get("accumulate")) or operands.get("reduce") is not None
    else:
        reads = name not in OVERWRITING and not argument.is_out
    return written, written if reads else 0


class TrafficCounter(TorchDispatchMode):
    """While it is active, counts the bytes of watched tensors that PyTorch's operators read and write.

    A tensor counts when its memory is that of a watched one, whatever view of it an operator is given; then the
    elements of that view count, each once. Views move nothing. ``copy_`` and its like only write their destination,
    other in-place operators also read it. Indexing reads what it returns and writes what it addresses. An operator
    that is given a tensor twice counts it twice.

    Args:
        buffers: the tensors to watch, by a name for their kind.

    Attributes:
        reads, writes: bytes by kind.

    Example:
        ```python
        import torch
        from replay_transformers.traffic import TrafficCounter

        state = torch.zeros(4, 8)
        with TrafficCounter({"state": [state]}) as counter:
            state.T[0].mul_(2)
        assert counter.reads == counter.writes == {"state": 4 * 4}
        ```
    """

    def __init__(self, buffers: Mapping[str, Iterable[torch.Tensor]]) -> None:
        super().__init__()
        self.reads = dict.fromkeys(buffers, 0)
        self.writes = dict.fromkeys(buffers, 0)
        # the tensors are held, so that no address is given out again while it is watched
        self._held = {kind: list(tensors) for kind, tensors in buffers.items()}
        self._kinds = {_address(tensor): kind for kind, tensors in self._held.items() for tensor in tensors}
        self._kinds.pop(0, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self._count(func, _bind(func, args, kwargs), output)
        return output

    def _count(self, func: Any, bound: list[tuple[Any, Any]], output: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in SHAPE_ONLY or torch.Tag.inplace_view in func.tags:
            return
        operands = {argument.name: value for argument, value in bound}
        returned = [tensor for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor)]
        views = set() if any(_is_written(argument) for argument, _ in bound) else set(map(_address, returned))
        for argument, value in bound:
            for tensor in tree_leaves(value):
                if not isinstance(tensor, torch.Tensor) or _address(tensor) not in self._kinds:
                    continue
                if _is_written(argument):
                    self._add(tensor, *_destination(name, argument, tensor, operands))
                elif name in GATHERING and argument is bound[0][0]:
                    self._add(tensor, 0, returned[0].numel())
                elif _address(tensor) not in views:
                    self._add(tensor, 0, _elements(tensor))

    def _add(self, tensor: torch.Tensor, written: int, read: int) -> None:
        kind = self._kinds[_address(tensor)]
        self.writes[kind] += written * tensor.element_size()
        self.reads[kind] += read * tensor.element_size()

    def add_replaced(self, buffers: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Count the tensors that are not watched yet as written in full: they took a watched one's place."""
        for kind, tensors in buffers.items():
            for tensor in tensors:
                if _address(tensor) not in self._kinds:
                    self.writes[kind] += _elements(tensor) * tensor.element_size()


def cache_buffers(cache: Cache) -> dict[str, list[torch.Tensor]]:
    """The buffers of a cache's state-space layers by kind, as they are now; they are made in the first forward.

    Args:
        cache: a stock cache (its recurrent and convolution states) or a `ReplayCache` (checkpoints, rings, convolution
            rings).

    Returns:
        Tensors under each of `KINDS`; attention's keys and values are not among them.
    """
    buffers: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
    for layer in cache.layers:
        if isinstance(layer, ReplayLayer):
            for name, buffer in layer.buffers().items():
                buffers[REPLAY_KINDS.get(name.split(".")[0], "ring")].append(buffer)
        elif isinstance(layer, LinearAttentionCacheLayerMixin):
            buffers["state"] += [state for state in layer.recurrent_states.values() if state is not None]
            buffers["convolution"] += [state for state in layer.conv_states.values() if state is not None]
    return buffers


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one decode step (or the mean of several) read and wrote, by kind of buffer."""

    reads: dict[str, float]
    writes: dict[str, float]

    @property
    def wrote_state(self) -> bool:
        """Whether the step wrote a recurrent state: every step of a stock cache, the flush steps of a replay cache."""
        return self.writes["state"] > 0

    @property
    def total(self) -> float:
        """All bytes, read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())


def mean_traffic(steps: Sequence[StepTraffic]) -> StepTraffic | None:
    """The mean of some steps; None of none."""
    if not steps:
        return None
    sums = ({kind: sum(getattr(step, what)[kind] for step in steps) for kind in KINDS} for what in ("reads", "writes"))
    reads, writes = ({kind: total / len(steps) for kind, total in by_kind.items()} for by_kind in sums)
    return StepTraffic(reads, writes)


def whole_windows(steps: Sequence[StepTraffic]) -> Sequence[StepTraffic]:
    """The steps from the first that wrote a state up to the last one, without it: whole windows, for a fair mean.

    All steps if there is no whole window among them.
    """
    flushes = [index for index, step in enumerate(steps) if step.wrote_state]
    return steps[flushes[0] : flushes[-1]] if len(flushes) > 1 else steps


class _StepRecorder:
    """Forward hooks that put a counter around each decode step."""

    def __init__(self) -> None:
        self.steps: list[StepTraffic] = []
        self._running: tuple[Cache, TrafficCounter] | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operands = [*args, *kwargs.values()]
        cache = next((value for value in operands if isinstance(value, Cache)), None)
        ids = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), *args[:1])
        if cache is None or ids.shape[1] != 1 or not _has_seen_tokens(cache):
            return
        counter = TrafficCounter(cache_buffers(cache))
        counter.__enter__()
        self._running = cache, counter

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._running is None:
            return
        (cache, counter), self._running = self._running, None
        counter.__exit__(None, None, None)
        if output is not None:  # None after an exception
            counter.add_replaced(cache_buffers(cache))
            self.steps.append(StepTraffic(dict(counter.reads), dict(counter.writes)))


def _has_seen_tokens(cache: Cache) -> bool:
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return any(any(layer.has_previous_state.values()) for layer in layers)


@contextmanager
def count_steps(model: nn.Module) -> Iterator[list[StepTraffic]]:
    """Count what a model's decode steps read and write of their cache.

    A decode step is a forward of one token with a cache that has seen tokens before; prompts are not counted. Counting
    slows the steps down: measure time in another run. Do not compile the model.

    Args:
        model: a transformers model; its `generate` may run inside.

    Yields:
        A list that grows by one `StepTraffic` per decode step.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM

        import replay_transformers as rt
        from replay_transformers.traffic import count_steps

        model = AutoModelForCausalLM.from_pretrained(rt.sample_model("qwen3_5"))
        with count_steps(model) as steps:
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert len(steps) == 3
        assert steps[0].reads["state"] == steps[0].writes["state"]  # the stock cache rewrites its state at every step
        ```
    """
    recorder = _StepRecorder()
    hooks = [
        model.register_forward_pre_hook(recorder.before, with_kwargs=True),
        model.register_forward_hook(recorder.after, with_kwargs=True, always_call=True),
    ]
    try:
        yield recorder.steps
    finally:
        for hook in hooks:
            hook.remove()
