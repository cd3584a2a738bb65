"""Measure how a model solves the task of data=synthetic, on held-out sequences.

Each metric is a mean over tokens of all sequences; its standard error is that over sequences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.statistics import ratio
from config import DataConfig
from data.synthetic import Sequences, Task

if TYPE_CHECKING:
    from model import GPT

# Tokens of the sequences that are measured before the last step, such as 64 sequences of 64 tokens.
# For a model of 35,000 parameters this takes 7% of the time of 25 steps of 2,048 tokens.
MAX_TOKENS = 4096
MAX_VALUES = 1 << 25  # logits or attention weights computed at once: 128 MB in float32
# Tokens before a query of the sink metrics. Among fewer, any head has much weight on the first one.
MIN_SINK_CONTEXT = 5
# Strategies that learn from a sequence are compared after this share of it, when they differ.
STRATEGY_START = 0.25
NUM_FREQUENCIES = 6  # of modular addition; a trained model uses about five (Nanda et al. 2023)
# Metrics of the strongest induction head. Of other metrics, the highest value of any head is given.
SINK_METRICS = ("sink_nothing_to_find", "sink_something_to_find", "attention_sum_nothing_to_find")


@dataclass(frozen=True)
class Predictions:
    """Predictions and attention weights on n sequences of T tokens, without the begin symbol."""

    symbols: Tensor  # numbers of the symbols, from 0, (n, T)
    log_p: Tensor  # log probability of each symbol as the next token, (n, T, symbols)
    loss: Tensor  # in nats, (n, T)
    is_correct: Tensor  # whether the likeliest next token is the right one, (n, T)
    is_counted: Tensor  # whether the task counts the loss, (n, T)
    weights: Tensor  # attention of each token to each other, (L, H, n, T, T)
    begin_weights: Tensor | None  # attention to the begin symbol if there is one, (L, H, n, T)


class Reading(NamedTuple):
    """A value for each token, and whether it counts."""

    values: Tensor  # (…, n, T), with the dimensions of the heads first if it is one of heads
    is_counted: Tensor  # (n, T)


def measure_task(model: GPT, task: Task, is_last: bool = False) -> dict[str, float]:
    """Return `task/<name>` of a model, with the standard errors `task/<name>_se`.

    At the last step of a run all held-out sequences are measured, before it only some of them. The
    model's mode and torch's random state do not change.
    """
    max_sequences = None if is_last else max(1, MAX_TOKENS // task.block_size)
    metrics = measure_sequences(model, task, task.validation, max_sequences)
    if task.data.task == "modular":
        training = measure_sequences(model, task, task.training, max_sequences)
        metrics |= {f"train_{name}": value for name, value in training.items()}
        ids = torch.from_numpy(task.symbol_ids[: task.data.num_symbols])
        embeddings = model.token_embedding.weight.detach().cpu()[ids]
        metrics["fourier_share"] = fourier_share(embeddings)
    return {f"task/{name}": value for name, value in metrics.items()}


def measure_sequences(
    model: GPT, task: Task, sequences: Sequences, max_sequences: int | None = None
) -> dict[str, float]:
    """Return the metrics and errors of at most `max_sequences` sequences, spread evenly."""
    T, config = task.block_size, model.config
    n = len(sequences.tokens)
    chosen = np.linspace(0, n - 1, min(n, max_sequences or n)).round().astype(int)
    logits_per_row = T * len(model.head.weight)
    weights_per_row = config.n_layer * config.n_head * T * T
    rows = max(1, MAX_VALUES // max(logits_per_row, weights_per_row))
    sums, counts = defaultdict(list), defaultdict(list)
    for which in np.split(chosen, range(rows, len(chosen), rows)):
        batch = Sequences(sequences.tokens[which], sequences.is_counted[which])
        predictions = predict(model, task, batch)
        for name, (values, is_counted) in read(predictions, task).items():
            sums[name].append((values * is_counted).sum(-1).double())  # (…, n)
            counts[name].append(is_counted.sum(-1))  # (n,)
    return summarize(
        {name: torch.cat(parts, dim=-1).cpu().numpy() for name, parts in sums.items()},
        {name: torch.cat(parts).cpu().numpy() for name, parts in counts.items()},
    )


def summarize(sums: dict[str, np.ndarray], counts: dict[str, np.ndarray]) -> dict[str, float]:
    """Return means and errors from sums over each sequence (…, n) and numbers of tokens (n,)."""
    estimates = {name: ratio(sums[name], counts[name]) for name in sums}
    metrics: dict[str, float] = {}
    for name, (mean, error) in estimates.items():
        by_head, _ = estimates["induction" if name in SINK_METRICS else name]
        strongest = np.unravel_index(np.argmax(by_head), by_head.shape)
        metrics |= {name: float(mean[strongest]), f"{name}_se": float(error[strongest])}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@torch.no_grad()
def predict(model: GPT, task: Task, sequences: Sequences) -> Predictions:
    """Run the model on sequences."""
    device = model.head.weight.device
    tokens = torch.from_numpy(sequences.tokens).to(device)  # (n, T + 1)
    logits, values = model.run_with_cache(tokens[:, :-1], "weights")
    log_p = logits.float().log_softmax(-1)  # (n, T, V)
    loss = F.nll_loss(log_p.transpose(1, 2), tokens[:, 1:], reduction="none")
    is_correct = log_p.argmax(-1) == tokens[:, 1:]
    weights = torch.stack(list(values.values())).transpose(1, 2)  # (L, H, n, T, T)
    ids = torch.from_numpy(task.symbol_ids[: task.data.num_symbols]).to(device)
    first = int(task.data.begin)
    return Predictions(
        number_symbols(task, sequences).to(device)[:, :-1],
        log_p[:, first:, ids],
        loss[:, first:],
        is_correct[:, first:],
        torch.from_numpy(sequences.is_counted).to(device)[:, first:],
        weights[..., first:, first:],
        weights[..., first:, 0] if first else None,
    )


def number_symbols(task: Task, sequences: Sequences) -> Tensor:
    """Return the symbols of sequences without the begin symbol, numbered from 0, (n, T + 1)."""
    numbers = torch.full((task.tokenizer.vocab_size,), -1)
    numbers[torch.from_numpy(task.symbol_ids)] = torch.arange(len(task.symbol_ids))
    return numbers[torch.from_numpy(sequences.tokens)[:, int(task.data.begin) :]]


def read(predictions: Predictions, task: Task) -> dict[str, Reading]:
    """Return the readings of the task's metrics."""
    name, p = task.data.task, predictions
    if name == "passages":
        return read_passages(p, task.data)
    if name == "markov":
        return read_markov(p, task)
    prefix = "recall_" if name == "recall" else ""
    return {
        f"{prefix}loss": Reading(p.loss, p.is_counted),
        f"{prefix}accuracy": Reading(p.is_correct, p.is_counted),
    }


