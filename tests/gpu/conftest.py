"""Equality of tokens is claimed in float32, in which flash-linear-attention multiplies by tf32: leave it out."""

import sys

sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
