"""Measure what every attention head of a model does, and say it."""
