"""Numbers in messages: nouns agree with their counts, and no positive speed is shown as zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text import format_speed, pluralize


@pytest.mark.parametrize("noun", ["step", "key/value head", "process"])
def test_only_one_is_singular(noun):
    assert pluralize(1, noun) == f"1 {noun}"
    assert {pluralize(n, noun)[-1] for n in (0, 2, 1001)} == {"s"}
    assert pluralize(1001, noun).startswith("1,001 ")


@given(st.floats(1e-9, 1e9))
def test_a_speed_has_two_significant_digits(speed):
    assert float(format_speed(speed).replace(",", "")) == pytest.approx(speed, rel=0.05)
