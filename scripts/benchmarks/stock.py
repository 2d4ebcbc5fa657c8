"""Which functions stock transformers' decoding calls, and a refusal to time it on slow ones.

A modeling file looks for packages once, when it is imported: ``fla`` (flash-linear-attention) for Qwen3.5,
``mamba_ssm`` for Nemotron-H, ``causal_conv1d`` for both. What it does not find it replaces by plain PyTorch, with one
line in the log. mamba-ssm has no wheel, and its package imports a compiled extension that only training needs; its
Triton kernels import without, so `provide_mamba_ssm` puts them in place from a folder of its sources.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch

from replay_transformers.geometry import LayerGeometry
from replay_transformers.kernels.gated_delta import reach as gated_delta
from replay_transformers.kernels.launch import on_their_device
from replay_transformers.kernels.mamba2 import reach as mamba2

MAMBA_SSM, SCAN = "mamba_ssm", "mamba_chunk_scan_combined"
NEMOTRON = "transformers.models.nemotron_h.modeling_nemotron_h"


@dataclass(frozen=True)
class FastPath:
    """How a family's fast path is recognised.

    Args:
        functions: role -> name in the modeling file. "decode" must be fast, the others are reported.
        package: where "decode" has to come from.
        kernel: part of the name of the GPU kernel that a decode step has to launch.
    """

    functions: dict[str, str]
    package: str
    kernel: str


_CONVOLUTION = {"convolution of a decode step": "causal_conv1d_update", "convolution of a prompt": "causal_conv1d_fn"}
_GATED_DELTA = FastPath(
    {"decode": "torch_recurrent_gated_delta_rule", "prompt": "torch_chunk_gated_delta_rule", **_CONVOLUTION},
    "fla",
    "fused_recurrent_gated_delta_rule",
)
_MAMBA2 = FastPath(
    {"decode": "mamba2_selective_state_update", "prompt": "mamba2_chunk_scan", **_CONVOLUTION},
    MAMBA_SSM,
    "selective_scan_update",
)
FAST_PATHS = {"qwen3_5_text": _GATED_DELTA, "qwen3_5_moe_text": _GATED_DELTA, "nemotron_h": _MAMBA2}


class SlowStockError(RuntimeError):
    """Stock would not run its fast kernels: a comparison with it would flatter."""


def provide_mamba_ssm(source: Path) -> None:
    """Make ``import mamba_ssm`` find the sources' Triton kernels and nothing else.

    Args:
        source: the sources' folder ``mamba_ssm``, or the file ``mamba_ssm/ops/triton/selective_state_update.py`` in it.

    Raises:
        SlowStockError: Nemotron-H's modeling file has been imported already, or the kernel does not import.
    """
    folder = source.resolve().parents[2] if source.is_file() else source.resolve()
    if NEMOTRON in sys.modules:
        raise SlowStockError(f"{NEMOTRON} is imported already, and has looked for {MAMBA_SSM}")
    spec = ModuleSpec(MAMBA_SSM, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[MAMBA_SSM] = module_from_spec(spec)
    for name in ("selective_state_update", "ssd_combined"):
        try:
            module = importlib.import_module(f"{MAMBA_SSM}.ops.triton.{name}")
        except ImportError as error:
            if name == "selective_state_update":
                del sys.modules[MAMBA_SSM]
                raise SlowStockError(f"{folder} does not give {MAMBA_SSM}.ops.triton.{name}: {error}") from error
            continue
        if hasattr(module, SCAN):
            # it launches a kernel on the current GPU, wherever the tensors are: wrong results on the second one
            setattr(module, SCAN, on_their_device(getattr(module, SCAN)))


def _implementation(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function of a modeling file calls: transformers keeps it in a variable of that name."""
    code = function.__code__
    if "implementation" not in code.co_freevars or function.__closure__ is None:
        raise SlowStockError(f"cannot tell what {function.__module__}.{function.__name__} calls in this transformers")
    implementation: Callable[..., Any] = function.__closure__[code.co_freevars.index("implementation")].cell_contents
    return implementation


def functions_called(model: Any) -> dict[str, str]:
    """By role, the full name of the function that the stock model calls."""
    path = FAST_PATHS[model.config.model_type]
    modeling = sys.modules[type(model).__module__]
    called = {role: _implementation(getattr(modeling, name)) for role, name in path.functions.items()}
    return {role: f"{function.__module__}.{function.__qualname__}" for role, function in called.items()}


def rows_at_once(functions: dict[str, str], geometries: Iterable[LayerGeometry], batch: int, prompt: int) -> int:
    """Rows of such prompts that stock's scans take; with more, kernels are not launched or reach beyond their tensors.

    Args:
        functions: as `functions_called` gives them.
        prompt: tokens.
    """
    package, most = functions["prompt"].split(".")[0], batch
    for geometry in set(geometries):
        if geometry.kind == "mamba2" and package == MAMBA_SSM:
            values, keys = geometry.heads * geometry.head_dim, geometry.groups * geometry.state_dim
            x, B, C = torch.empty(batch, prompt, geometry.conv_dim, device="meta").split([values, keys, keys], dim=-1)
            x = x.unflatten(-1, (geometry.heads, geometry.head_dim))
            B, C = (part.unflatten(-1, (geometry.groups, geometry.state_dim)) for part in (B, C))
            # time steps are a part of the projection, together with a gate and what is convolved
            projected = torch.empty(batch, prompt, values + geometry.conv_dim + geometry.heads, device="meta")
            rows, tokens = mamba2.reach(x, projected[..., -geometry.heads :], B, C)
        elif geometry.kind == "gated_delta" and package == "fla":
            q = torch.empty(batch, prompt, geometry.groups, geometry.state_dim, device="meta")
            v = torch.empty(batch, prompt, geometry.heads, geometry.head_dim, device="meta")
            rows, tokens = gated_delta.reach(q, q, v)
        else:
            continue
        most = min(most, rows if tokens == prompt else 0)
    return most


def require_fast(model: Any) -> dict[str, str]:
    """`functions_called`; raises `SlowStockError` unless decoding uses the fast package."""
    path, called = FAST_PATHS[model.config.model_type], functions_called(model)
    if called["decode"].split(".")[0] != path.package:
        hint = "pass --mamba-ssm-source" if path.package == MAMBA_SSM else "install flash-linear-attention"
        raise SlowStockError(
            f"stock decoding of {type(model).__name__} calls {called['decode']}, expected a function of "
            f"{path.package} ({_import_problem(path.package)}): {hint}, or pass --allow-slow-stock"
        )
    return called


def _import_problem(package: str) -> str:
    """Why transformers, which says nothing, may have passed a package over."""
    try:
        importlib.import_module(package)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "which imports, but may not have when transformers tried"


def require_kernel(model: Any, ran: Iterable[str]) -> None:
    """Raise `SlowStockError` unless the stock model's fast kernel is among the kernels that ran."""
    path, names = FAST_PATHS[model.config.model_type], sorted(ran)
    if not any(path.kernel in name for name in names):
        raise SlowStockError(f"no kernel named like {path.kernel!r} ran; these did: {names[:40]}")
