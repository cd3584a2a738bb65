"""Generate text from a model: the KV cache, the cached decoder, drawing tokens, scoring."""

from generation.decoder import KVCache
from generation.sampling import generate

__all__ = ["KVCache", "generate"]
