"""Models that accelerate spread over GPUs: compiled steps go through its hooks in one graph.

accelerate hides its hooks from the compiler, because one that loads offloaded weights cannot be compiled. The graph
then breaks at every module. Hooks that only move inputs and outputs are shown to it here; they do what they did.
"""

import types
from typing import Any

__all__ = ["hide_hooks", "show_hooks"]

METHODS = ("pre_forward", "post_forward")


def show_hooks(module: Any) -> bool:
    """Let the compiler trace this module's hook, if it has one that only moves tensors; whether it has."""
    hooks = _parts(module.__dict__.get("_hf_hook"))
    if not hooks or not all(_only_moves(hook) for hook in hooks):
        return False
    for hook in (module._hf_hook, *hooks):
        for name in METHODS:
            if name not in vars(hook):
                setattr(hook, name, types.MethodType(_visible(hook, name), hook))
    return True


def hide_hooks(module: Any) -> None:
    """Undo `show_hooks`."""
    hook = module.__dict__.get("_hf_hook")
    for part in (hook, *_parts(hook)):
        for name in METHODS:
            own = vars(part).get(name) if part is not None else None
            if own is not None and getattr(own, "__func__", None) is _visible(part, name):
                delattr(part, name)


def _parts(hook: Any) -> tuple[Any, ...]:
    """The hooks that a hook consists of; itself, where it is one of its own."""
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def _only_moves(hook: Any) -> bool:
    from accelerate.hooks import AlignDevicesHook

    return type(hook) is AlignDevicesHook and not hook.offload


def _visible(hook: Any, name: str) -> Any:
    """The function behind what hides it."""
    function = getattr(type(hook), name)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
