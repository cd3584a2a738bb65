"""Metrics of tasks against loops over single tokens, and for models with a known behavior."""

import math
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from config import Config, DataConfig, ModelConfig
from data.synthetic import Sequences, Task, make_task
from model import GPT
from tests.models import lively, small
from training import task_metrics
from training.task_metrics import (
    Predictions,
    average,
    fourier_share,
    measure_sequences,
    measure_task,
    predict,
    token_metrics,
)
from variants import build_model

V, L, H, T = 5, 2, 3, 20
PERIODS = (3, 4, 5, 6, 7, 7)


def task_of(name: str, block_size: int = T, **data) -> Task:
    settings = {"source": "synthetic", "task": name, "val_max_tokens": 12 * block_size} | data
    model = ModelConfig(None, block_size=block_size)
    return make_task(Config(model=model, data=DataConfig(**settings), batch_size=4))


def make_model(task: Task, **changes) -> GPT:
    settings = {"vocab_size": task.tokenizer.vocab_size, "block_size": task.block_size} | changes
    return lively(build_model(small(**settings)))


def random_predictions(symbols: np.ndarray, begin: bool) -> Predictions:
    """Predictions and attention that do not depend on the symbols (n, T)."""
    rng, n = np.random.default_rng(0), len(symbols)
    weights = np.tril(rng.random((L, H, n, T + 1, T + 1)))
    weights = torch.from_numpy(weights / weights.sum(-1, keepdims=True))
    return Predictions(
        torch.from_numpy(symbols),
        torch.from_numpy(rng.random((n, T, V))).log_softmax(-1),
        torch.from_numpy(rng.random((n, T))),
        torch.from_numpy(rng.random((n, T)) < 0.5),
        torch.ones(n, T, dtype=torch.bool),
        weights[..., 1:, 1:],
        weights[..., 1:, 0] if begin else None,
    )


def flatten(lists: list[list]) -> list:
    return list(chain.from_iterable(lists))


def expect_means(metrics: dict[str, float], expected: dict[str, list[list[float]]]) -> None:
    """Check means over tokens and their errors: the jackknife over sequences agrees with them."""
    assert {name for name in metrics if not name.endswith("_se")} == expected.keys()
    for name, by_sequence in expected.items():
        means = [
            np.mean(flatten(by_sequence[:left_out] + by_sequence[left_out + 1 :]))
            for left_out in range(len(by_sequence))
        ]
        jackknife = math.sqrt((len(means) - 1) * np.var(means))
        assert metrics[name] == pytest.approx(np.mean(flatten(by_sequence)), abs=1e-6), name
        assert metrics[f"{name}_se"] == pytest.approx(jackknife, rel=0.25, abs=1e-6), name


def passages() -> np.ndarray:
    """Six rows of T symbols that repeat after `PERIODS` symbols."""
    rng = np.random.default_rng(1)  # no symbol twice in a passage
    return np.stack([np.resize(rng.permutation(8)[:period], T) for period in PERIODS])


def test_metrics_of_passages_equal_those_of_loops_over_tokens():
    symbols, p = passages(), random_predictions(passages(), begin=True)
    task = task_of("passages", min_period=2, max_period=8)
    weights, begin = p.weights.numpy(), p.begin_weights.numpy()
    induction = np.zeros((L, H, len(symbols), T))
    for row, period in enumerate(PERIODS):
        for i in range(period, T):
            for j in range(1, i + 1):
                if symbols[row, j - 1] == symbols[row, i] and j - 1 < i:
                    induction[:, :, row, i] += weights[:, :, row, i, j]

    repeated = [range(period, T) for period in PERIODS]
    first = [range(period - 1) for period in PERIODS]
    new = [range(4, period) for period in PERIODS]
    all_tokens = [range(1, T)] * len(PERIODS)

    def rows(values, positions):
        return [[float(values[row, i]) for i in chosen] for row, chosen in enumerate(positions)]

    def strongest(values, positions):
        heads = [(layer, head) for layer in range(L) for head in range(H)]
        return max(heads, key=lambda head: np.mean(flatten(rows(values[head], positions))))

    previous = np.stack([weights[..., i, i - 1] for i in range(T)], axis=-1)
    head = strongest(induction, repeated)
    attention_sum = weights.sum(-1) + begin
    expect_means(
        average([token_metrics(p, task.data)]),
        {
            "first_loss": rows(p.loss, first),
            "repeated_loss": rows(p.loss, repeated),
            "repeated_accuracy": rows(p.is_correct, repeated),
            "induction": rows(induction[head], repeated),
            "previous_token": rows(previous[strongest(previous, all_tokens)], all_tokens),
            "sink_nothing_to_find": rows(begin[head], new),
            "sink_something_to_find": rows(begin[head], repeated),
            "attention_sum_nothing_to_find": rows(attention_sum[head], new),
        },
    )


