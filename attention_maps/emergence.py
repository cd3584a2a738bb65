"""Decide when attention heads emerge: thresholds on their scores, followed over snapshots."""

import numpy as np

from attention_maps.results import Emergence, Head, Measurements

# A head passes a score once it has come this share of the way from what uniform attention scores
# to 1. Uniform attention scores 0 where a control is subtracted, whatever the length.
THRESHOLD_SHARES = {
    "current_token": 0.25,
    "previous_token": 0.25,
    "duplicate_token": 0.2,
    "induction": 0.2,
    "sink": 0.25,
}
CONTROLLED_SCORES = ("duplicate_token", "induction")  # their score on control is subtracted


def threshold(score: str, length: int) -> float:
    """Return the score that a head must reach, its standard error subtracted, to pass.

    Args:
        score: Name of a score in `THRESHOLD_SHARES`.
        length: Tokens of a scored window; uniform attention scores less on longer windows.
    """
    uniform = 0.0
    if score not in CONTROLLED_SCORES:
        # Uniform attention puts 1 / (i + 1) on any one token, at each query i ≥ 1.
        uniform = float((1 / np.arange(2, length + 1)).mean())
    return uniform + THRESHOLD_SHARES[score] * (1 - uniform)


def update_emergence(
    previous: Measurements | None, current: Measurements, length: int
) -> Emergence:
    """Return when heads emerged and were lost, after one more snapshot.

    A head emerges at the first snapshot at which its score minus its standard error reaches the
    threshold, if it does so at the next snapshot too. It is lost when it no longer passes.

    Args:
        previous: Measurements of the last snapshot with its emergence; None at the first.
        current: Measurements of this snapshot; its emergence is ignored.
        length: Tokens of a scored window.
    """
    if previous is None:
        return Emergence()
    emerged = {score: dict(steps) for score, steps in previous.emergence.emerged.items()}
    lost = {score: dict(steps) for score, steps in previous.emergence.lost.items()}
    for score in THRESHOLD_SHARES:
        minimum = threshold(score, length)
        for head in current.scored_heads(score):
            passed = _passes(previous, score, head, minimum)
            passes = _passes(current, score, head, minimum)
            if passed and passes:
                emerged.setdefault(score, {}).setdefault(head, previous.step)
            if passes:
                lost.get(score, {}).pop(head, None)
            elif passed and head in emerged.get(score, {}):
                lost.setdefault(score, {})[head] = previous.step
    return Emergence(emerged, lost)


def _passes(measurements: Measurements, score: str, head: Head, minimum: float) -> bool:
    value, error = measurements.score(score, head)
    return value - error >= minimum  # False if either is unknown (nan)
