"""What each head does, as numbers: functions of its attention weights A[i, j], query i on key j. A
score is the mean of readings, one for each window of the text, or for each of the random texts; its
standard error is that of this mean."""

import numpy as np

from common.metrics import COMPANION_SUFFIXES

Tables = dict[str, tuple[np.ndarray, np.ndarray]]  # name → values and standard errors, (L, H) each


def current_token(A: np.ndarray) -> np.ndarray:
    """A[i, i] of each i ≥ 1; A (…, T, T) gives (…, T - 1)."""
    return np.diagonal(A, axis1=-2, axis2=-1)[..., 1:]


def previous_token(A: np.ndarray) -> np.ndarray:
    """A[i, i-1] of each i ≥ 1; A (…, T, T) gives (…, T - 1)."""
    return np.diagonal(A, offset=-1, axis1=-2, axis2=-1)


def sink(A: np.ndarray) -> np.ndarray:
    """Attention to the first token, A[i, 0] of each i ≥ 1 (Gu et al. 2024, arXiv 2410.10781)."""
    return A[..., 1:, 0]


def entropy(A: np.ndarray) -> np.ndarray:
    """Entropy of A[i, :i+1] over log(i + 1), of each i ≥ 1: 0 on one token, 1 on all alike."""
    A = A.astype(np.float64)
    row = -(A * np.log(np.where(A > 0, A, 1.0))).sum(axis=-1)  # (…, T) nats
    return row[..., 1:] / np.log(np.arange(2, A.shape[-1] + 1))


def distance(A: np.ndarray) -> np.ndarray:
    """Σ_j A[i, j] (i - j) of each i, in tokens; A (…, T, T) gives (…, T)."""
    at = np.arange(A.shape[-1])
    return (A * (at[:, None] - at)).sum(axis=-1)


def second_occurrence(A: np.ndarray, periods: np.ndarray, shift: int) -> np.ndarray:
    """Mean attention of a second occurrence to the token `shift` after its first, in each text:
    A (…, P, H, T, T) gives (…, H, P).

    In row r of the texts, tokens periods[r] … 2·periods[r] - 1 are the second occurrences."""
    rows = []
    for r, period in enumerate(periods):
        i = np.arange(period, 2 * period)
        rows.append(A[..., r, :, i, i - period + shift].mean(axis=0))  # the axis of i comes first
    return np.stack(rows, axis=-1)


