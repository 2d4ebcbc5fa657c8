"""Which implementation of an operator runs: the Triton kernels or the plain PyTorch reference."""

import functools
import importlib
import importlib.util
import logging
import os
import sys
from types import ModuleType

import torch
from packaging.version import Version

from replay_transformers.kernels.formats.stored import State

__all__ = ["LIBRARIES", "OLDEST_TRITON", "Implementations", "installed_triton"]

logger = logging.getLogger(__name__)

# operator -> the library whose kernels scan a prompt, where it is installed
LIBRARIES = {"gated_delta": "fla", "mamba2": "mamba_ssm"}
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU = "cuda"
OLDEST_TRITON = Version("3.5")  # older ones cannot compile the kernels: tuples, small products
_said: set[tuple[str, str]] = set()


def installed_triton() -> Version | None:
    """Triton's version; None if it is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return Version(importlib.import_module("triton").__version__)


class Implementations:
    """The implementations of an operator, and the choice among them.

    Args:
        operator: "mamba2", "gated_delta" or "causal_conv".
        impl: "auto", "reference" or "triton", as in `ReplayConfig`. "auto" takes Triton on a GPU unless gradients are
            asked for or a dtype is not one of Triton's (float64), and the reference elsewhere. "triton" runs on a CPU
            as well where Triton's interpreter is switched on (TRITON_INTERPRET=1).
        refusal: why the Triton kernels cannot run with the cache's settings; None if they can.
    """

    def __init__(self, operator: str, impl: str, refusal: str | None = None) -> None:
        self.operator, self.impl, self.refusal = operator, impl, refusal
        self.reference = importlib.import_module(f"replay_transformers.kernels.{operator}.reference")
        self.triton: ModuleType | None = None
        self.interpreted = impl == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        wanted = impl != "reference" and (torch.cuda.is_available() or self.interpreted)
        found = installed_triton() if wanted else None
        self.too_old = found is not None and found < OLDEST_TRITON
        if found is not None and not self.too_old:
            self.triton = importlib.import_module(f"replay_transformers.kernels.{operator}.triton")
        self.library: ModuleType | None = None
        if impl == "auto" and torch.cuda.is_available():
            self.library = _import_library(operator)

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None]]:
        return type(self), (self.operator, self.impl, self.refusal)  # modules cannot be pickled

    def choose(self, state: State, *operands: torch.Tensor) -> ModuleType:
        """The module whose functions run the operator on these tensors.

        Args:
            state: what the operator keeps. operands: the tokens' tensors.

        Raises:
            ValueError: impl is "triton" and it cannot run on them.
        """
        if self.impl == "reference":
            return self.reference
        refused = self._why_not_triton(state, operands)
        if refused is not None and self.impl == "triton":
            raise ValueError(f"impl='triton' cannot run here: {refused}; use impl='auto' or impl='reference'")
        if not torch.compiler.is_compiling():
            where = "on a GPU" if state.device.type == GPU else "in Triton's interpreter"
            self._say("reference" if refused is not None else "triton", refused or where)
        return self.reference if refused is not None or self.triton is None else self.triton

    def choose_scan(self, state: torch.Tensor, *operands: torch.Tensor) -> ModuleType:
        """The module whose `update` scans a prompt: a library's kernels, or the reference.

        The libraries compute in the activations' precision, as stock transformers does with them; for float32, for
        gradients and in compiled graphs it is always the reference.

        Args:
            state: what the operator keeps. operands: the tokens' tensors, activations first.
        """
        is_narrow = operands[0].dtype in (torch.bfloat16, torch.float16) and state.dtype != torch.float64
        wants_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
        if self.library is None or not is_narrow or wants_gradients or torch.compiler.is_compiling():
            return self.reference
        if state.device.type != GPU:
            return self.reference
        self._say(f"library {LIBRARIES[self.operator]}", "installed", what="prompts")
        return self.library

    def _why_not_triton(self, state: State, operands: tuple[torch.Tensor, ...]) -> str | None:
        if state.device.type != GPU and not self.interpreted:
            return f"the tensors are on {state.device}, not on a GPU"
        if self.too_old:
            return f"triton {OLDEST_TRITON} or newer is needed, found {installed_triton()}"
        if self.triton is None:
            return "triton is not installed"
        if self.refusal is not None:
            return self.refusal
        for tensor in (state, *operands):
            if isinstance(tensor, torch.Tensor) and tensor.dtype not in TRITON_DTYPES:
                return f"a tensor is {tensor.dtype}, and the kernels take float32, bfloat16 and float16"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
            return "gradients are enabled, and the kernels have none; torch.no_grad() switches them off"
        return None

    def _say(self, name: str, reason: str, what: str = "steps") -> None:
        if (self.operator, name) not in _said:
            _said.add((self.operator, name))
            logger.info("%s %s run on the %s implementation (%s)", self.operator, what, name, reason)


@functools.cache
def _import_library(operator: str) -> ModuleType | None:
    name = LIBRARIES.get(operator)
    if name is None or not (name in sys.modules or importlib.util.find_spec(name)):
        return None
    try:
        return importlib.import_module(f"replay_transformers.kernels.{operator}.library")
    except Exception as error:  # whatever a library built for another torch raises
        if (operator, name) not in _said:
            _said.add((operator, name))
            why = str(error)  # not the error: handlers that keep it would keep its frames, and a cache in one of them
            logger.warning("%s is installed and cannot be imported; prompts are scanned without it: %s", name, why)
        return None
