"""When heads emerge and are lost, on scores made up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glass.heads.measure import scores
from glass.heads.measure.emergence import (
    CONTROLLED_SCORES,
    THRESHOLD_SHARES,
    date_emergence,
    find_passing_heads,
    threshold,
)
from run.row import Head, Row

HEAD, LENGTH = Head(0, 0), 48


@pytest.mark.parametrize(("length", "uniform_score"), [(8, 0.245), (48, 0.074), (512, 0.0114)])
def test_thresholds_are_above_the_score_of_uniform_attention(length, uniform_score):
    uniform = np.tril(np.ones((length, length)))
    uniform /= uniform.sum(axis=-1, keepdims=True)
    for score, share in THRESHOLD_SHARES.items():
        expected = 0.0
        if score not in CONTROLLED_SCORES:
            expected = getattr(scores, score)(uniform).mean()
            assert expected == pytest.approx(uniform_score, abs=5e-4)
        assert threshold(score, length) - expected == pytest.approx(share * (1 - expected))


def test_heads_pass_the_threshold_less_their_error_the_strongest_first():
    row = Row()
    scored = np.array([[0.1, 0.7], [0.9, 0.25]])  # the threshold is 0.2
    row.put_heads("heads/induction", scored, np.full((2, 2), 0.1))
    assert find_passing_heads(row, "induction", LENGTH) == [Head(1, 0), Head(0, 1)]


def follow(score: str, values: list[tuple[float, float]], every: int = 10) -> Row:
    """Return the row after snapshots with these scores and errors of one head."""
    row = Row()
    for number, estimate in enumerate(values):
        previous, row = row, Row(step=every * number)
        row.put(f"heads/{score}", estimate, HEAD)
        row |= date_emergence(previous, row, LENGTH)
    return row


def follow_induction(values: list[float]) -> tuple[int | None, int | None]:
    """Return when an induction head emerged and was lost, without standard errors."""
    row = follow("induction", [(value, 0.0) for value in values])
    return row.get(f"emerged/induction/{HEAD}"), row.get(f"lost/induction/{HEAD}")


def test_a_head_emerges_at_the_first_of_two_snapshots_at_which_it_passes():
    minimum = threshold("induction", LENGTH)
    assert follow_induction([0, minimum, 0, minimum, minimum + 0.1]) == (30, None)
    assert follow_induction([minimum, minimum]) == (0, None)
    assert follow_induction([0, minimum, 0, minimum]) == (None, None)


def test_a_head_is_lost_at_the_last_snapshot_at_which_it_passed():
    minimum = threshold("induction", LENGTH)
    assert follow_induction([0, minimum, 0, minimum, minimum + 0.1, 0, 0]) == (30, 40)
    assert follow_induction([minimum, minimum, 0, 0, minimum]) == (0, None)


def test_a_head_is_lost_only_if_it_falls_below_the_threshold_by_more_than_two_errors():
    minimum = threshold("current_token", LENGTH)
    before = [(minimum + 0.03, 0.012)] * 2
    near, below = (minimum + 0.01, 0.012), (minimum - 0.02, 0.012)  # neither passes
    fallen = (minimum - 0.03, 0.012)
    for then, lost in [
        ([near, below, near], None),
        ([near, fallen], 20),
        ([fallen, near, fallen], 10),
        ([fallen, *before], None),
    ]:
        row = follow("current_token", [*before, *then])
        assert row.get(f"lost/current_token/{HEAD}") == lost


@given(st.lists(st.floats(0, 1), min_size=3, max_size=30), st.floats(0, 0.1))
def test_the_date_of_an_emergence_never_moves(values, error):
    history = [(value, error) for value in values]
    dates = [
        follow("induction", history[:count]).get(f"emerged/induction/{HEAD}")
        for count in range(1, 1 + len(history))
    ]
    known = [date for date in dates if date is not None]
    assert dates[len(dates) - len(known) :] == known and len(set(known)) <= 1
