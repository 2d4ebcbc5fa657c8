"""`generate(cache_implementation="replay" | "replay_static")`: builds, pools and checks the caches of a call."""

import dataclasses
import functools
import gc
import logging
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from replay_transformers.cache import ReplayCache
from replay_transformers.config import ReplayConfig
from replay_transformers.generation.row_forward import RowForward
from replay_transformers.geometry import FAMILIES, layer_geometries, text_config
from replay_transformers.patches.capture import with_own_backend
from replay_transformers.patches.placement import is_on_one_device
from replay_transformers.patches.pool import CachePool, Pool
from replay_transformers.patches.versions import cache_argument, generate_cache_name
from replay_transformers.ragged import width_for

__all__ = [
    "CACHE_NAMES",
    "STATIC_NAME",
    "GenerateSettings",
    "RunningCall",
    "borrow",
    "wrap_generate",
    "wrap_prepare_cache",
]

GROWING_NAME, STATIC_NAME = "replay", "replay_static"
CACHE_NAMES = (GROWING_NAME, STATIC_NAME)

logger = logging.getLogger(__name__)


@dataclass
class RunningCall:
    """A `generate` call that is under way.

    Args:
        borrowed: the caches lent to it: ``(model, key, cache)``.
        asked: num_assistant_tokens, if the call or the model's generation configuration has it.
        drafts: how many tokens its drafter proposes at most in one round; None without a drafter.
        most: how many tokens of a draft its cache can reject.
        limits: what drafts are cut to, once assisted decoding has begun (`patches/drafts.py`).
        seen: tokens that its cache held before assisted decoding began.
    """

    borrowed: list[tuple[Any, Hashable, ReplayCache]] = field(default_factory=list)
    asked: int | None = None
    drafts: int | None = None
    most: int = 0
    limits: Any = None
    seen: int = 0


@dataclass
class GenerateSettings:
    """What the wrapped functions share while the patches are on.

    Args:
        default: supported models use a replay cache unless the call asks for another one.
        prepare_model: called with the model before a replay cache is used with it.
        pool: idle caches. forwards: idle forwards of drafters.
    """

    default: bool = False
    prepare_model: Callable[[Any], None] = lambda model: None
    pool: CachePool = field(default_factory=CachePool)
    forwards: Pool[RowForward] = field(default_factory=Pool)
    calls: threading.local = field(default_factory=threading.local)

    def call(self, outer: bool = False) -> RunningCall:
        """The innermost `generate` call of this thread, or the one around it (an assistant's target)."""
        stack = getattr(self.calls, "stack", [])
        place = 2 if outer else 1
        return stack[-place] if len(stack) >= place else RunningCall()


def wrap_generate(original: Callable[..., Any], settings: GenerateSettings) -> Callable[..., Any]:
    """`GenerationMixin.generate` that gives the caches it borrowed back to the pool, unless the user got them."""

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        stack = settings.calls.__dict__.setdefault("stack", [])
        call = RunningCall(asked=_asked_tokens(self, args, kwargs))
        borrowed = call.borrowed
        stack.append(call)
        try:
            result = original(self, *args, **kwargs)
        finally:
            stack.pop()
        # reached only without an exception: what a broken-off call used is left to the garbage collector
        while borrowed:
            model, key, cache = borrowed.pop()
            # any reference beyond the variable and this argument is somebody who may still use the cache: the result,
            # a generator that has yet to run, a hook that kept a forward's output
            if sys.getrefcount(cache) > 2 and cache.is_compileable and isinstance(result, torch.Tensor):
                gc.collect()  # a compiler that traced this call leaves cycles; a new cache would mean new graphs
            if sys.getrefcount(cache) <= 2:
                settings.pool.give_back(model, key, cache)
        return result

    return generate


