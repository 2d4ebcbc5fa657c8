"""A cache for hybrid state-space models in Hugging Face transformers that keeps inputs instead of rewriting states."""

from importlib import metadata
from pathlib import Path

_root = Path(__file__).resolve().parent.parent
if (_root / "setup.cfg").is_file():  # a checkout: `kernels` and `patches` lie beside this package, not inside it
    __path__.append(str(_root))

from replay_transformers.cache import ReplayCache  # noqa: E402
from replay_transformers.config import ReplayConfig  # noqa: E402
from replay_transformers.patches.registry import disable, enable, is_enabled  # noqa: E402
from replay_transformers.samples import sample_model  # noqa: E402

try:
    __version__ = metadata.version("replay-transformers")
except metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

__all__ = ["ReplayCache", "ReplayConfig", "__version__", "disable", "enable", "is_enabled", "sample_model"]
