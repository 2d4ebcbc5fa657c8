"""Whether all rows are finished is read one step late on a GPU, so that it need not wait for the host between steps.

transformers can do that since 5.24 but does it on Apple's GPUs alone: elsewhere every step ends with the host waiting
for the GPU, which then idles until the host has prepared the next step. On a replay cache that idle time would be a
fifth of a step at batch 256. The forward that runs in vain after the last token costs one step per call.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from replay_transformers.cache import ReplayCache

__all__ = ["wrap_is_supported"]


def wrap_is_supported(original: Callable[..., bool]) -> Callable[..., bool]:
    """`DeferredStopCheck.is_supported` that also says yes on CUDA, for a replay cache that nobody gets to see.

    A cache that is returned, or that the user passed in, would have to take that forward back: those keep to the check
    at once, and so do assistants, whose calls end after a few tokens.
    """

    @functools.wraps(original)
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        if isinstance(cache, ReplayCache) and device.type == "cuda":
            return not cache_is_returned and not is_assistant
        return original(device, cache, cache_is_returned, is_assistant)

    return is_supported
