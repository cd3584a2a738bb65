"""Generated tasks: each draws the sequences on which a model is trained and validated."""
