"""Attention heads: measure what they do, and say what was measured."""
