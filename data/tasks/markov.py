"""Markov chains, which statistical induction heads predict."""

import numpy as np

from data.tasks.task import Sequences, Task

MIXING_STEPS = 64  # after which a Markov chain is close to its stationary distribution


class MarkovChains(Task):
    """Draw Markov chains, each with Dirichlet transition probabilities of its own.

    The first state follows the stationary distribution.

    Reference: Edelman et al. 2024, "The Evolution of Statistical Induction Heads".
    """

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        K = self.data.num_symbols
        transitions = random.dirichlet(np.full(K, self.data.concentration), size=(n, K))
        stationary = np.linalg.matrix_power(transitions, MIXING_STEPS).mean(1)  # (n, K)
        first = (random.random((n, 1)) > stationary.cumsum(-1)[:, :-1]).sum(-1)
        tokens = walk(first, transitions, self.length + 1, random)
        return Sequences(tokens, np.ones((n, self.length), bool))


def walk(
    first: np.ndarray, transitions: np.ndarray, length: int, random: np.random.Generator
) -> np.ndarray:
    """Return Markov chains (n, length) from states (n,), transitions (K, K) or (n, K, K)."""
    n, K = len(first), transitions.shape[-1]
    thresholds = np.broadcast_to(transitions.cumsum(-1)[..., :-1], (n, K, K - 1))
    uniform = random.random((length, n, 1))
    states = np.empty((length, n), np.int64)
    states[0], rows = first, np.arange(n)
    for t in range(1, length):
        states[t] = (uniform[t] > thresholds[rows, states[t - 1]]).sum(-1)
    return states.T
