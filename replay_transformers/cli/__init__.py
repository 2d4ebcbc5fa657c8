"""The command line: `replay-transformers demo`, `... generate MODEL` and `... check MODEL`."""

from replay_transformers.cli.app import main

__all__ = ["main"]
