"""Look inside a model: measure its attention heads, show them, and serve them live."""
