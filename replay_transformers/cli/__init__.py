"""The command line: `replay-transformers demo`, `replay-transformers generate MODEL`."""

from replay_transformers.cli.app import main

__all__ = ["main"]
