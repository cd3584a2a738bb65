"""Look into a model: measure what each attention head does."""
