"""The n-grams of a text that come often: what `model.ngrams` has a row for."""

import numpy as np

from common.errors import UserError
from config import GPTConfig

MOST = 1 << 25  # tokens of the training split that are counted, the first


def count_ngrams(tokens: np.ndarray, vocab_size: int, model: GPTConfig) -> np.ndarray:
    """The n-grams of 2 … `ngrams` tokens that tokens (N,) have at least `ngram_count` times, as a
    trie: keys (rows,) int64, ascending. The key of an n-gram is parent · V + its last token; the
    parent is what comes before it: a token's id, or V + the place in keys of a shorter n-gram.

    Every part of a common n-gram is common, and parents come before their children, so that one
    sorted list holds all lengths. Raises `UserError` where there is none."""
    tokens = np.asarray(tokens[:MOST], np.int64)
    parents, keys = tokens, []  # of what ends at each place; -1: of nothing common
    for _ in range(model.ngrams - 1):
        tokens, before = tokens[1:], parents[:-1]
        common = before >= 0
        found, which, counts = np.unique(
            before[common] * vocab_size + tokens[common], return_inverse=True, return_counts=True
        )
        often = counts >= model.ngram_count
        numbers = np.where(often, vocab_size + sum(map(len, keys)) + np.cumsum(often) - 1, -1)
        parents = np.full(len(tokens), -1)
        parents[common] = numbers[which]
        keys.append(found[often])
    if not any(map(len, keys)):
        raise UserError(
            f"model.ngram_count={model.ngram_count} is more often than any two tokens "
            "of the text follow each other: lower it, or leave model.ngrams out"
        )
    return np.concatenate(keys)
