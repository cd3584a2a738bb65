"""Passages that repeat, which induction heads copy."""

import numpy as np

from data.tasks.markov import walk
from data.tasks.task import Sequences, Task


class Passages(Task):
    """Repeat a passage of `min_period` to `max_period` symbols until the sequence is full.

    A passage is a Markov chain with transitions that are fixed for the run, so what follows a
    symbol can be guessed at first, and is certain once the passage has come before.

    Reference: cf. Olsson et al. 2022, "In-context Learning and Induction Heads".
    """

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        V = self.data.num_symbols
        # Each symbol has a few usual successors
        transitions = self.rules.exponential(size=(V, V)) ** 2
        transitions /= transitions.sum(-1, keepdims=True)
        period = random.integers(self.data.min_period, self.data.max_period + 1, size=(n, 1))
        first = random.integers(V, size=n)
        passages = walk(first, transitions, self.data.max_period, random)  # (n, max_period)
        tokens = np.take_along_axis(passages, np.arange(self.length + 1) % period, axis=1)
        return Sequences(tokens, np.ones((n, self.length), bool))
