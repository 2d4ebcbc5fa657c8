"""Which classes of transformers are patched with what, and the switch: `enable`, `disable`, `is_enabled`.

A new model family is a file in this folder, a line in `MIXERS` and one in `DECODERS`. Nothing of transformers is
touched at import.
"""

import functools
import importlib
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from replay_transformers.patches import guard, placement
from replay_transformers.patches.versions import require_supported_version

__all__ = ["MIXERS", "ReplayHandle", "disable", "enable", "is_enabled", "patched_attributes"]

# module of transformers.models, class of the state-space mixer -> module in this folder
MIXERS: dict[tuple[str, str], str] = {
    ("qwen3_5.modeling_qwen3_5", "Qwen3_5GatedDeltaNet"): "qwen3_5",
    ("qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"): "qwen3_5",
    ("qwen3_next.modeling_qwen3_next", "Qwen3NextGatedDeltaNet"): "qwen3_next",
    ("nemotron_h.modeling_nemotron_h", "NemotronHMamba2Mixer"): "nemotron_h",
}

# module of transformers.models, class of the decoder that runs the layers: checked before its first layer
DECODERS: tuple[tuple[str, str], ...] = (
    ("qwen3_5.modeling_qwen3_5", "Qwen3_5TextModel"),
    ("qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeTextModel"),
    ("qwen3_next.modeling_qwen3_next", "Qwen3NextModel"),
    ("nemotron_h.modeling_nemotron_h", "NemotronHModel"),
)

_ABSENT = object()


@dataclass
class _Patches:
    """Everything that is replaced while the patches are on, and how to put it back."""

    replaced: list[tuple[Any, str, Any]] = field(default_factory=list)
    forwards: dict[type, tuple[Any, Any]] = field(default_factory=dict)  # class -> (original, patched) forward
    rebound: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # modules that hold a forward of their own
    shown: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # accelerate's hooks that the compiler sees
    settings: Any = None

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def replace_forward(self, name: tuple[str, str], wrap: Callable[[Any], Any]) -> None:
        cls = getattr(importlib.import_module(f"transformers.models.{name[0]}"), name[1])
        original = vars(cls)["forward"]
        self.forwards[cls] = (original, wrap(original))
        self.replace(cls, "forward", self.forwards[cls][1])

    def undo(self) -> None:
        for module in list(self.rebound):
            original, patched = self.forwards[type(module)]
            bound, own = module.__dict__.get("_old_forward"), module.__dict__.get("forward")
            if getattr(bound, "__func__", None) is patched:
                module._old_forward = types.MethodType(original, module)
            if getattr(own, "__func__", None) is patched:  # what a hook left behind when it was removed
                del module.__dict__["forward"]
            function = getattr(own, "_replay_diverted", None)
            if function is not None:
                is_function = isinstance(function, types.FunctionType)
                module.__dict__["forward"] = types.MethodType(function, module) if is_function else function
        for hook in list(self.shown):
            placement.hide_hook(hook)
        for owner, name, original in reversed(self.replaced):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        if self.settings is not None:  # None if applying the patches failed at its very start
            self.settings.pool.clear()
            self.settings.forwards.clear()
            importlib.import_module("replay_transformers.patches.mtp").forget_heads()


_lock = threading.RLock()
_active: _Patches | None = None


class ReplayHandle:
    """What `enable` returns: undo with `disable()`, or use it as a context manager.

    Leaving the `with` block restores what was before it: patches that were on already stay on.
    """

    def __init__(self, was_enabled: bool, was_default: bool) -> None:
        self._was_enabled = was_enabled
        self._was_default = was_default

    def disable(self) -> None:
        """Same as `replay_transformers.disable()`."""
        disable()

    def __enter__(self) -> "ReplayHandle":
        return self

    def __exit__(self, *exc_info: object) -> None:
        with _lock:
            if not self._was_enabled:
                disable()
            elif _active is not None:
                _active.settings.default = self._was_default


def is_enabled() -> bool:
    """Whether transformers is patched at the moment."""
    return _active is not None


def enable(default: bool = False) -> ReplayHandle:
    """Patch transformers so that supported models can use a replay cache. Idempotent.

    With the patches on, `generate` takes ``cache_implementation="replay"`` and ``"replay_static"``, and supported
    models run on a `ReplayCache`. Used with any other cache they behave to the bit as before.

    Args:
        default: let supported models use a growing replay cache in every `generate` call that does not ask for another
            cache (by `cache_implementation=`, a cache object, or `use_cache=False`). Each call sets it anew.

    Returns:
        A handle with `disable()`, usable as a context manager.

    Raises:
        NotImplementedError: a transformers version that is not supported.
    """
    global _active
    if not isinstance(default, bool):
        raise ValueError(f"default must be True or False, got {default!r}")
    with _lock:
        was_enabled = _active is not None
        was_default = was_enabled and _active.settings.default  # type: ignore[union-attr]
        if _active is None:
            require_supported_version()
            patches = _Patches()
            try:
                _apply(patches)
            except BaseException:
                patches.undo()
                raise
            _active = patches
            guard.switch(True)
        _active.settings.default = default
        return ReplayHandle(was_enabled, was_default)


