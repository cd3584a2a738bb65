"""Generate text from a model: the KV cache, the cached decoder, drawing tokens, scoring."""
