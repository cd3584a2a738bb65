"""Measure what each attention head of a model does, and report it as findings."""
