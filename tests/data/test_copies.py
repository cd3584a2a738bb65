"""Excerpts of a text are found in a training split, wherever they are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import data.copies
from data.copies import count_trained_excerpts


@given(
    length=st.integers(34, 3000),
    begin=st.integers(0, 3000),
    at_once=st.integers(1, 4000),
    dtype=st.sampled_from(["uint8", "uint16", "uint32"]),
)
def test_every_excerpt_of_a_part_of_the_training_split_is_found(length, begin, at_once, dtype):
    train = np.random.default_rng(0).integers(0, 200, 6000).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.copies, "SEARCHED_AT_ONCE", at_once)
        found, count = count_trained_excerpts(train[begin : begin + length].tolist(), train)
        assert found == count == min(16, max(1, (length - 2) // 128))
        changed = (train[begin : begin + length] + 1).tolist()
        assert count_trained_excerpts(changed, train) == (0, count)


def test_a_short_text_is_not_looked_up():
    assert count_trained_excerpts([1] * 33, np.ones(100, np.uint8)) == (0, 0)