def _asked_tokens(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """num_assistant_tokens, before transformers fills it in with a default of its own."""
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    configs = [given, model.generation_config]
    values = [kwargs.get("num_assistant_tokens"), *(getattr(c, "num_assistant_tokens", None) for c in configs)]
    return next((value for value in values if value is not None), None)


def wrap_prepare_cache(original: Callable[..., Any], settings: GenerateSettings) -> Callable[..., Any]:
    """`GenerationMixin._prepare_cache_for_generation` that knows the replay caches."""

    @functools.wraps(original)
    def prepare(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rest = (generation_mode, batch_size, max_cache_length, *args)
        users_cache, call = cache_argument(model_kwargs), settings.call()
        if generation_config.is_assistant:
            _keep_own_settings(generation_config)
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if isinstance(users_cache, ReplayCache):
            _check_users_cache(self, users_cache, generation_config, max_cache_length)
            _check_drafter(call, generation_mode, users_cache.replay_config, rows)
            settings.prepare_model(self)
            generation_config.compile_config = with_own_backend(generation_config.compile_config)
            return original(self, generation_config, model_kwargs, *rest, **kwargs)
        name = generation_config.cache_implementation
        is_default = settings.default or generation_config.is_assistant
        if name is None and is_default and users_cache is None and _is_supported(self):
            name = GROWING_NAME
        if name not in CACHE_NAMES or users_cache is not None or generation_config.use_cache is False:
            asked = generation_config.cache_config
            if name is None and users_cache is None and _is_for_replay(asked) and _is_supported(self):
                logger.warning(
                    "cache_config=%s is not used without a cache_implementation: pass cache_implementation=%r or %r",
                    asked, *CACHE_NAMES,
                )  # fmt: skip
            return original(self, generation_config, model_kwargs, *rest, **kwargs)

        slots = _slots(generation_config.max_cache_len, max_cache_length) if name == STATIC_NAME else None
        cache = _borrow(self, settings, generation_config, rows, slots)
        _check_drafter(call, generation_mode, cache.replay_config, rows)
        generation_config.compile_config = with_own_backend(generation_config.compile_config)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[generate_cache_name()] = cache
        return None

    return prepare


def _slots(asked: int | None, needed: int) -> int:
    """Of a fixed cache: what was asked for, else rounded up, so that calls of similar length share one."""
    return max(asked, needed) if asked is not None else width_for(needed)


def _is_for_replay(settings: Any) -> bool:
    """Whether ``cache_config`` has a field of `ReplayConfig`; those of other caches are none of our business."""
    return isinstance(settings, dict) and any(field.name in settings for field in dataclasses.fields(ReplayConfig))


def _is_supported(model: Any) -> bool:
    """Whether a replay cache can be built for this model."""
    try:
        layer_geometries(model.config)
    except NotImplementedError:
        return False
    return True


def _keep_own_settings(generation_config: Any) -> None:
    """An assistant runs with a copy of its target's settings, but those of the target's cache are not for its own."""
    generation_config.cache_config = None
    if generation_config.cache_implementation in CACHE_NAMES:
        generation_config.cache_implementation = None


def _borrow(
    model: Any, settings: GenerateSettings, generation_config: Any, rows: int, max_cache_len: int | None
) -> ReplayCache:
    if text_config(model.config).model_type not in FAMILIES:
        raise NotImplementedError(
            f"cache_implementation={generation_config.cache_implementation!r} does not support "
            f"{type(model).__name__} (model type {text_config(model.config).model_type!r}); it supports "
            f"{sorted(FAMILIES)}"
        )
    # an assistant's cache is lent to the call that drafts with it, for all its rounds
    call = settings.call(outer=generation_config.is_assistant)
    asked = generation_config.cache_config
    replay_config = ReplayConfig.from_dict(asked)
    if call.drafts is not None:
        most = max(replay_config.max_draft, call.drafts + _spare(rows))
        replay_config = dataclasses.replace(replay_config, max_draft=most)
    elif not generation_config.return_dict_in_generate and "max_draft" not in (asked or {}):
        replay_config = dataclasses.replace(replay_config, max_draft=0)  # nobody can take a token back
    return borrow(model, settings, call, replay_config, rows, max_cache_len)


def borrow(
    model: Any,
    settings: GenerateSettings,
    call: RunningCall,
    replay_config: ReplayConfig,
    rows: int,
    max_cache_len: int | None = None,
) -> ReplayCache:
    """A cache for a model of a supported family, empty, from the pool or new; lent until the call is over."""
    settings.prepare_model(model)
    layers = text_config(model.config).num_hidden_layers  # fewer in an early exit
    key = (rows, replay_config, max_cache_len, model.dtype, model.device, layers)
    cache = settings.pool.take(model, key)
    if cache is None:
        cache = ReplayCache(model.config, replay_config, max_cache_len=max_cache_len)
        if max_cache_len is not None and is_on_one_device(model):
            cache.allocate(rows, model.dtype, model.device)
    call.borrowed.append((model, key, cache))
    return cache


def _spare(rows: int) -> int:
    """What a cache must be able to reject beside drafts: of several rows, those that are finished keep nothing."""
    return int(rows > 1)


def _check_drafter(call: RunningCall, generation_mode: Any, replay_config: ReplayConfig, rows: int) -> None:
    """Raise unless the call's drafter, if it has one, gets a cache that can take its drafts back."""
    if call.drafts is None:
        return
    if generation_mode != "assisted_generation":
        raise ValueError(
            "a drafter (assistant_model, prompt_lookup_num_tokens, ...) cannot be used with "
            f"{generation_mode.value!r}: speculation works with greedy decoding and sampling, so leave num_beams at 1"
        )
    needed = call.drafts + _spare(rows)
    if needed > replay_config.max_draft:
        more = f" (one more in a batch: {needed})" if _spare(rows) else ""
        raise ValueError(
            f"the drafter proposes up to {call.drafts} tokens at a time{more}, and this ReplayCache can reject only "
            f"max_draft={replay_config.max_draft}: build it with ReplayConfig(max_draft={needed})"
        )
    call.most = replay_config.max_draft


def _check_users_cache(model: Any, cache: ReplayCache, generation_config: Any, max_cache_length: int) -> None:
    if generation_config.cache_config is not None:
        raise ValueError(
            "cache_config is only for caches that generate builds; the ReplayCache passed here has its own settings "
            f"({cache.replay_config})"
        )
    cache.check_model(text_config(model.config))
    if cache.cursor.ragged:
        raise ValueError(
            "the rows of this cache have seen different numbers of tokens, and generate continues rows of one length: "
            "bring them to one length and call cache.join_rows(), or build a new cache"
        )
    if cache.max_cache_len is not None and max_cache_length > cache.max_cache_len:
        raise ValueError(
            f"this call may reach {max_cache_length} cached tokens, and the ReplayCache was built with "
            f"max_cache_len={cache.max_cache_len}: build a larger one or lower max_new_tokens"
        )
