"""Generated tasks: each draws its sequences and measures how a model solves it."""