# --- passages that repeat -------------------------------------------------------------------------


def read_passages(p: Predictions, data: DataConfig) -> dict[str, Reading]:
    """Return the readings of repeated passages.

    - `first_loss`: of tokens of the first passage, except its first one.
    - `repeated_loss`, `repeated_accuracy`: of tokens that can be copied.
    - `induction`: weight of a repeated token on those that followed its earlier copies.
    - `previous_token`: weight on the token before.
    - `sink_nothing_to_find`, `attention_sum_nothing_to_find`: weight on the begin symbol, and sum
      of all weights, of tokens that occur for the first time.
    - `sink_something_to_find`: weight of a repeated token on the begin symbol.
    """
    periods = find_periods(p.symbols, data)[:, None]  # (n, 1)
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
        readings["sink_nothing_to_find"] = Reading(p.begin_weights, is_new)
        readings["sink_something_to_find"] = Reading(p.begin_weights, is_repeated)
        attention_sum = p.weights.sum(-1) + p.begin_weights  # (L, H, n, T)
        readings["attention_sum_nothing_to_find"] = Reading(attention_sum, is_new)
    return readings


def find_periods(symbols: Tensor, data: DataConfig) -> Tensor:
    """Return after how many symbols each row of (n, T) repeats, (n,)."""
    n, T = symbols.shape
    periods = torch.full((n,), data.max_period, device=symbols.device)
    for period in range(data.max_period - 1, data.min_period - 1, -1):
        repeats = (symbols[:, period:] == symbols[:, : T - period]).all(-1)
        periods[repeats] = period  # the shortest one is set last
    return periods


