"""The n-grams that a text has often, against a count of all of them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from config import GPTConfig
from data.ngrams import count_ngrams


@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(2, 5), st.integers(1, 3))
def test_the_keys_are_all_ngrams_that_come_so_often(tokens, longest, least):
    model = GPTConfig(5, ngrams=longest, ngram_count=least)
    often = {
        gram
        for n in range(2, longest + 1)
        for gram, count in Counter(
            tuple(tokens[i : i + n]) for i in range(len(tokens) + 1 - n)
        ).items()
        if count >= least
    }
    if not often:
        with pytest.raises(UserError, match=r"model\.ngram_count"):
            count_ngrams(np.array(tokens), 5, model)
        return
    keys, found = count_ngrams(np.array(tokens), 5, model), []
    for parent, last in (divmod(key, 5) for key in keys.tolist()):
        found.append((*((parent,) if parent < 5 else found[parent - 5]), last))
    assert sorted(found) == sorted(often) and (np.diff(keys) > 0).all()
