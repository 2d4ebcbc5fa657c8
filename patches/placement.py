"""Models that accelerate spread over GPUs: compiled steps go through its hooks in one graph.

accelerate hides its hooks from the compiler, because one that loads offloaded weights cannot be compiled. The graph
then breaks at every module. Hooks that only move inputs and outputs are shown to it here; they do what they did.
"""

import types
from typing import Any

__all__ = ["hide_hook", "is_on_one_device", "parts_of", "show_hook"]

METHODS = ("pre_forward", "post_forward")


def show_hook(module: Any) -> list[Any]:
    """Let the compiler trace this module's hook, if it has one that only moves tensors: the hooks that it then sees."""
    hooks = parts_of(module)
    if not all(_only_moves(hook) for hook in hooks):
        return []
    for hook in hooks:
        for name in METHODS:
            if name not in vars(hook):
                setattr(hook, name, types.MethodType(_visible(hook, name), hook))
    return hooks


def hide_hook(hook: Any) -> None:
    """Hide one of the hooks again that `show_hook` returned."""
    for name in METHODS:
        if getattr(vars(hook).get(name), "__func__", None) is _visible(hook, name):
            delattr(hook, name)


def is_on_one_device(model: Any) -> bool:
    """Whether one device has all of a model's weights, and the model is not shared by several processes."""
    devices = {parameter.device for parameter in model.parameters()}
    return len(devices) == 1 and devices.pop().type != "meta" and getattr(model, "tp_size", None) is None


def parts_of(module: Any) -> list[Any]:
    """The hook that accelerate has put on a module, and those that it is made of."""
    found, waiting = list[Any](), [module.__dict__.get("_hf_hook")]
    while waiting:
        hook = waiting.pop()
        if hook is not None:
            found.append(hook)
            waiting += getattr(hook, "hooks", ())
    return found


def _only_moves(hook: Any) -> bool:
    from accelerate.hooks import AlignDevicesHook, SequentialHook

    return type(hook) is SequentialHook or (type(hook) is AlignDevicesHook and not hook.offload)


def _visible(hook: Any, name: str) -> Any:
    """The function behind what hides it."""
    function = getattr(type(hook), name)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