def read_previous_token(weights: Tensor) -> Reading:
    """Return the weight of each token but the first on the one before, (…, n, T)."""
    values = F.pad(weights.diagonal(-1, -2, -1), (1, 0))  # (…, n, T)
    is_counted = torch.ones(values.shape[-2:], dtype=torch.bool, device=values.device)
    is_counted[:, 0] = False
    return Reading(values, is_counted)


# --- Markov chains --------------------------------------------------------------------------------


def read_markov(p: Predictions, task: Task) -> dict[str, Reading]:
    """Return the readings of Markov chains.

    - `kl_<strategy>`: KL(strategy ‖ model) in nats, after a quarter of the sequence.
    - `previous_token`: in the first layer, weight on the token before.
    - `same_state`: in the last layer, weight on tokens that followed the current state, after a
      quarter of the sequence.

    Reference: Edelman et al. 2024, "The Evolution of Statistical Induction Heads".
    """
    T = p.symbols.shape[1]
    is_late = torch.arange(T, device=p.symbols.device) >= STRATEGY_START * T
    is_late = is_late.expand_as(p.symbols)  # (n, T)
    training = number_symbols(task, task.training).to(p.symbols.device)
    K = task.data.num_symbols
    strategies = in_context_strategies(p.symbols, K, task.data.concentration)
    strategies |= text_strategies(p.symbols, K, training)
    readings = {
        f"kl_{name}": Reading(divergence(strategy, p.log_p), is_late)
        for name, strategy in strategies.items()
    }
    same_state = (p.weights[-1] * follows_current_symbol(p.symbols)).sum(-1)  # (H, n, T)
    readings["previous_token"] = read_previous_token(p.weights[0])
    readings["same_state"] = Reading(same_state, is_late)
    return readings


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


def text_strategies(symbols: Tensor, K: int, training: Tensor) -> dict[str, Tensor]:
    """Return what frequencies in training sequences (m, T + 1) predict: (n, T, K) each.

    They are those of the symbols (text_unigram), and those after the current symbol (text_bigram).
    """
    unigram = training.flatten().bincount(minlength=K).float()
    pairs = (training[:, :-1] * K + training[:, 1:]).flatten()
    bigram = pairs.bincount(minlength=K * K).view(K, K).float()
    return {
        "text_unigram": (unigram / unigram.sum()).expand(*symbols.shape, K),
        "text_bigram": (bigram / bigram.sum(-1, keepdim=True).clamp(min=1))[symbols],
    }


def follows_current_symbol(symbols: Tensor) -> Tensor:
    """Return whether key j ≤ i came right after a copy of symbol i, for (n, T): (n, T, T)."""
    previous = F.pad(symbols[:, :-1], (1, 0), value=-1)  # (n, T)
    return (previous[:, None, :] == symbols[:, :, None]).tril()


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) in nats, for probabilities p and logarithms of q, (…, symbols) each."""
    return (torch.xlogy(p, p) - p * log_q).sum(-1)


# --- modular addition -----------------------------------------------------------------------------


def fourier_share(embeddings: Tensor) -> float:
    """Return the share of the six strongest frequencies in number embeddings (P, C).

    The share is that of the squared length, without the mean over the numbers. If it were spread
    evenly, it would be 6 / ⌊P / 2⌋.

    Reference: Nanda et al. 2023, "Progress measures for grokking via mechanistic interpretability".
    """
    power = torch.fft.rfft(embeddings.double(), dim=0).abs().square().sum(-1)[1:]
    strongest = power.topk(min(NUM_FREQUENCIES, len(power))).values
    return (strongest.sum() / power.sum()).item()
