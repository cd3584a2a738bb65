"""Generate text from a model: the cached decoder, drawing tokens, scoring."""

from generation.sampling import generate

__all__ = ["generate"]
