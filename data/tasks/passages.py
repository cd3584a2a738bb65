"""Passages that repeat, which induction heads copy."""

import numpy as np
import torch
from torch import Tensor

from config import DataConfig
from data.tasks.markov import walk
from data.tasks.task import Predictions, Reading, Sequences, Task, read_previous_token

# Tokens before a query of the sink metrics. Among fewer, any head has much weight on the first one.
MIN_SINK_CONTEXT = 5


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

    def read(self, p: Predictions) -> dict[str, Reading]:
        """Return the readings of repeated passages.

        - `first_loss`: of tokens of the first passage, except its first one.
        - `repeated_loss`, `repeated_accuracy`: of tokens that can be copied.
        - `induction`: weight of a repeated token on those that followed its earlier copies.
        - `previous_token`: weight on the token before.
        - `sink_nothing_to_find`, `attention_sum_nothing_to_find`: weight on the begin symbol, and
          sum of all weights, of tokens that occur for the first time.
        - `sink_something_to_find`: weight of a repeated token on the begin symbol.

        The last three are those of the strongest induction head.
        """
        periods = find_periods(p.symbols, self.data)[:, None]  # (n, 1)
        t = torch.arange(p.symbols.shape[1], device=periods.device)  # (T,)
        is_first, is_repeated = t < periods - 1, t >= periods  # (n, T)
        distance = t[:, None] - t  # from query to key, (T, T)
        is_next = (distance > 0) & (t > 0)  # no token comes before the first key
        is_next = is_next & ((distance + 1) % periods[:, :, None] == 0)  # (n, T, T)
        readings = {
            "first_loss": Reading(p.loss, is_first),
            "repeated_loss": Reading(p.loss, is_repeated),
            "repeated_accuracy": Reading(p.is_correct, is_repeated),
            "induction": Reading((p.weights * is_next).sum(-1), is_repeated),
            "previous_token": read_previous_token(p.weights),
        }
        if p.begin_weights is not None:
            is_same = p.symbols[:, :, None] == p.symbols[:, None, :]  # (n, T, T)
            occurred_before = (is_same & (distance > 0)).any(-1)  # (n, T)
            is_new = ~occurred_before & (t + 1 >= MIN_SINK_CONTEXT)
            attention_sum = p.weights.sum(-1) + p.begin_weights  # (L, H, n, T)
            readings |= {
                "sink_nothing_to_find": Reading(p.begin_weights, is_new, "induction"),
                "sink_something_to_find": Reading(p.begin_weights, is_repeated, "induction"),
                "attention_sum_nothing_to_find": Reading(attention_sum, is_new, "induction"),
            }
        return readings


def find_periods(symbols: Tensor, data: DataConfig) -> Tensor:
    """Return after how many symbols each row of (n, T) repeats, (n,)."""
    n, T = symbols.shape
    periods = torch.full((n,), data.max_period, device=symbols.device)
    for period in range(data.max_period - 1, data.min_period - 1, -1):
        repeats = (symbols[:, period:] == symbols[:, : T - period]).all(-1)
        periods[repeats] = period  # the shortest one is set last
    return periods
