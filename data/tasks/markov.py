"""Markov chains, which statistical induction heads predict."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tasks.task import Predictions, Reading, Sequences, Task, read_previous_token

MIXING_STEPS = 64  # after which a Markov chain is close to its stationary distribution
# Strategies are compared after this share of a sequence, from which on they differ.
STRATEGY_START = 0.25


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

    def read(self, p: Predictions) -> dict[str, Reading]:
        """Return the readings of Markov chains.

        - `kl_<strategy>`: KL(strategy ‖ model) in nats, after a quarter of the sequence.
        - `previous_token`: in the first layer, weight on the token before.
        - `same_state`: in the last layer, weight on tokens that followed the current state, after a
          quarter of the sequence.
        """
        T, K = p.symbols.shape[1], self.data.num_symbols
        is_late = torch.arange(T, device=p.symbols.device) >= STRATEGY_START * T
        is_late = is_late.expand_as(p.symbols)  # (n, T)
        strategies = in_context_strategies(p.symbols, K, self.data.concentration)
        readings = {
            f"kl_{name}": Reading(divergence(strategy, p.log_p), is_late)
            for name, strategy in strategies.items()
        }
        same_state = (p.weights[-1] * follows_current_symbol(p.symbols)).sum(-1)  # (H, n, T)
        readings["previous_token"] = read_previous_token(p.weights[0])
        readings["same_state"] = Reading(same_state, is_late)
        return readings


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


def in_context_strategies(symbols: Tensor, K: int, pseudocount: float) -> dict[str, Tensor]:
    """Return what three strategies predict after each of K symbols in (n, T): (n, T, K) each.

    They are equal probabilities, and the frequencies so far of symbols (unigram) and after the
    current one (bigram). If the pseudocount is the chains' Dirichlet concentration, `bigram` is the
    optimal prediction.
    """
    is_symbol = F.one_hot(symbols, K).float()  # (n, T, K)
    unigram = is_symbol.cumsum(1) + pseudocount
    bigram = follows_current_symbol(symbols).float() @ is_symbol + pseudocount
    return {
        "uniform": torch.full_like(unigram, 1 / K),
        "unigram": unigram / unigram.sum(-1, keepdim=True),
        "bigram": bigram / bigram.sum(-1, keepdim=True),
    }


def follows_current_symbol(symbols: Tensor) -> Tensor:
    """Return whether key j ≤ i came right after a copy of symbol i, for (n, T): (n, T, T)."""
    previous = F.pad(symbols[:, :-1], (1, 0), value=-1)  # (n, T)
    return (previous[:, None, :] == symbols[:, :, None]).tril()


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) in nats, for probabilities p and logarithms of q, (…, symbols) each."""
    return (torch.xlogy(p, p) - p * log_q).sum(-1)
