"""Decode steps as CUDA graphs without inductor: what `CompileConfig(backend="cudagraphs")` means on a replay cache.

torch's own backend of that name works on functionalised graphs. These copy every buffer of the cache that a step
writes, and are not captured because they write. Here dynamo's graph, which still writes in place, is captured as it is.
Of a model on several GPUs each stretch of a step that runs on one of them is captured, and what goes from one to the
next is copied in between.
"""

import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from replay_transformers.patches.segments import devices_of, in_pieces

__all__ = ["cuda_graphs", "recorded", "with_own_backend"]

logger = logging.getLogger(__name__)

BACKEND = "cudagraphs"

Function = Callable[..., Sequence[Any]]


def with_own_backend(compile_config: Any) -> Any:
    """A copy of this `CompileConfig` that compiles with `cuda_graphs`, if it asks for CUDA graphs without inductor.

    Each shape gets graphs of its own: a graph for many of them has sizes as inputs, and a capture fixes them.
    """
    if compile_config is None or compile_config.backend != BACKEND:
        return compile_config
    compile_config = copy.copy(compile_config)
    compile_config.backend, compile_config.mode, compile_config.options = cuda_graphs, None, None
    compile_config.dynamic = False
    return compile_config


def cuda_graphs(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Function:
    """A backend of dynamo: the graph's first call runs as it is, the second one is captured, later ones are replays."""
    if len(set().union(*map(devices_of, graph_module.graph.nodes))) < 2:
        return _Step(graph_module)
    whole, are_alone = in_pieces(graph_module)
    for name, is_alone in are_alone.items():
        if is_alone:
            piece = getattr(whole, name)
            delattr(whole, name)
            setattr(whole, name, _piece(piece))
    # what a piece gives is valid until the next step
    return lambda *inputs: _copies(whole(*inputs))


def recorded(function: Function) -> Function:
    """A function of tensors on one GPU as a CUDA graph, like `cuda_graphs`; what cannot be captured runs as it is.

    Every operand is copied. What the function reads and writes besides must stay at its address.
    """
    return _Step(function, may_fail=True)


def _piece(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """A stretch of a step; it gives what its module gives, a tensor or several."""
    (given,) = module.graph.output_node().args
    if isinstance(given, tuple):
        return _Step(module, keeps_outputs=False)
    step = _Step(lambda *inputs: (module(*inputs),), keeps_outputs=False)
    return lambda *inputs: step(*inputs)[0]


class _Step:
    """One compiled graph.

    Capturing executes nothing, so the state of a cache advances once per call whatever the call does: the first call is
    the warm-up that compiles kernels and sets up libraries, and a real step; the second captures, then replays.

    Inputs that dynamo says keep their addresses (weights, buffers of the cache) are read and written where they are.
    All others (token ids, positions, masks) are copied into buffers; a graph that writes into one of those is not
    captured. Outputs are copies and stay valid, unless ``keeps_outputs`` is false: then until the next call.

    With ``may_fail`` a function that cannot be captured runs as it is, and the log says why.
    """

    def __init__(self, function: Function, keeps_outputs: bool = True, may_fail: bool = False) -> None:
        self.function, self.keeps_outputs, self.may_fail = function, keeps_outputs, may_fail
        self.warm, self.runs_plainly = False, False
        self.addresses: list[int] = []  # of the inputs that are used where they are, at the time of the capture
        self.buffers: list[torch.Tensor] = []  # for the other ones
        self.outputs: Sequence[Any] = ()
        self.replay: Callable[[], None] | None = None
        self.lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if self.runs_plainly or not is_capturable(inputs):
            return self.function(*inputs)
        with self.lock:
            if not self.warm:
                return self._warm_up(inputs)
            fixed = [value.data_ptr() for value in inputs if _keeps_address(value)]
            moving = [value for value in inputs if not _keeps_address(value)]
            if self.replay is None or fixed != self.addresses:
                try:
                    self._capture(inputs, fixed, moving)
                except RuntimeError as error:
                    if not self.may_fail:
                        raise
                    self.runs_plainly = True
                    logger.warning("CUDA graphs: a forward cannot be captured, running without them: %s", error)
                    return self.function(*inputs)
            assert self.replay is not None
            for buffer, value in zip(self.buffers, moving, strict=True):
                buffer.copy_(value)
            self.replay()
            return _copies(self.outputs) if self.keeps_outputs else tuple(self.outputs)

    def _warm_up(self, inputs: Sequence[Any]) -> Sequence[Any]:
        moving = [value for value in inputs if not _keeps_address(value)]
        # tensors of inference mode count no versions
        before = [value.clone() if value.is_inference() else value._version for value in moving]
        outputs = self.function(*inputs)
        self.warm, self.runs_plainly = True, not all(map(_is_as_before, moving, before))
        if self.runs_plainly:
            logger.warning("CUDA graphs: a step writes into a tensor that is new each time: running without them")
        return outputs

    def _capture(self, inputs: Sequence[Any], fixed: list[int], moving: list[torch.Tensor]) -> None:
        self.replay, self.outputs = None, ()  # free the memory of an older graph
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = [torch.empty_like(value).copy_(value) for value in moving]
        buffers = iter(self.buffers)
        operands = [value if _keeps_address(value) else next(buffers) for value in inputs]
        self.outputs, self.replay = record(self.function, operands)
        self.addresses = fixed
        logger.debug("captured a CUDA graph with %d copied inputs", len(moving))


def _copies(values: Sequence[Any]) -> Sequence[Any]:
    return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)


def _is_as_before(value: torch.Tensor, before: torch.Tensor | int) -> bool:
    """Whether nothing has been written into a tensor since it was copied, or had that version."""
    if isinstance(before, int):
        return value._version == before
    return torch.equal(value, before)


def record(function: Function, inputs: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Callable[[], None]]:
    """Capture ``function(*inputs)`` without executing it; its outputs-to-be, and what executes it.

    Where the capture fails, what torch leaves behind is put right before the error is raised.
    """
    graph, device, pool = torch.cuda.CUDAGraph(), inputs[0].device, torch.cuda.graph_pool_handle()
    # torch's own stream for captures is on the device that captured first
    capturing = torch.cuda.graph(graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local")
    # the inner stream context is not left where ending the capture raises, the outer one is
    with _one_at_a_time, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        broken: RuntimeError | None = None
        try:
            with _own_workspaces(), capturing:
                try:
                    outputs = function(*inputs)
                except RuntimeError as error:
                    broken = error
                    raise
        except RuntimeError:
            if not _has_ended(graph):
                _after_failure(graph, device, pool)
            if broken is not None:  # ending a capture that the function broke raises as well, and says less
                raise broken from None
            raise
    return outputs, graph.replay


_one_at_a_time = threading.RLock()  # captures share a stream


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Products of matrices take their workspaces from the pool of the graph that is captured within the block.

    torch keeps workspaces by stream. What an older graph's capture had allocated would be taken again, and go when that
    graph is gone and somebody, inductor for example, clears workspaces: the new graph would still write there.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether its capture came to a good end, whatever else failed."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


_failed_graphs: list[torch.cuda.CUDAGraph] = []  # torch's allocators may still ask them what they captured


def _after_failure(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """A capture that CUDA broke off: torch still serves allocations from its pool and random numbers as within it."""
    _failed_graphs.append(graph)
    with contextlib.suppress(AttributeError, RuntimeError):  # before torch 2.8; where nothing was served from it
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    with torch.cuda.stream(_stream(device)):
        number = torch.zeros((), device=device)
    # one that ends well lets the generator out
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_stream(device), capture_error_mode="thread_local"):
        number += 1


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def is_capturable(inputs: Sequence[Any]) -> bool:
    """Whether all inputs are tensors on one GPU and nobody else is capturing."""
    are_tensors = bool(inputs) and all(isinstance(value, torch.Tensor) for value in inputs)
    if are_tensors and inputs[0].device.type == "cuda" and len({value.device for value in inputs}) == 1:
        return not torch.cuda.is_current_stream_capturing()
    _say_once()
    return False


@functools.cache
def _say_once() -> None:
    logger.warning("CUDA graphs need steps whose inputs are tensors, all on one GPU: running without them")


def _keeps_address(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None
