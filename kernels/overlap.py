"""A kernel that begins while the one before it ends: programmatic dependent launch, on NVIDIA's GPUs from Hopper on.

What a step prepares takes a few microseconds, in which most of the GPU waits. The kernel behind it may take the places
that are free meanwhile and read what no kernel changes any more; it waits where it needs the results.
"""

from functools import cache

import torch
import triton
import triton.language as tl

__all__ = ["launch_next", "overlapping", "wait_for_previous"]


@cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """What to launch a kernel with that begins early; nothing where the GPU or Triton cannot do it."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return {}
    from triton.backends.nvidia.compiler import CUDAOptions  # not in every build of Triton

    return {"launch_pdl": True} if hasattr(CUDAOptions, "launch_pdl") else {}


@triton.jit
def launch_next() -> None:
    """The kernel behind this one may begin once every program of this one has come here."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous() -> None:
    """Until the kernel before this one has ended and what it wrote can be read."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
