"""The frequent n-grams of a text, against a count of all of them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import decoded_ngrams

from common.errors import UserError
from config import GPTConfig
from variants import count_ngrams


def ngrams_by_hand(tokens, config):
    """All n-grams that occur at least `ngram_count` times, as tuples of token ids."""
    ngrams = []
    for n in range(2, config.ngrams + 1):
        counts = Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) + 1 - n))
        ngrams += [ngram for ngram, count in counts.items() if count >= config.ngram_count]
    return ngrams


texts = st.lists(st.integers(0, 4), min_size=2, max_size=80)


@given(texts, st.integers(2, 5), st.integers(1, 3))
def test_the_keys_are_those_of_all_frequent_ngrams(tokens, longest, min_count):
    config = GPTConfig(5, ngrams=longest, ngram_count=min_count)
    expected = ngrams_by_hand(tokens, config)
    if not expected:
        with pytest.raises(UserError, match=r"model\.ngram_count"):
            count_ngrams(np.array(tokens), 5, config)
        return
    keys = count_ngrams(np.array(tokens), 5, config)
    assert sorted(decoded_ngrams(keys.tolist(), 5)) == sorted(expected)
    assert (np.diff(keys) > 0).all()
