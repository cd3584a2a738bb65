"""Scores against their written-out definitions; standard errors against a bootstrap."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glass.heads.measure import scores
from run.row import Estimate


def periods(length: int) -> np.ndarray:
    return np.array([length // 4, length // 2])


def test_the_weight_of_a_sink_logit_is_one_more_outcome():
    A = np.tril(np.ones((8, 8))) / np.arange(2, 10)[:, None]  # uniform, over the sink too
    assert scores.entropy(A, has_sink=True) == pytest.approx(1)
    assert scores.entropy(0 * A, has_sink=True) == pytest.approx(0)
    half = scores.entropy(np.eye(8) / 2, has_sink=True)
    assert half == pytest.approx(np.log(2) / np.log(np.arange(3, 10)))


def test_the_copying_gain_compares_a_reshuffled_with_an_exact_repeat():
    rng, periods = np.random.default_rng(0), np.array([3, 5])
    repeated, reshuffled = rng.random((2, 2, 10))  # [r, i]: loss of the token after i
    gains = [
        np.mean([reshuffled[r, p + k - 1] - repeated[r, p + k - 1] for k in range(1, p)])
        for r, p in enumerate(periods)
    ]
    gain = Estimate(*scores.mean_and_error(scores.copying_gains(repeated, reshuffled, periods)))
    assert gain.value == pytest.approx(np.mean(gains))
    assert gain.error == pytest.approx(np.std(gains, ddof=1) / np.sqrt(2))
    assert not Estimate(*scores.mean_and_error(np.array([0.5]))).is_known


@given(st.integers(0, 10_000))
def test_scores_equal_their_written_out_definitions(seed):
    rng, T = np.random.default_rng(seed), 24
    A = np.tril(rng.random((2, 2, 3, T, T)))  # (L, W, H, T, T)
    A /= A.sum(axis=-1, keepdims=True)
    R, C = (np.tril(rng.random((2, 2, 3, T, T))) for _ in range(2))
    found = {
        name: values[1, 2, 1] for name, values in scores.readings(A, R, C, periods(T)).items()
    }  # of the second window, or text
    one = A[1, 1, 2]
    assert found["current_token"] == pytest.approx(np.mean([one[i, i] for i in range(1, T)]))
    assert found["previous_token"] == pytest.approx(np.mean([one[i, i - 1] for i in range(1, T)]))
    assert found["sink"] == pytest.approx(np.mean([one[i, 0] for i in range(1, T)]))
    by_hand = [sum(one[i, j] * (i - j) for j in range(i + 1)) for i in range(T)]
    assert found["distance"] == pytest.approx(np.mean(by_hand))
    rows = [one[i, : i + 1] for i in range(1, T)]
    by_hand = [-(row * np.log(row)).sum() / np.log(len(row)) for row in rows]
    assert found["entropy"] == pytest.approx(np.mean(by_hand))
    for name, shift in (("duplicate_token", 0), ("induction", 1)):
        p = periods(T)[1]
        by_hand = [
            R[1, 1, 2, i, i - p + shift] - C[1, 1, 2, i, i - p + shift] for i in range(p, 2 * p)
        ]
        assert found[name] == pytest.approx(np.mean(by_hand))
    left = one[1:, 1:] / one[1:, 1:].sum(axis=-1, keepdims=True)
    by_hand = np.mean([left[i, i - 1] for i in range(1, T - 1)])
    assert found["previous_token_without_first"] == pytest.approx(by_hand)


def test_standard_errors_are_those_of_a_bootstrap():
    rng = np.random.default_rng(0)
    values = rng.gamma(0.5, 0.3, (3, 4, 16))
    drawn = values[..., rng.integers(0, 16, (5000, 16))].mean(axis=-1)  # (3, 4, 5000)
    # A bootstrap's variance is the readings' over n, where the standard error's is over n - 1.
    expected = drawn.std(axis=-1) * np.sqrt(16 / 15)
    assert scores.mean_and_error(values)[1] == pytest.approx(expected, rel=0.05)
    assert np.isnan(scores.mean_and_error(values[..., :1])[1]).all()
