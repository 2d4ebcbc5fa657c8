"""Compiled forwards on a replay cache: a step that breaks off half-way is noticed, and many shapes may be compiled."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from replay_transformers.patches.guard import replay_cache_of

__all__ = ["wrap_get_compiled_call"]

# Graphs of one model: each batch size, length of a cache and length of a draft has its own. Dynamo's own limit, 8, is
# reached by two batch sizes with drafts; what is beyond it runs uncompiled.
MOST_GRAPHS = 64


def wrap_get_compiled_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PreTrainedModel.get_compiled_call`, whose forwards know what a replay cache needs."""

    @functools.wraps(original)
    def get_compiled_call(self: Any, compile_config: Any) -> Callable[..., Any]:
        compiled = original(self, compile_config)

        def call(*args: Any, **kwargs: Any) -> Any:
            cache = replay_cache_of(args, kwargs)
            if cache is None:
                return compiled(*args, **kwargs)
            before, limit = cache.cursor.forwards, torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, MOST_GRAPHS)
            try:
                return compiled(*args, **kwargs)
            except BaseException as error:
                # refusals and what the compiler raises come before anything is executed
                if isinstance(error, (ValueError, NotImplementedError, torch._dynamo.exc.TorchDynamoException)):
                    cache.note_broken_forward(before)
                else:
                    cache.cursor.broken = True
                raise
            finally:
                torch._dynamo.config.recompile_limit = limit

        return call

    return get_compiled_call