def disable() -> None:
    """Put every replaced attribute of transformers back, however often `enable` ran, and free pooled caches."""
    global _active
    with _lock:
        if _active is not None:
            guard.switch(False)
            _active.undo()
            _active = None


def patched_attributes() -> list[tuple[Any, str]]:
    """``(owner, attribute name)`` of everything replaced at the moment; empty if the patches are off."""
    return [] if _active is None else [(owner, name) for owner, name, _ in _active.replaced]


def _apply(patches: _Patches) -> None:
    from transformers import PreTrainedModel
    from transformers.generation import configuration_utils, utils

    from replay_transformers.patches import assisted, attention, compiled, generate, mixer, stop_check

    patches.settings = generate.GenerateSettings(prepare_model=functools.partial(_prepare_model, patches))
    for name, patch_name in MIXERS.items():
        patch = importlib.import_module(f"replay_transformers.patches.{patch_name}")
        patches.replace_forward(name, functools.partial(mixer.divert, patch.replay_forward, patch.geometry))
    for name in DECODERS:
        patches.replace_forward(name, guard.guard)
        models = importlib.import_module(f"transformers.models.{name[0]}")
        table = models.ALL_ATTENTION_FUNCTIONS
        patches.replace(models, "ALL_ATTENTION_FUNCTIONS", attention.ReplayAttentionInterface(table))

    stateful = [assisted.stateful_class(getattr(sys.modules[f"transformers.models.{m}"], name)) for m, name in DECODERS]
    families = tuple(cls for cls in stateful if cls is not None)
    for cls in families:
        patches.replace(cls, "_is_stateful", False)
    patches.replace(
        PreTrainedModel,
        "get_compiled_call",
        compiled.wrap_get_compiled_call(vars(PreTrainedModel)["get_compiled_call"]),
    )
    mixin = utils.GenerationMixin
    patches.replace(mixin, "generate", generate.wrap_generate(vars(mixin)["generate"], patches.settings))
    prepare = "_prepare_cache_for_generation"
    patches.replace(mixin, prepare, generate.wrap_prepare_cache(vars(mixin)[prepare], patches.settings))
    for method, wrap in assisted.wrappers(patches.settings, families).items():
        patches.replace(mixin, method, wrap(vars(mixin)[method]))
    sampling = "_speculative_sampling"
    patches.replace(utils, sampling, assisted.wrap_speculative_sampling(vars(utils)[sampling], patches.settings))
    if hasattr(utils, "DeferredStopCheck"):
        check = utils.DeferredStopCheck
        patches.replace(check, "is_supported", staticmethod(stop_check.wrap_is_supported(check.is_supported)))
    for module in (configuration_utils, utils):
        for listed, additions in (
            ("ALL_CACHE_IMPLEMENTATIONS", generate.CACHE_NAMES),
            ("ALL_STATIC_CACHE_IMPLEMENTATIONS", (generate.STATIC_NAME,)),
        ):
            if hasattr(module, listed):
                patches.replace(module, listed, (*getattr(module, listed), *additions))


def _prepare_model(patches: _Patches, model: Any) -> None:
    """Patch the modules of ``model`` that hold a forward of their own, and show the compiler what moves tensors.

    accelerate's hooks keep the forward they found as `_old_forward`; hub kernels set `forward` on the instance.
    """
    with _lock:
        for module in model.modules():
            if "_hf_hook" in module.__dict__:
                patches.shown.update(placement.show_hook(module))
            if type(module) not in patches.forwards:
                continue
            original, patched = patches.forwards[type(module)]
            bound, own = module.__dict__.get("_old_forward"), module.__dict__.get("forward")
            if bound is not None:
                if getattr(bound, "__func__", None) is original:
                    module._old_forward = types.MethodType(patched, module)
            elif own is not None and not hasattr(own, "_replay_diverted"):
                module.__dict__["forward"] = _divert_instance(patched, own, module)
            else:
                continue
            patches.rebound.add(module)


def _divert_instance(patched: Any, own: Any, module: Any) -> Any:
    """An instance's own forward, except on a replay cache; a bound method, so that copies of the module get theirs."""
    function = own.__func__ if getattr(own, "__self__", None) is module else None

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if guard.replay_cache_of(args, kwargs) is not None:
            return patched(self, *args, **kwargs)
        return own(*args, **kwargs) if function is None else function(self, *args, **kwargs)

    del forward.__wrapped__  # it would hold the module, in every copy
    forward._replay_diverted = own if function is None else function  # type: ignore[attr-defined]
    return types.MethodType(forward, module)
