"""Statistics over the seeds of an experiment: errors, tests, and times that may be censored."""

from collections.abc import Sequence
from math import atan, ceil, comb, cos, exp, hypot, inf, isfinite, lgamma, nan, pi, sqrt
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

import numpy as np

# The test for which `seeds_needed` plans: the two-sided level, and the probability to pass it.
SIGNIFICANCE_LEVEL = 0.05
POWER = 0.8
INTEGRATION_STEPS = 1000  # even, for Simpson's rule


class Difference(NamedTuple):
    """A difference of two means."""

    value: float
    error: float  # standard error; nan if there are fewer than two seeds
    degrees: float  # degrees of freedom of Student's t; nan without an error

    @property
    def in_errors(self) -> float:
        """The difference in units of its standard error: Student's t."""
        if self.error == 0:
            return inf if self.value > 0 else -inf if self.value else 0.0
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


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Σ numerators / Σ denominators over the last axis, and its standard error."""
    n, total = denominators.shape[-1], denominators.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = numerators.sum(axis=-1) / total
        squares = ((numerators - share[..., None] * denominators) ** 2).sum(axis=-1)
        return share, np.sqrt(squares * n / np.float64(n - 1)) / np.abs(total)


def welch_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean of `first` minus that of `second`, for independent samples (Welch 1947)."""
    if not first or not second:
        return Difference(nan, nan, nan)
    errors = standard_error(first), standard_error(second)
    error = hypot(*errors)
    degrees = nan
    if error > 0:
        shares = [(e / error) ** 4 / (len(v) - 1) for e, v in zip(errors, (first, second))]
        degrees = 1 / sum(shares)
    return Difference(fmean(first) - fmean(second), error, degrees)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean of the differences between values that belong to the same seeds."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = fmean(differences) if differences else nan
    return Difference(mean, standard_error(differences), len(differences) - 1)


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability that |Student's t| is at least |t|."""
    if not isfinite(t):
        return 0.0 if abs(t) == inf else nan
    if not degrees > 0:
        return nan if t else 1.0
    start = atan(abs(t) / sqrt(degrees))
    width = (pi / 2 - start) / INTEGRATION_STEPS
    weights = [1, *(4, 2) * (INTEGRATION_STEPS // 2 - 1), 4, 1]  # Simpson's rule
    heights = [max(0.0, cos(start + k * width)) ** (degrees - 1) for k in range(len(weights))]
    tail = width / 3 * sum(w * h for w, h in zip(weights, heights))
    half = exp(lgamma(degrees / 2) - lgamma((degrees + 1) / 2)) * sqrt(pi) / 2
    return min(1.0, tail / half)


def proportion_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95% interval of a proportion, from `count` successes in `total` trials.

    Reference: Clopper and Pearson 1934, "The use of confidence or fiducial limits".
    """

    def solve(min_count: int, probability: float) -> float:
        """Return the proportion at which `min_count` or more successes have this probability."""
        low, high = 0.0, 1.0
        for _ in range(50):
            p = (low + high) / 2
            counts = range(min_count, total + 1)
            reached = sum(comb(total, k) * p**k * (1 - p) ** (total - k) for k in counts)
            low, high = (p, high) if reached < probability else (low, p)
        return high

    tail = SIGNIFICANCE_LEVEL / 2
    return solve(count, tail), solve(count + 1, 1 - tail)


def censored_median(times: Sequence[float | None]) -> float:
    """Return the median of times, where None is an event that had not happened by the end.

    It is inf unless more than half have happened. The mean of those that have would be too early.
    """
    return median(inf if time is None else time for time in times) if times else nan


def seeds_needed(difference: float, spread: float) -> int | None:
    """Return how many seeds per setting would show a difference of two means.

    A two-sided t-test is to find p < `SIGNIFICANCE_LEVEL` with probability `POWER`. `spread` is the
    standard deviation between seeds. Returns None if the difference is 0 or a value is not finite.

    Reference: Guenther 1981, "Sample size formulas for normal theory t tests".
    """
    if not difference or not isfinite(difference) or not isfinite(spread):
        return None
    z = NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / 2)
    ratio = (z + NormalDist().inv_cdf(POWER)) * spread / difference
    return max(2, ceil(2 * ratio**2 + z**2 / 4))
