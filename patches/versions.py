"""The only place that knows which transformers this package works with, and what differs between them."""

from typing import Any

import transformers
from packaging.version import Version
from transformers.cache_utils import Cache

__all__ = ["CACHE_ARGUMENTS", "FIRST", "LAST", "cache_argument", "generate_cache_name", "require_supported_version"]

FIRST, LAST = Version("5.17.0"), Version("5.24")  # LAST: the newest minor release that was tested

# names under which models and mixers take their cache: `cache` since 5.24
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def require_supported_version() -> None:
    """Raise NotImplementedError unless the installed transformers is one this package was tested with."""
    installed = Version(transformers.__version__)
    if installed < FIRST or (installed.major, installed.minor) > (LAST.major, LAST.minor):
        raise NotImplementedError(
            f"replay_transformers supports transformers {FIRST} to {LAST}.x, found {installed}: install "
            f'"transformers>={FIRST},<{LAST.major}.{LAST.minor + 1}"'
        )


def generate_cache_name() -> str:
    """Under which name `generate` passes its cache on to the model."""
    return "cache" if Version(transformers.__version__) >= Version("5.24.0") else "past_key_values"


def cache_argument(arguments: dict[str, Any]) -> Cache | None:
    """The cache among the keyword arguments of a forward or of `generate`, whatever it is called."""
    for name in CACHE_ARGUMENTS:
        if arguments.get(name) is not None:
            return arguments[name]
    return None
