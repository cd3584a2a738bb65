"""Explore any model in a browser: a local server that runs the model for its page."""
