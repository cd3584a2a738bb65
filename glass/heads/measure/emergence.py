"""Detect at which snapshots of a run attention heads emerge and are lost."""

from collections.abc import Iterable

import numpy as np

from run.row import Head, Row

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


def find_passing_heads(row: Row, score: str, length: int) -> list[Head]:
    """Return the heads that pass the threshold at a snapshot, strongest first."""
    minimum = threshold(score, length)
    estimates = {head: row.score(score, head) for head in row.heads(f"heads/{score}")}
    passing = [head for head, (value, error) in estimates.items() if value - error >= minimum]
    return sorted(passing, key=lambda head: -estimates[head].value)


def date_emergence(previous: Row, current: Row, length: int) -> Row:
    """Return the steps at which heads emerged and were lost, given two successive snapshots.

    A head emerges at the first of two snapshots in a row at which it passes the threshold; this
    step never changes later. It is lost when its score falls below the threshold by more than two
    standard errors, until it passes again. The previous row also has the steps of all earlier
    snapshots, and is empty at the first one. Scored windows have `length` tokens.

    Returns:
        For each head, `emerged/<score>/<head>`, the first step at which it passed, and
        `lost/<score>/<head>`, the last step before it fell, if it did not pass since.
    """
    emerged = {place: previous[f"emerged/{place}"] for place in previous.places("emerged")}
    lost = {place: previous[f"lost/{place}"] for place in previous.places("lost")}
    for score in THRESHOLD_SHARES:
        minimum = threshold(score, length)
        for head in current.heads(f"heads/{score}"):
            place = f"{score}/{head}"
            value, error = current.score(score, head)
            value_before, error_before = previous.score(score, head)
            # Comparisons with an unknown value (nan) are False.
            if value - error >= minimum:
                lost.pop(place, None)
                if value_before - error_before >= minimum:
                    emerged.setdefault(place, previous["step"])
            elif place in emerged and minimum - value > 2 * error:
                lost.setdefault(place, previous["step"])
    row = Row({f"emerged/{place}": step for place, step in emerged.items()})
    row |= {f"lost/{place}": step for place, step in lost.items()}
    return row


def date_rows(rows: Iterable[Row], length: int) -> list[Row]:
    """Return the rows of successive snapshots with the steps of `date_emergence`.

    The first one counts as step 0: nobody knows when its heads emerged.
    """
    dated: list[Row] = []
    previous = Row()
    for row in rows:
        dated.append(Row({**row, **date_emergence(previous, row, length)}))
        previous = dated[-1] if previous else Row(row, step=0)
    return dated
