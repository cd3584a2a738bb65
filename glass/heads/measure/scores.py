"""Scores of attention heads, computed from the attention pattern A[i, j] (query i, key j).

A score is the mean of readings: one per window of the text, or one per row of random tokens. Its
standard error is that of this mean. docs/definitions.md defines every score.
"""

import numpy as np


def current_token(A: np.ndarray) -> np.ndarray:
    """Return the attention to the query's own token, A[i, i] for i ≥ 1: (…, T, T) → (…, T - 1)."""
    return np.diagonal(A, axis1=-2, axis2=-1)[..., 1:]


def previous_token(A: np.ndarray) -> np.ndarray:
    """Return the attention to the previous token, A[i, i-1] for i ≥ 1: (…, T, T) → (…, T - 1)."""
    return np.diagonal(A, offset=-1, axis1=-2, axis2=-1)


def sink(A: np.ndarray) -> np.ndarray:
    """Return the attention to the first token, A[i, 0] for i ≥ 1: (…, T, T) → (…, T - 1).

    Reference: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; Gu et
    al. 2024, "When Attention Sink Emerges in Language Models".
    """
    return A[..., 1:, 0]


def entropy(A: np.ndarray, has_sink: bool = False) -> np.ndarray:
    """Return the entropy of A[i, :i+1] over log(i + 1) for i ≥ 1: (…, T, T) → (…, T - 1).

    It is 0 if all attention is on one token, and 1 if it is uniform. With `has_sink`, what the
    weights lack to 1 is one more outcome, and the entropy is over log(i + 2).
    """
    A = A.astype(np.float64)
    outcomes = np.arange(1, A.shape[-1] + 1)  # of each query
    if has_sink:
        A = np.concatenate((A, 1 - A.sum(axis=-1, keepdims=True)), axis=-1)
        outcomes += 1
    nats = -(A * np.log(np.where(A > 0, A, 1.0))).sum(axis=-1)  # (…, T)
    return nats[..., 1:] / np.log(outcomes[1:])


def distance(A: np.ndarray) -> np.ndarray:
    """Return the mean distance attended to, Σ_j A[i, j] (i - j), in tokens: (…, T, T) → (…, T).

    The weight of a sink logit counts as a distance of 0.
    """
    positions = np.arange(A.shape[-1])
    return (A * (positions[:, None] - positions)).sum(axis=-1)


def second_occurrence_attention(
    repeated: np.ndarray, control: np.ndarray, periods: np.ndarray, shift: int
) -> np.ndarray:
    """Return the attention (…, H, P) of second occurrences to the token `shift` after their first.

    In a row of `repeated` (…, P, H, T, T) with period p, tokens p … 2p - 1 repeat tokens 0 … p - 1.
    The attention at the same places of the `control` row is subtracted.
    """
    readings = []
    for row, period in enumerate(periods):
        queries = np.arange(period, 2 * period)
        keys = queries - period + shift
        # This indexing moves the axis of the queries to the front.
        on_repeated = repeated[..., row, :, queries, keys].mean(axis=0)
        readings.append(on_repeated - control[..., row, :, queries, keys].mean(axis=0))
    return np.stack(readings, axis=-1)


def duplicate_token(repeated: np.ndarray, control: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Return the attention of second occurrences to their first, minus that on control, (…, H, P).

    Reference: Wang et al. 2022, "Interpretability in the Wild".
    """
    return second_occurrence_attention(repeated, control, periods, shift=0)


def induction(repeated: np.ndarray, control: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Return the prefix-matching score, (…, H, P): 0 for a purely positional head.

    It is the attention of second occurrences to the token after their first, minus that on control.

    Reference: Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    return second_occurrence_attention(repeated, control, periods, shift=1)


def copying_gains(
    repeated_loss: np.ndarray, reshuffled_loss: np.ndarray, periods: np.ndarray
) -> np.ndarray:
    """Return the in-context copying gain of each row in nats/token, (P,), from losses (P, T).

    It is the mean loss on a reshuffled second half minus the mean loss on an exact repeat. Neither
    includes the first token of the half, which is unpredictable in both.

    Reference: cf. Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    return second_half_means(reshuffled_loss - repeated_loss, periods)


def second_half_means(values: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Average the values (P, T) of the predictions within the second half of each row, (P,)."""
    return np.array([values[row, p : 2 * p - 1].mean() for row, p in enumerate(periods)])


def without_first_token(A: np.ndarray) -> np.ndarray:
    """Remove the first token from A and renormalize each row: (…, T, T) → (…, T - 1, T - 1).

    A row becomes nan if all its attention was on the first token.
    """
    A = A[..., 1:, 1:].astype(np.float64)
    with np.errstate(invalid="ignore"):
        return A / A.sum(axis=-1, keepdims=True)


def readings(
    windows: np.ndarray,
    repeated: np.ndarray | None,
    control: np.ndarray | None,
    periods: np.ndarray,
    has_sink: bool = False,
) -> dict[str, np.ndarray]:
    """Compute the readings (L, H, W or P) of all scores that need attention patterns only.

    The patterns are those on W windows of text (L, W, H, T, T), and on P repeated and P control
    rows (L, P, H, T_r, T_r), if there are any.
    """
    renormalized = without_first_token(windows)
    by_query = {  # (L, W, H, T) each
        "current_token": current_token(windows),
        "previous_token": previous_token(windows),
        "sink": sink(windows),
        "entropy": entropy(windows, has_sink),
        "distance": distance(windows),
        "previous_token_without_first": previous_token(renormalized),
        "entropy_without_first": entropy(renormalized),
        "distance_without_first": distance(renormalized),
    }
    taken = {name: mean_and_error(values)[0].swapaxes(1, 2) for name, values in by_query.items()}
    if repeated is not None and control is not None:
        taken["duplicate_token"] = duplicate_token(repeated, control, periods)
        taken["induction"] = induction(repeated, control, periods)
    return taken


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over the last axis and its standard error, ignoring nan; nan if unknown."""
    n = (~np.isnan(values)).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis=-1, dtype=np.float64) / n
        squares = np.nansum((values - mean[..., None]) ** 2, axis=-1, dtype=np.float64)
        return mean, np.sqrt(squares / (n - 1) / n)
