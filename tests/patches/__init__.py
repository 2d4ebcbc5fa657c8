"""Tests of what touches transformers."""