def duplicate_token(repeat: np.ndarray, control: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Attention of a second occurrence to the first, less the same where nothing repeats."""
    return second_occurrence(repeat, periods, 0) - second_occurrence(control, periods, 0)


def induction(repeat: np.ndarray, control: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Prefix matching (Olsson et al. 2022): attention of a second occurrence to the token after the
    first, less the same reading where nothing repeats: a head that goes by distance scores 0."""
    return second_occurrence(repeat, periods, 1) - second_occurrence(control, periods, 1)


def copying_gains(repeat: np.ndarray, reshuffled: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """How many nats less the second occurrences of each row (P,) cost where they come in the order
    of the first than in another, of the losses (P, T) of the token after each.

    In row r tokens 1 … periods[r] - 1 come again; the first has nothing before it that could tell.
    """
    return np.array(
        [(reshuffled[r] - repeat[r])[p : 2 * p - 1].mean() for r, p in enumerate(periods)]
    )


def probed(readings: dict[str, np.ndarray]) -> dict[str, float]:
    """Readings (n,) as metrics: the mean `probe/<name>` and its error, where they are known."""
    found = {name: mean_and_error(values) for name, values in readings.items()}
    return {
        f"probe/{name}{end}": float(value)
        for name, both in found.items()
        for end, value in zip(("", "_se"), both)
        if not np.isnan(value)
    }


def without_first(A: np.ndarray) -> np.ndarray:
    """Maps (…, T - 1, T - 1) without the first token, rows made to sum to 1 again, or of nan."""
    A = A[..., 1:, 1:].astype(np.float64)
    with np.errstate(invalid="ignore"):
        return A / A.sum(axis=-1, keepdims=True)


def tables(
    windows: np.ndarray, repeat: np.ndarray, control: np.ndarray, periods: np.ndarray
) -> Tables:
    """Every score of the maps that `readings` takes, and its standard error."""
    found = readings(windows, repeat, control, periods)
    return {name: mean_and_error(values) for name, values in found.items()}


def readings(
    windows: np.ndarray, repeat: np.ndarray, control: np.ndarray, periods: np.ndarray
) -> dict[str, np.ndarray]:
    """Every score's readings, name → (L, H, n). Of maps of windows (L, W, H, T, T), repeat and
    control (L, P, H, T_r, T_r), periods (P,)."""
    past = without_first(windows)
    queries = {  # (L, W, H, T) each
        "current_token": current_token(windows),
        "previous_token": previous_token(windows),
        "sink": sink(windows),
        "entropy": entropy(windows),
        "distance": distance(windows),
        "previous_token_without_first": previous_token(past),
        "entropy_without_first": entropy(past),
        "distance_without_first": distance(past),
    }
    found = {name: mean_and_error(values)[0].swapaxes(1, 2) for name, values in queries.items()}
    if len(periods):
        found |= {
            "duplicate_token": duplicate_token(repeat, control, periods),
            "induction": induction(repeat, control, periods),
        }
    return found


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the last axis and its standard error; nan where there are too few for it."""
    n = (~np.isnan(values)).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis=-1, dtype=np.float64) / n
        square = np.nansum((values - mean[..., None]) ** 2, axis=-1, dtype=np.float64)
        return mean, np.sqrt(square / (n - 1) / n)


def ratio(values: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Σ values / Σ whole over the last axis, and the standard error of that ratio."""
    n, total = whole.shape[-1], whole.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = values.sum(axis=-1) / total
        apart = ((values - share[..., None] * whole) ** 2).sum(axis=-1)
        return share, np.sqrt(apart * n / np.float64(n - 1)) / np.abs(total)


def own(tables: Tables) -> Tables:
    """The scores themselves, without what is recorded beside them."""
    return {name: table for name, table in tables.items() if not name.endswith(COMPANION_SUFFIXES)}


def as_metrics(tables: Tables) -> dict[str, float]:
    """All values, and the errors of the scores themselves, as `heads/<name>/L<layer>H<head>`."""
    found = {name: mean for name, (mean, _) in tables.items()}
    found |= {f"{name}_se": error for name, (_, error) in own(tables).items()}
    return {
        f"heads/{name}/L{layer}H{head}": float(value)
        for name, table in found.items()
        for (layer, head), value in np.ndenumerate(table)
        if not np.isnan(value)
    }


# A head is one of its kind where its score has come this share of the way from what even attention
# gives to 1. What is less a control is 0 for even attention, at any length.
SHARES = {
    "current_token": 0.25,
    "previous_token": 0.25,
    "duplicate_token": 0.2,
    "induction": 0.2,
    "sink": 0.25,
}


def threshold(score: str, length: int) -> float:
    """The score, less its standard error, from which a head is of a kind, at `length` tokens."""
    # Attention spread evenly gives any one token 1 / (i + 1) of each i ≥ 1.
    even = (
        0.0
        if score in ("duplicate_token", "induction")
        else float((1 / np.arange(2, length + 1)).mean())
    )
    return even + SHARES[score] * (1 - even)


def births(before: dict, now: dict, length: int) -> dict[str, int]:
    """The step at which each head was born to each kind, `emerged/<score>/L<layer>H<head>` → step,
    and `lost/…` → the last step at which it was of that kind, for one that is so no more.

    A head is born at the first snapshot at which its score less its standard error is at the
    threshold, if that holds at the next snapshot too. before, now: metrics of the last snapshot,
    with the births up to then, and of this one; length: tokens of the scored windows."""

    def passes(row: dict, score: str, head: str) -> bool:
        error = row.get(f"heads/{score}_se/{head}", np.inf)
        return row.get(f"heads/{score}/{head}", 0) - error >= threshold(score, length)

    told = {key: step for key, step in before.items() if key.startswith(("emerged/", "lost/"))}
    for key in now:
        kind, _, rest = key.partition("/")
        score, _, head = rest.partition("/")
        if kind != "heads" or score not in SHARES:
            continue
        passed, does = (passes(row, score, head) for row in (before, now))
        if passed and does:
            told.setdefault(f"emerged/{rest}", before["step"])
        if does:
            told.pop(f"lost/{rest}", None)
        elif passed and f"emerged/{rest}" in told:
            told[f"lost/{rest}"] = before["step"]
    return told
