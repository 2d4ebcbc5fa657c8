"""Mamba-2 (Nemotron-H): replay step, fold and scan."""