def count_strategies(symbols: np.ndarray, pseudocount: float) -> dict[str, np.ndarray]:
    """What uniform, unigram and bigram frequencies so far predict after each token: (n, T, V)."""
    predictions = {name: np.zeros((*symbols.shape, V)) for name in ("uniform", "unigram", "bigram")}
    for row, sequence in enumerate(symbols.tolist()):
        for i in range(len(sequence)):
            followers = [b for a, b in pairwise(sequence[: i + 1]) if a == sequence[i]]
            seen_by = {"uniform": [], "unigram": sequence[: i + 1], "bigram": followers}
            for name, seen in seen_by.items():
                counts = [seen.count(symbol) + pseudocount for symbol in range(V)]
                predictions[name][row, i] = np.array(counts) / sum(counts)
    return predictions


def test_metrics_of_markov_chains_equal_those_of_loops_over_tokens():
    task = task_of("markov", symbols=V, concentration=0.5)
    symbols = task.symbols_of(task.validation)[:6, :-1]
    p = random_predictions(symbols, begin=False)
    strategies = count_strategies(symbols, 0.5)
    late = range(5, T)
    expected = {}
    for name, q in strategies.items():
        kl = (q * (np.log(q) - p.log_p.numpy())).sum(-1)
        expected[f"kl_{name}"] = kl[:, 5:].tolist()
    weights = p.weights.numpy()
    previous = weights[0][..., range(1, T), range(T - 1)]  # (H, n, T - 1)
    expected["previous_token"] = previous[previous.mean((1, 2)).argmax()].tolist()
    same = np.zeros((H, 6, T))
    for row in range(6):
        for i in late:
            keys = [j for j in range(1, i + 1) if symbols[row, j - 1] == symbols[row, i]]
            same[:, row, i] = weights[-1, :, row, i, keys].sum(0)
    same = same[..., 5:]
    expected["same_state"] = same[same.mean((1, 2)).argmax()].tolist()
    expect_means(average([token_metrics(p, task.data)]), expected)


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("name", ["passages", "markov"])
def test_a_pass_of_a_model_is_read_the_same_in_many_batches(name, begin, monkeypatch):
    task = task_of(name, begin=begin, min_period=3, max_period=8)
    model = make_model(task).train()
    random_state = torch.get_rng_state()
    at_once = measure_task(task, model)
    monkeypatch.setattr(task_metrics, "MAX_VALUES", 1)  # one sequence at a time
    assert measure_task(task, model) == pytest.approx(at_once, abs=1e-5)
    assert model.training and torch.equal(random_state, torch.get_rng_state())
    assert ("task/sink_nothing_to_find" in at_once) == (begin and name == "passages")


def test_losses_of_a_model_are_those_of_the_tokens_that_its_task_counts():
    task = task_of("modular", block_size=4, symbols=7)
    model = make_model(task)
    metrics = measure_task(task, model)
    for prefix, sequences in (("", task.validation), ("train_", task.training)):
        targets = torch.from_numpy(sequences.targets)
        with torch.no_grad():
            logits, loss = model(torch.from_numpy(sequences.inputs), targets)
        accuracy = (logits.argmax(-1) == targets).sum().item() / (targets >= 0).sum().item()
        assert metrics[f"task/{prefix}loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics[f"task/{prefix}accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert metrics[f"task/{prefix}loss_se"] > 0


def test_spread_sequences_are_measured_before_the_last_step_and_then_all(monkeypatch):
    task = task_of("passages", min_period=3, max_period=8)
    model, (tokens, is_counted) = make_model(task), task.validation
    monkeypatch.setattr(task_metrics, "MAX_TOKENS", 3 * T)
    assert len(tokens) == 12
    for is_last, chosen in ((False, [0, 6, 11]), (True, range(12))):
        sequences = Sequences(tokens[[*chosen]], is_counted[[*chosen]])
        expected = measure_sequences(task, model, sequences, is_last=True)
        measured = measure_sequences(task, model, task.validation, is_last)
        assert measured == pytest.approx(expected, abs=1e-6)


def test_attention_to_the_begin_symbol_is_what_attention_to_other_tokens_lacks():
    task = task_of("markov", begin=True)
    p = predict(task, make_model(task), task.validation)
    assert p.begin_weights.shape == p.weights.shape[:-1]
    assert (p.weights.sum(-1) + p.begin_weights).numpy() == pytest.approx(1, abs=1e-5)


def test_the_fourier_share_is_that_of_the_six_strongest_frequencies():
    P, rng = 41, np.random.default_rng(0)
    angles = 2 * np.pi * np.arange(P)[:, None] / P
    waves = [
        np.cos(k * angles + rng.random()) * rng.normal(size=(1, 8)) for k in (1, 4, 7, 11, 15, 20)
    ]
    structured = torch.from_numpy(sum(waves)) + 3  # the mean does not count
    assert fourier_share(structured) == pytest.approx(1)
    seventh = torch.from_numpy(np.cos(9 * angles) * np.ones((1, 8)))
    more = structured + 0.1 * seventh
    left_out = ((0.1 * seventh) ** 2).sum() / ((more - more.mean(0)) ** 2).sum()
    assert fourier_share(more) == pytest.approx(1 - left_out.item())
