"""When heads emerge and are lost, on scores made up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glass.heads.measure import scores
from glass.heads.measure.emergence import (
    CONTROLLED_SCORES,
    THRESHOLD_SHARES,
    threshold,
    update_emergence,
)
from glass.heads.measure.results import Emergence, Estimates, Head, Measurements

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


def follow(score: str, values: list[tuple[float, float]], every: int = 10) -> Emergence:
    """Return the emergence after snapshots with these scores and errors of one head."""
    measurements = None
    for number, (value, error) in enumerate(values):
        estimates = Estimates(np.array([[value]]), np.array([[error]]))
        current = Measurements(every * number, {score: estimates})
        emergence = update_emergence(measurements, current, LENGTH)
        measurements = Measurements(current.step, current.scores, emergence)
    return measurements.emergence


def follow_induction(values: list[float]) -> tuple[int | None, int | None]:
    """Return when an induction head emerged and was lost, without standard errors."""
    emergence = follow("induction", [(value, 0.0) for value in values])
    steps = (emergence.emerged, emergence.lost)
    return tuple(by_score.get("induction", {}).get(HEAD) for by_score in steps)


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
    assert follow("current_token", [*before, near, below, near]).lost == {}
    fallen = (minimum - 0.03, 0.012)
    assert follow("current_token", [*before, near, fallen]).lost == {"current_token": {HEAD: 20}}
    assert follow("current_token", [*before, fallen, near, fallen]).lost["current_token"] == {
        HEAD: 10
    }
    assert follow("current_token", [*before, fallen, *before]).lost["current_token"] == {}


@given(st.lists(st.floats(0, 1), min_size=3, max_size=30), st.floats(0, 0.1))
def test_the_date_of_an_emergence_never_moves(values, error):
    history = [(value, error) for value in values]
    dates = [
        follow("induction", history[:count]).emerged.get("induction", {}).get(HEAD)
        for count in range(1, 1 + len(history))
    ]
    known = [date for date in dates if date is not None]
    assert dates[len(dates) - len(known) :] == known and len(set(known)) <= 1
