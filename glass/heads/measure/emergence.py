"""Detect at which snapshots of a run attention heads emerge and are lost."""

import numpy as np

from glass.heads.measure.results import Emergence, Measurements

# Thresholds, as shares of the range from the score of uniform attention to 1.
THRESHOLD_SHARES = {
    "current_token": 0.25,
    "previous_token": 0.25,
    "duplicate_token": 0.2,
    "induction": 0.2,
    "sink": 0.25,
}
# The score on control rows is subtracted from these, so uniform attention scores 0.
CONTROLLED_SCORES = ("duplicate_token", "induction")


def threshold(score: str, length: int) -> float:
    """Return the score that a head must pass, beyond its error, in windows of `length` tokens."""
    # Uniform attention of query i to any one token is 1 / (i + 1); queries begin at i = 1.
    uniform = 0.0 if score in CONTROLLED_SCORES else float((1 / np.arange(2, length + 1)).mean())
    return uniform + THRESHOLD_SHARES[score] * (1 - uniform)


def update_emergence(
    previous: Measurements | None, current: Measurements, length: int
) -> Emergence:
    """Return the steps at which heads emerged and were lost, updated with the current snapshot.

    A head emerges at the first of two snapshots in a row at which it passes the threshold; this
    step never changes later. It is lost when its score falls below the threshold by more than two
    standard errors, until it passes again. Scored windows have `length` tokens.
    """
    if previous is None:
        return Emergence()
    emerged = {score: dict(steps) for score, steps in previous.emergence.emerged.items()}
    lost = {score: dict(steps) for score, steps in previous.emergence.lost.items()}
    for score in THRESHOLD_SHARES:
        minimum = threshold(score, length)
        for head in current.scored_heads(score):
            value, error = current.score(score, head)
            value_before, error_before = previous.score(score, head)
            # Comparisons with an unknown value (nan) are False
            if value - error >= minimum:
                lost.get(score, {}).pop(head, None)
                if value_before - error_before >= minimum:
                    emerged.setdefault(score, {}).setdefault(head, previous.step)
            elif head in emerged.get(score, {}) and minimum - value > 2 * error:
                lost.setdefault(score, {}).setdefault(head, previous.step)
    return Emergence(emerged, lost)
