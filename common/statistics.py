"""Statistics over the seeds of an experiment: errors, tests, and times that may be censored."""

from bisect import bisect_left
from collections.abc import Sequence
from math import atan, ceil, comb, copysign, exp, inf, isfinite, isinf, isnan, lgamma, nan, pi, sqrt
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

import numpy as np

# The test for which `seeds_needed` plans: the two-sided level, and the probability to pass it.
SIGNIFICANCE_LEVEL = 0.05
POWER = 0.8
INTEGRATION_POINTS = 10_001
PROPORTIONS = 1 << 50  # that are told apart


class Difference(NamedTuple):
    """A difference of two means."""

    value: float
    error: float  # standard error; nan if there are fewer than two seeds
    degrees: float  # degrees of freedom of Student's t; nan without an error

    @property
    def in_errors(self) -> float:
        """The difference in units of its standard error: Student's t."""
        if self.error == 0:
            return copysign(inf, self.value) if self.value else 0.0
        return self.value / self.error

    @property
    def p_value(self) -> float:
        """Two-sided probability of a difference at least this large if the true means are equal."""
        return two_sided_p(self.in_errors, self.degrees)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, or nan unless there are two values, all finite."""
    if len(values) < 2 or not all(map(isfinite, values)):
        return nan
    return stdev(values) / sqrt(len(values))


def ratio_with_error(
    numerators: np.ndarray, denominators: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return Σ numerators / Σ denominators over the last axis, and its standard error."""
    n = np.float64(denominators.shape[-1])
    total = denominators.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = numerators.sum(axis=-1) / total
        residuals = numerators - share[..., None] * denominators
        error = np.sqrt((residuals**2).sum(axis=-1) * n / (n - 1)) / np.abs(total)
    return share, error


def welch_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean of `first` minus that of `second`, for independent samples (Welch 1947)."""
    if not first or not second:
        return Difference(nan, nan, nan)
    difference = fmean(first) - fmean(second)
    first_variance = standard_error(first) ** 2
    second_variance = standard_error(second) ** 2
    variance = first_variance + second_variance
    if not variance > 0:
        return Difference(difference, sqrt(variance), nan)
    spread_of_variance = first_variance**2 / (len(first) - 1)
    spread_of_variance += second_variance**2 / (len(second) - 1)
    return Difference(difference, sqrt(variance), variance**2 / spread_of_variance)


def mean_difference(differences: Sequence[float]) -> Difference:
    """Return the mean of the differences between values that belong to the same seeds."""
    mean = fmean(differences) if differences else nan
    return Difference(mean, standard_error(differences), len(differences) - 1)


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability that |Student's t| is at least |t|.

    With t = √degrees · tan(angle), its density is proportional to cos(angle) ** (degrees - 1).
    """
    if isinf(t):
        return 0.0
    if isnan(t):
        return nan
    if not degrees > 0:  # unknown, because the values have no error
        return nan if t else 1.0
    angles = np.linspace(atan(abs(t) / sqrt(degrees)), pi / 2, INTEGRATION_POINTS)
    tail = np.trapezoid(np.cos(angles) ** (degrees - 1), angles)
    half = exp(lgamma(degrees / 2) - lgamma((degrees + 1) / 2)) * sqrt(pi) / 2
    return min(1.0, float(tail) / half)


def proportion_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95% interval of a proportion, from `count` successes in `total` trials.

    Reference: Clopper and Pearson 1934, "The use of confidence or fiducial limits".
    """
    tail = SIGNIFICANCE_LEVEL / 2
    low = _find_proportion(count, total, tail)
    high = _find_proportion(count + 1, total, 1 - tail)
    return low, high


def _find_proportion(min_count: int, total: int, probability: float) -> float:
    """Return the proportion at which `min_count` or more successes have this probability."""

    def tail(numerator: int) -> float:
        p = numerator / PROPORTIONS
        counts = range(min_count, total + 1)
        return sum(comb(total, count) * p**count * (1 - p) ** (total - count) for count in counts)

    return bisect_left(range(PROPORTIONS), probability, key=tail) / PROPORTIONS


def censored_median(times: Sequence[float | None]) -> float:
    """Return the median of times, where None is an event that had not happened by the end.

    It is inf unless more than half have happened. The mean of those that have would be too early.
    """
    if not times:
        return nan
    return median(inf if time is None else time for time in times)


def seeds_needed(difference: float, spread: float) -> int | None:
    """Return how many seeds per setting would show a difference of two means.

    A two-sided t-test is to find p < `SIGNIFICANCE_LEVEL` with probability `POWER`. `spread` is the
    standard deviation between seeds. Returns None if the difference is 0 or a value is not finite.

    Reference: Guenther 1981, "Sample size formulas for normal theory t tests".
    """
    if not difference or not isfinite(difference) or not isfinite(spread):
        return None
    z_level = NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / 2)
    z_power = NormalDist().inv_cdf(POWER)
    spread_per_difference = (z_level + z_power) * spread / difference
    return max(2, ceil(2 * spread_per_difference**2 + z_level**2 / 4))
