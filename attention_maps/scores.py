"""What each head does, as numbers: pure functions of its attention weights A[i, j], query i on key j."""

import numpy as np

from attention_maps.capture import Snapshot


def previous_token(A: np.ndarray) -> np.ndarray:
    """Mean over i ≥ 1 of A[i, i-1]; A (…, T, T) gives (…)."""
    return np.diagonal(A, offset=-1, axis1=-2, axis2=-1).mean(axis=-1)


def sink(A: np.ndarray) -> np.ndarray:
    """Attention to the first token, mean over i ≥ 1 of A[i, 0] (Gu et al. 2024, arXiv 2410.10781)."""
    return A[..., 1:, 0].mean(axis=-1)


def entropy(A: np.ndarray) -> np.ndarray:
    """Mean over i ≥ 1 of the entropy of A[i, :i+1] over log(i + 1): 0 on one token, 1 on all alike."""
    A = A.astype(np.float64)
    row = -(A * np.log(np.where(A > 0, A, 1.0))).sum(axis=-1)  # (…, T) nats
    return (row[..., 1:] / np.log(np.arange(2, A.shape[-1] + 1))).mean(axis=-1)


def distance(A: np.ndarray) -> np.ndarray:
    """Mean over i of Σ_j A[i, j] (i - j), in tokens."""
    at = np.arange(A.shape[-1])
    return (A * (at[:, None] - at)).sum(axis=-1).mean(axis=-1)


def second_occurrence(A: np.ndarray, periods: np.ndarray, shift: int) -> np.ndarray:
    """Mean attention of a second occurrence to the token `shift` after its first; A (…, P, H, T, T) gives (…, H).

    In row r of the texts, tokens periods[r] … 2·periods[r] - 1 are the second occurrences.
    """
    rows = []
    for r, period in enumerate(periods):
        i = np.arange(period, 2 * period)
        rows.append(A[..., r, :, i, i - period + shift].mean(axis=0))  # the index arrays' axis comes first
    return np.mean(rows, axis=0)


def duplicate_token(repeat: np.ndarray, control: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Attention of a second occurrence to the first, less the same reading where nothing repeats."""
    return second_occurrence(repeat, periods, 0) - second_occurrence(control, periods, 0)


def induction(repeat: np.ndarray, control: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Prefix matching (Olsson et al. 2022): attention of a second occurrence to the token after the first,
    less the same reading where nothing repeats, so that a head which goes by distance scores 0."""
    return second_occurrence(repeat, periods, 1) - second_occurrence(control, periods, 1)


def score_heads(s: Snapshot) -> dict[str, np.ndarray]:
    """Every score of every query head: name → (L, H)."""
    return {
        "previous_token": previous_token(s.text),
        "duplicate_token": duplicate_token(s.repeat, s.control, s.periods),
        "induction": induction(s.repeat, s.control, s.periods),
        "sink": sink(s.text),
        "entropy": entropy(s.text),
        "distance": distance(s.text),
    }


def named(scores: dict[str, np.ndarray]) -> dict[str, float]:
    """The scores as metrics: `heads/<score>/L<layer>H<head>`, counted from 0."""
    return {f"heads/{name}/L{layer}H{head}": float(value)
            for name, table in scores.items() for (layer, head), value in np.ndenumerate(table)}


# A head is one of its kind from here on: several times what even attention gives on the probes (0.1 at 48 tokens).
THRESHOLDS = {"previous_token": 0.3, "duplicate_token": 0.2, "induction": 0.2, "sink": 0.3}
STAYS = 2  # snapshots, the one of the birth included


def births(rows: list[dict]) -> dict[str, int]:
    """The step at which each head was born to each kind: the first from which its score stays at the threshold or above for
    STAYS snapshots. `births/<score>/L<layer>H<head>` → step, for those that were, from rows of metrics in their order."""
    born, since = {}, {}
    for row in rows:
        for key, value in row.items():
            _, _, rest = key.partition("heads/")
            score = rest.partition("/")[0]
            if score not in THRESHOLDS or rest in born:
                continue
            if value < THRESHOLDS[score]:
                since.pop(rest, None)
                continue
            first, count = since.get(rest, (row["step"], 0))
            since[rest] = first, count + 1
            if count + 1 >= STAYS:
                born[rest] = first
    return {f"births/{name}": step for name, step in born.items()}
