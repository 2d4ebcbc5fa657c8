"""Kinds of faults that others have reported about caches of this sort: one file per kind, at the phases of the ring."""
