"""Which classes of transformers are patched with what, and the switch: `enable`, `disable`, `is_enabled`.

A new model family is a file in this folder and a line in `MIXERS`. Nothing of transformers is touched at import.
"""

import functools
import importlib
import logging
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

from replay_transformers.patches.versions import require_supported_version

__all__ = ["MIXERS", "ReplayHandle", "disable", "enable", "is_enabled", "patched_attributes"]

logger = logging.getLogger(__name__)

# module of transformers.models, class of the state-space mixer -> module in this folder
MIXERS: dict[tuple[str, str], str] = {
    ("qwen3_5.modeling_qwen3_5", "Qwen3_5GatedDeltaNet"): "qwen3_5",
    ("qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"): "qwen3_5",
    ("qwen3_next.modeling_qwen3_next", "Qwen3NextGatedDeltaNet"): "qwen3_next",
    ("nemotron_h.modeling_nemotron_h", "NemotronHMamba2Mixer"): "nemotron_h",
}

_ABSENT = object()


@dataclass
class _Patches:
    """Everything that is replaced while the patches are on, and how to put it back."""

    replaced: list[tuple[Any, str, Any]] = field(default_factory=list)
    forwards: dict[type, tuple[Any, Any]] = field(default_factory=dict)  # mixer class -> (original, patched)
    rebound: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # mixers that hold a forward of their own
    settings: Any = None

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        for mixer in list(self.rebound):
            original, patched = self.forwards[type(mixer)]
            bound, own = mixer.__dict__.get("_old_forward"), mixer.__dict__.get("forward")
            if getattr(bound, "__func__", None) is patched:
                mixer._old_forward = types.MethodType(original, mixer)
            if getattr(own, "_replay_diverted", False):
                mixer.__dict__["forward"] = own.__wrapped__
        for owner, name, original in reversed(self.replaced):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self.settings.pool.clear()


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
        _active.settings.default = default
        return ReplayHandle(was_enabled, was_default)


def disable() -> None:
    """Put every replaced attribute of transformers back, however often `enable` ran, and free pooled caches."""
    global _active
    with _lock:
        if _active is not None:
            _active.undo()
            _active = None


def patched_attributes() -> list[tuple[Any, str]]:
    """``(owner, attribute name)`` of everything replaced at the moment; empty if the patches are off."""
    return [] if _active is None else [(owner, name) for owner, name, _ in _active.replaced]


def _apply(patches: _Patches) -> None:
    from transformers.generation import configuration_utils, utils

    from replay_transformers.patches import generate, mixer

    patches.settings = generate.GenerateSettings(prepare_model=functools.partial(_rebind_instances, patches))
    for (module_name, class_name), patch_name in MIXERS.items():
        cls = getattr(importlib.import_module(f"transformers.models.{module_name}"), class_name)
        patch = importlib.import_module(f"replay_transformers.patches.{patch_name}")
        original = vars(cls)["forward"]
        patches.forwards[cls] = (original, mixer.divert(original, patch.replay_forward, patch.geometry))
        patches.replace(cls, "forward", patches.forwards[cls][1])

    mixin = utils.GenerationMixin
    patches.replace(mixin, "generate", generate.wrap_generate(vars(mixin)["generate"], patches.settings))
    name = "_prepare_cache_for_generation"
    patches.replace(mixin, name, generate.wrap_prepare_cache(vars(mixin)[name], patches.settings))
    for module in (configuration_utils, utils):
        for name, additions in (
            ("ALL_CACHE_IMPLEMENTATIONS", generate.CACHE_NAMES),
            ("ALL_STATIC_CACHE_IMPLEMENTATIONS", (generate.STATIC_NAME,)),
        ):
            if hasattr(module, name):
                patches.replace(module, name, (*getattr(module, name), *additions))


def _rebind_instances(patches: _Patches, model: Any) -> None:
    """Patch the mixers of ``model`` that hold a forward of their own.

    accelerate's hooks keep the forward they found as `_old_forward`; hub kernels set `forward` on the instance.
    """
    with _lock:
        for mixer in model.modules():
            if type(mixer) not in patches.forwards:
                continue
            original, patched = patches.forwards[type(mixer)]
            bound, own = mixer.__dict__.get("_old_forward"), mixer.__dict__.get("forward")
            if bound is not None:
                if getattr(bound, "__func__", None) is original:
                    mixer._old_forward = types.MethodType(patched, mixer)
            elif own is not None and not getattr(own, "_replay_diverted", False):
                mixer.__dict__["forward"] = _divert_instance(patched, own, mixer)
            else:
                continue
            patches.rebound.add(mixer)


def _divert_instance(patched: Any, own: Any, mixer: Any) -> Any:
    """An instance's own forward, except on a replay cache."""
    from replay_transformers.cache import ReplayCache
    from replay_transformers.patches.versions import cache_argument

    reference = weakref.ref(mixer)

    @functools.wraps(own)
    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        cache = args[0] if args else cache_argument(kwargs)
        if isinstance(cache, ReplayCache):
            return patched(reference(), hidden_states, *args, **kwargs)
        return own(hidden_states, *args, **kwargs)

    forward._replay_diverted = True  # type: ignore[attr-defined]
    return forward
