"""Predict tokens by counting alone: interpolated Kneser-Ney, a baseline for n-gram tables.

Reference:
    Chen & Goodman 1999, "An Empirical Study of Smoothing Techniques for Language Modeling".
"""

import numpy as np

DISCOUNT = 0.75  # subtracted from each count, the value that the reference recommends


def kneser_ney(train: np.ndarray, val: np.ndarray, vocab_size: int, max_order: int) -> list[float]:
    """Return the mean loss of counting models of orders 1 to `max_order`, in nats per token.

    Args:
        train: Token ids (N,) that are counted.
        val: Token ids (M,) that are predicted; they follow `train`.
        vocab_size: Number of tokens V; V ** max_order must be below 2⁶³.
        max_order: Length of the longest n-grams.
    """
    text = np.concatenate((train[-max_order:], val)).astype(np.int64)
    train_ngrams = {n: encode_ngrams(train, n, vocab_size) for n in range(1, max_order + 1)}
    lower_order = np.full(len(val), 1 / vocab_size)  # probability of each token of val: (M,)
    losses = []
    for n in range(1, max_order + 1):
        val_ngrams = encode_ngrams(text, n, vocab_size)[-len(val) :]
        ngrams, counts = np.unique(train_ngrams[n], return_counts=True)
        probability = smooth(ngrams, counts, val_ngrams, vocab_size, lower_order)
        losses.append(float(-np.log(probability).mean()))
        if n < max_order:  # in a lower order, an n-gram counts once for each token before it
            distinct = np.unique(train_ngrams[n + 1]) % vocab_size**n
            ngrams, counts = np.unique(distinct, return_counts=True)
            lower_order = smooth(ngrams, counts, val_ngrams, vocab_size, lower_order)
    return losses


def encode_ngrams(tokens: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """Return the n-grams of tokens (N,) as one number each: (N + 1 - n,)."""
    place_values = vocab_size ** np.arange(n)[::-1]
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int64), n)
    return windows @ place_values


def smooth(
    ngrams: np.ndarray,
    counts: np.ndarray,
    queries: np.ndarray,
    vocab_size: int,
    lower_order: np.ndarray,
) -> np.ndarray:
    """Return the probability of the last token of each query, given those before it.

    Args:
        ngrams: Encoded n-grams, ascending and distinct.
        counts: How often each occurs.
        queries: Encoded n-grams to predict: (M,).
        vocab_size: Number of tokens.
        lower_order: Probabilities of the order below, which get the discounted share: (M,).
    """
    contexts, context_of_ngram = np.unique(ngrams // vocab_size, return_inverse=True)
    total = np.bincount(context_of_ngram, counts)
    continuations = np.bincount(context_of_ngram)
    position = find_sorted(ngrams, queries)
    context = find_sorted(contexts, queries // vocab_size)
    discounted = np.where(position < 0, 0, np.maximum(counts[position] - DISCOUNT, 0))
    interpolated = discounted + DISCOUNT * continuations[context] * lower_order
    return np.where(context < 0, lower_order, interpolated / total[context])


def find_sorted(numbers: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the position of each query in ascending numbers, or -1 if it is not among them."""
    position = np.searchsorted(numbers, queries).clip(max=len(numbers) - 1)
    return np.where(numbers[position] == queries, position, -1)
