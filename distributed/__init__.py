"""Train with more than one process."""
