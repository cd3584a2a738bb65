"""Statistics over seeds, each against an independent computation."""

from math import atan, inf, isnan, nan, pi, sqrt

import numpy as np
import pytest

from common.statistics import (
    censored_median,
    mean_difference,
    proportion_interval,
    seeds_needed,
    standard_error,
    two_sided_p,
    welch_difference,
)


@pytest.mark.parametrize("t", [0.0, 0.3, -1.7, 5.0, 28.0])
def test_students_t_agrees_with_its_closed_forms(t):
    assert two_sided_p(t, 1) == pytest.approx(1 - 2 * atan(abs(t)) / pi)
    assert two_sided_p(t, 2) == pytest.approx(1 - abs(t) / sqrt(2 + t * t))


def test_welchs_difference_has_the_errors_of_both_samples():
    first, second = [1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.0]
    difference = welch_difference(first, second)
    a, b = np.var(first, ddof=1) / 4, np.var(second, ddof=1) / 3
    assert difference.value == pytest.approx(0.0)
    assert difference.error == pytest.approx(sqrt(a + b))
    assert difference.degrees == pytest.approx((a + b) ** 2 / (a**2 / 3 + b**2 / 2))
    assert isnan(welch_difference([1.0], [0.0, 2.0]).p_value)
    assert isnan(welch_difference([], [0.0]).value)


def test_paired_values_have_the_error_of_their_differences():
    difference = mean_difference([1.0, 2.0, 3.0])
    assert difference.value == 2 and difference.degrees == 2
    assert difference.error == pytest.approx(1 / sqrt(3))


def test_an_error_needs_two_finite_values():
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)
    assert isnan(standard_error([1.0])) and isnan(standard_error([1.0, nan]))


def test_the_interval_of_a_proportion_has_its_closed_forms_and_is_symmetric():
    one_sided = 0.025 ** (1 / 5)
    assert proportion_interval(5, 5) == pytest.approx((one_sided, 1))
    assert proportion_interval(0, 5) == pytest.approx((0, 1 - one_sided))
    assert proportion_interval(12, 15) == pytest.approx((0.5191, 0.9567), abs=1e-4)
    assert proportion_interval(3, 15) == pytest.approx((1 - 0.9567, 1 - 0.5191), abs=1e-4)


def test_a_median_counts_what_has_not_happened_as_later_than_the_end():
    assert censored_median([300, None, 400]) == 400
    assert censored_median([300, None, None]) == inf
    assert censored_median([300, 400, None, None]) == inf
    assert censored_median([300, 400]) == 350 and isnan(censored_median([]))


@pytest.mark.parametrize(("difference", "n"), [(0.5, 64), (0.8, 26), (1.0, 17), (1.2, 12)])
def test_the_seeds_needed_are_those_of_a_table(difference, n):
    """Of Cohen 1988, "Statistical Power Analysis", for a power of 0.8 at a level of 0.05."""
    assert seeds_needed(-difference * 3, spread=3.0) == n
    assert seeds_needed(9.0, 0.1) == 2
    assert seeds_needed(0.0, 1.0) is seeds_needed(1.0, nan) is seeds_needed(inf, 1.0) is None


@pytest.mark.parametrize(
    ("first", "second", "in_errors", "p_value"),
    [
        ([1.0, 1.0], [0.0, 0.0], inf, 0),
        ([0.0, 0.0], [1.0, 1.0], -inf, 0),
        ([1.0] * 2,) * 2 + (0, 1),
    ],
)
def test_values_without_any_error_differ_certainly_or_not_at_all(first, second, in_errors, p_value):
    difference = welch_difference(first, second)
    assert (difference.in_errors, difference.p_value) == (in_errors, p_value)
