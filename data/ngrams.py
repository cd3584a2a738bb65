"""Count the n-grams of a text, for the embeddings of ngrams.py."""

import numpy as np

from common.errors import UserError
from common.text import pluralize
from config import ModelConfig
from ngrams import NO_NGRAM

MAX_COUNTED_TOKENS = 1 << 25  # the training split's first tokens; counting takes 8 bytes for each


def count_ngrams(tokens: np.ndarray, vocab_size: int, config: ModelConfig) -> np.ndarray:
    """Return the keys of the n-grams that occur at least `ngram_count` times in a text.

    The key of an n-gram is parent · V + its last token. The parent stands for the tokens before the
    last: a token id, or V + the place in the keys of a shorter n-gram. Every part of a frequent
    n-gram is frequent, and parents come before their children, so that one ascending list holds
    the n-grams of all lengths.

    Args:
        tokens: Ids (N,) of the training split.
        vocab_size: V.
        config: Gives `ngrams`, the length of the longest n-grams, and `ngram_count`.

    Returns:
        Keys (number of frequent n-grams,) int64, ascending.

    Raises:
        UserError: Every n-gram occurs fewer than `ngram_count` times.
    """
    tokens = np.asarray(tokens[:MAX_COUNTED_TOKENS], np.int64)
    keys: list[np.ndarray] = []  # of each length
    n_keys = highest_count = 0
    prefixes = tokens  # number of the n-gram that ends at each token, at first the token's id
    for _ in range(config.ngrams - 1):
        tokens, prefixes = tokens[1:], prefixes[:-1]
        continues = prefixes != NO_NGRAM  # whether the n-gram before is frequent
        candidates, which, counts = np.unique(
            prefixes[continues] * vocab_size + tokens[continues],
            return_inverse=True,
            return_counts=True,
        )
        highest_count = counts.max(initial=highest_count)
        is_frequent = counts >= config.ngram_count
        place = n_keys + np.cumsum(is_frequent) - 1
        numbers = np.where(is_frequent, vocab_size + place, NO_NGRAM)
        prefixes = np.full(len(tokens), NO_NGRAM)
        prefixes[continues] = numbers[which]
        keys.append(candidates[is_frequent])
        n_keys += int(is_frequent.sum())
    if n_keys == 0 and highest_count:
        raise UserError(
            f"model.ngram_count={config.ngram_count} leaves no n-gram, because the most frequent "
            f"one in the training text occurs {pluralize(int(highest_count), 'time')}: set "
            f"model.ngram_count to at most {highest_count}, or model.ngrams=0"
        )
    return np.concatenate(keys)
