"""A package, so that `tests.support` is always this folder's, whatever else is installed."""
