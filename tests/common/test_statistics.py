"""Statistics over seeds, each against an independent computation."""

from math import atan, inf, isnan, nan, pi, sqrt

import numpy as np
import pytest

from common.statistics import (
    censored_median,
    paired_difference,
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
    assert welch_difference([1.0, 1.0], [0.0, 0.0]).in_errors == inf
    assert isnan(welch_difference([1.0], [0.0, 2.0]).p_value)
    assert isnan(welch_difference([], [0.0]).value)


def test_paired_values_have_the_error_of_their_differences():
    first, second = [10.0, 20.0, 30.0], [9.0, 18.0, 27.0]
    difference = paired_difference(first, second)
    assert difference.value == 2 and difference.degrees == 2
    assert difference.error == pytest.approx(1 / sqrt(3))


def test_an_error_needs_two_finite_values():
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)
    assert isnan(standard_error([1.0])) and isnan(standard_error([1.0, nan]))


def test_a_median_counts_what_has_not_happened_as_later_than_the_end():
    assert censored_median([300, None, 400]) == 400
    assert censored_median([300, None, None]) == inf
    assert censored_median([300, 400, None, None]) == inf
    assert censored_median([300, 400]) == 350 and isnan(censored_median([]))


@pytest.mark.parametrize("difference", [0.8, 1.5])
@pytest.mark.slow
def test_the_seeds_needed_show_the_difference_in_four_of_five_sweeps(difference):
    n = seeds_needed(difference, spread=1.0)
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 20_000, n))
    pooled = np.sqrt((first.var(1, ddof=1) + second.var(1, ddof=1)) / n)
    t = (first.mean(1) + difference - second.mean(1)) / pooled
    critical = min(t for t in np.arange(1.9, 4, 0.001) if two_sided_p(t, 2 * n - 2) <= 0.05)
    assert (abs(t) >= critical).mean() == pytest.approx(0.8, abs=0.04)
    assert seeds_needed(0.0, 1.0) is None and seeds_needed(-9.0, 0.1) == 2
