"""Measure how well a model solves the task of its run, and how its heads attend.

Each metric is a mean over tokens of all sequences; its standard error is that over sequences.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.statistics import ratio_with_error
from common.text import format_with_error
from config import DataConfig
from data.synthetic import ModularAddition, Sequences, Task
from model import GPT

# Tokens of the sequences that are measured before the last step, such as 64 sequences of 64 tokens.
# For a model of 35,000 parameters this takes 7% of the time of 25 steps of 2,048 tokens.
MAX_TOKENS = 4096
MAX_VALUES = 1 << 25  # logits or attention weights computed at once: 128 MB in float32

# Tokens before a query of the sink metrics. Among fewer, any head has much weight on the first one.
MIN_SINK_CONTEXT = 5
# Strategies are compared after this share of a sequence, from which on they differ.
STRATEGY_START = 0.25
NUM_FREQUENCIES = 6  # a trained model uses about five (Nanda et al. 2023)


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


class TokenMetric(NamedTuple):
    """The value of a metric for each token, and whether it counts.

    If each head has a value, the metric is that of the head with the highest mean, or with the
    highest mean of another metric, `chosen_by`.
    """

    values: Tensor  # (…, n, T), with the dimensions of the heads first if it is one of heads
    is_counted: Tensor  # (n, T)
    chosen_by: str | None = None


def measure_task(task: Task, model: GPT, is_last: bool = False) -> dict[str, float]:
    """Return `task/<name>` of a model, with the standard errors `task/<name>_se`.

    At the last step of a run all held-out sequences are measured, before it only some of them. In
    modular addition the training pairs are measured too, and the structure of the number
    embeddings. The model's mode and torch's random state do not change.
    """
    metrics = measure_sequences(task, model, task.validation, is_last)
    if isinstance(task, ModularAddition):
        training = measure_sequences(task, model, task.training, is_last)
        metrics |= {f"train_{name}": value for name, value in training.items()}
        ids = torch.from_numpy(task.symbol_ids[: task.data.num_symbols])
        metrics["fourier_share"] = fourier_share(model.token_embedding.weight.detach().cpu()[ids])
    return {f"task/{name}": value for name, value in metrics.items()}


def describe_task(metrics: dict[str, float]) -> list[str]:
    """Return a line for each metric of a task, such as "task     repeated loss 0.25 ± 0.01"."""
    lines: list[str] = []
    for key in metrics:
        if key.startswith("task/") and not key.endswith("_se"):
            label = "" if lines else "task"
            name = key.removeprefix("task/").replace("_", " ")
            value = format_with_error(metrics[key], metrics.get(f"{key}_se"))
            lines.append(f"{label:<9}{name} {value}")
    return lines


def measure_sequences(
    task: Task, model: GPT, sequences: Sequences, is_last: bool
) -> dict[str, float]:
    """Return metrics and errors; before the last step of only some sequences."""
    T, config = task.block_size, model.config
    n = len(sequences.tokens)
    max_sequences = n if is_last else max(1, MAX_TOKENS // T)
    chosen = np.linspace(0, n - 1, min(n, max_sequences)).round().astype(int)
    logits_per_row = T * len(model.head.weight)
    weights_per_row = config.n_layer * config.n_head * T * T
    rows = max(1, MAX_VALUES // max(logits_per_row, weights_per_row))
    batches = (
        Sequences(sequences.tokens[which], sequences.is_counted[which])
        for which in np.split(chosen, range(rows, len(chosen), rows))
    )
    return average(token_metrics(predict(task, model, batch), task.data) for batch in batches)


@torch.no_grad()
def predict(task: Task, model: GPT, sequences: Sequences) -> Predictions:
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
        torch.from_numpy(task.symbols_of(sequences)).to(device)[:, :-1],
        log_p[:, first:, ids],
        loss[:, first:],
        is_correct[:, first:],
        torch.from_numpy(sequences.is_counted).to(device)[:, first:],
        weights[..., first:, first:],
        weights[..., first:, 0] if first else None,
    )


def average(batches: Iterable[dict[str, TokenMetric]]) -> dict[str, float]:
    """Return the means and errors of metrics from their values in batches of sequences."""
    sums, counts = defaultdict(list), defaultdict(list)
    chosen_by: dict[str, str] = {}
    for metrics_of_batch in batches:
        for name, (values, is_counted, other) in metrics_of_batch.items():
            sums[name].append((values * is_counted).sum(-1).double())  # (…, n)
            counts[name].append(is_counted.sum(-1))  # (n,)
            chosen_by[name] = other or name
    estimates = {
        name: ratio_with_error(
            torch.cat(sums[name], dim=-1).cpu().numpy(), torch.cat(counts[name]).cpu().numpy()
        )
        for name in sums
    }
    metrics: dict[str, float] = {}
    for name, (mean, error) in estimates.items():
        by_head, _ = estimates[chosen_by[name]]
        strongest = np.unravel_index(np.argmax(by_head), by_head.shape)
        metrics |= {name: float(mean[strongest]), f"{name}_se": float(error[strongest])}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


# --- Metrics of each task -------------------------------------------------------------------------


def token_metrics(p: Predictions, data: DataConfig) -> dict[str, TokenMetric]:
    """Return the metrics of a task for each token."""
    if data.task == "passages":
        return passages_metrics(p, data)
    if data.task == "markov":
        return markov_metrics(p, data)
    return {
        "loss": TokenMetric(p.loss, p.is_counted),
        "accuracy": TokenMetric(p.is_correct, p.is_counted),
    }


def passages_metrics(p: Predictions, data: DataConfig) -> dict[str, TokenMetric]:
    """Return the metrics of repeated passages.

    - `first_loss`: of tokens of the first passage, except its first one.
    - `repeated_loss`, `repeated_accuracy`: of tokens that can be copied.
    - `induction`: weight of a repeated token on those that followed its earlier copies.
    - `previous_token`: weight on the token before.
    - `sink_nothing_to_find`, `attention_sum_nothing_to_find`: weight on the begin symbol, and sum
      of all weights, of tokens that occur for the first time.
    - `sink_something_to_find`: weight of a repeated token on the begin symbol.

    The last three are those of the strongest induction head.
    """
    periods = find_periods(p.symbols, data)[:, None]  # (n, 1)
    t = torch.arange(p.symbols.shape[1], device=periods.device)  # (T,)
    is_first, is_repeated = t < periods - 1, t >= periods  # (n, T)
    distance = t[:, None] - t  # from query to key, (T, T)
    is_next = (distance > 0) & (t > 0)  # no token comes before the first key
    is_next = is_next & ((distance + 1) % periods[:, :, None] == 0)  # (n, T, T)
    metrics = {
        "first_loss": TokenMetric(p.loss, is_first),
        "repeated_loss": TokenMetric(p.loss, is_repeated),
        "repeated_accuracy": TokenMetric(p.is_correct, is_repeated),
        "induction": TokenMetric((p.weights * is_next).sum(-1), is_repeated),
        "previous_token": previous_token_metric(p.weights),
    }
    if p.begin_weights is not None:
        is_same = p.symbols[:, :, None] == p.symbols[:, None, :]  # (n, T, T)
        occurred_before = (is_same & (distance > 0)).any(-1)  # (n, T)
        is_new = ~occurred_before & (t + 1 >= MIN_SINK_CONTEXT)
        attention_sum = p.weights.sum(-1) + p.begin_weights  # (L, H, n, T)
        metrics |= {
            "sink_nothing_to_find": TokenMetric(p.begin_weights, is_new, "induction"),
            "sink_something_to_find": TokenMetric(p.begin_weights, is_repeated, "induction"),
            "attention_sum_nothing_to_find": TokenMetric(attention_sum, is_new, "induction"),
        }
    return metrics


def find_periods(symbols: Tensor, data: DataConfig) -> Tensor:
    """Return after how many symbols each row of (n, T) repeats, (n,)."""
    n, T = symbols.shape
    periods = torch.full((n,), data.max_period, device=symbols.device)
    for period in range(data.max_period - 1, data.min_period - 1, -1):
        repeats = (symbols[:, period:] == symbols[:, : T - period]).all(-1)
        periods[repeats] = period  # the shortest one is set last
    return periods


def markov_metrics(p: Predictions, data: DataConfig) -> dict[str, TokenMetric]:
    """Return the metrics of Markov chains.

    - `kl_<strategy>`: KL(strategy ‖ model) in nats, after a quarter of the sequence.
    - `previous_token`: in the first layer, weight on the token before.
    - `same_state`: in the last layer, weight on tokens that followed the current state, after a
      quarter of the sequence.
    """
    T = p.symbols.shape[1]
    is_late = torch.arange(T, device=p.symbols.device) >= STRATEGY_START * T
    is_late = is_late.expand_as(p.symbols)  # (n, T)
    strategies = in_context_strategies(p.symbols, data.num_symbols, data.concentration)
    metrics = {
        f"kl_{name}": TokenMetric(divergence(strategy, p.log_p), is_late)
        for name, strategy in strategies.items()
    }
    same_state = (p.weights[-1] * follows_current_symbol(p.symbols)).sum(-1)  # (H, n, T)
    metrics["previous_token"] = previous_token_metric(p.weights[0])
    metrics["same_state"] = TokenMetric(same_state, is_late)
    return metrics


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


def previous_token_metric(weights: Tensor) -> TokenMetric:
    """Return the weight of each token but the first on the one before, (…, n, T)."""
    values = F.pad(weights.diagonal(-1, -2, -1), (1, 0))  # (…, n, T)
    is_counted = torch.ones(values.shape[-2:], dtype=torch.bool, device=values.device)
    is_counted[:, 0] = False
    return TokenMetric(values, is_counted)


def fourier_share(embeddings: Tensor) -> float:
    """Return the share of the six strongest frequencies in number embeddings (P, C).

    The share is that of the squared length, without the mean over the numbers. If it were spread
    evenly, it would be 6 / ⌊P / 2⌋.

    Reference: Nanda et al. 2023, "Progress measures for grokking via mechanistic interpretability".
    """
    power = torch.fft.rfft(embeddings.double(), dim=0).abs().square().sum(-1)[1:]
    strongest = power.topk(min(NUM_FREQUENCIES, len(power))).values
    return (strongest.sum() / power.sum()).item()
