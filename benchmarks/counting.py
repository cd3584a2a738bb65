"""What counting alone predicts: interpolated Kneser-Ney (Chen and Goodman 1999), what
the gain of n-gram tables stands beside."""

import numpy as np

DISCOUNT = 0.75


def kneser_ney(train: np.ndarray, val: np.ndarray, vocab_size: int, longest: int) -> list[float]:
    """The mean loss of tokens val (M,), which follow tokens train (N,), in nats, by the models of
    orders 1 … `longest`; vocab_size ** longest has to be below 2⁶³."""
    before = np.concatenate((train[-longest:], val)).astype(np.int64)
    grams = [None, *(grams_of(train, n, vocab_size) for n in range(1, longest + 1))]
    chance, losses = np.full(len(val), 1 / vocab_size), []  # lower orders', of all of val
    for n in range(1, longest + 1):
        asked = grams_of(before, n, vocab_size)[-len(val) :]
        whole = smoothed(*np.unique(grams[n], return_counts=True), asked, vocab_size, chance)
        losses.append(-np.log(whole).mean())
        if n < longest:  # as a lower order an n-gram counts once for each token before it
            kinds = np.unique(np.unique(grams[n + 1]) % vocab_size**n, return_counts=True)
            chance = smoothed(*kinds, asked, vocab_size, chance)
    return losses


def grams_of(tokens: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """The n-grams of tokens (N,), as one number each: (N + 1 - n,)."""
    places = vocab_size ** np.arange(n)[::-1]
    return np.lib.stride_tricks.sliding_window_view(tokens.astype(np.int64), n) @ places


def smoothed(
    grams: np.ndarray, counts: np.ndarray, asked: np.ndarray, vocab_size: int, lower: np.ndarray
) -> np.ndarray:
    """The chance of each n-gram asked for, given all but its last token, by the counts of grams
    (ascending), less a discount that goes to the order below."""
    contexts, which = np.unique(grams // vocab_size, return_inverse=True)
    total, kinds = np.bincount(which, counts), np.bincount(which)
    here, context = found(grams, asked), found(contexts, asked // vocab_size)
    count = np.where(here < 0, 0, np.maximum(counts[here] - DISCOUNT, 0))
    return np.where(
        context < 0, lower, (count + DISCOUNT * kinds[context] * lower) / total[context]
    )


def found(numbers: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The place of each number asked for in ascending ones, -1 for those that are not there."""
    place = np.searchsorted(numbers, asked).clip(max=len(numbers) - 1)
    return np.where(numbers[place] == asked, place, -1)
