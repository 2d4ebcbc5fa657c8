"""Causal depthwise convolution whose left context lives in a ring of raw inputs."""
