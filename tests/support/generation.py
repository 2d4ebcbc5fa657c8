"""What differs between versions of transformers in how `generate` takes and returns a cache."""

from typing import Any

import transformers
from packaging.version import Version

CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24.0") else "past_key_values"


def returned_cache(output: Any) -> Any:
    """The cache in the output of `generate(return_dict_in_generate=True)` or of a forward."""
    return output[CACHE_ARGUMENT]
