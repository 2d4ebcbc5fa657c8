"""Gated DeltaNet (Qwen3.5, Qwen3-Next): replay step, fold and scan."""
