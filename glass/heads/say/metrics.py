"""Convert measurements to flat metrics and back; no other module builds or parses their keys."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from glass.heads.measure.emergence import THRESHOLD_SHARES
from glass.heads.measure.results import (
    CompositionShare,
    Emergence,
    Estimate,
    Estimates,
    Faithfulness,
    Head,
    Measurements,
    parse_head,
)
from run.losses import is_scored

# Prefixes of the metrics that snapshots measure.
SNAPSHOT_PREFIXES = ("heads/", "emerged/", "lost/", "composition/", "probe/", "faithfulness")
# Scores that W&B charts. High values of the others, such as the distance, are not remarkable.
CHARTED_SCORES = (*THRESHOLD_SHARES, "copying")
# Measurements on random rows, each with its error.
PROBE_MEASUREMENTS = ("copying_gain", "repeated_loss", "repeated_accuracy")
COMPANION_SUFFIXES = ("_se", "_without_first")  # of the metrics that accompany a head's score
FAITHFULNESS_SETS = ("none", "circuit", "circuit_and_layer_0", "sufficient")
_HEAD_KEY = re.compile(r"((?:heads|emerged|lost)/\w+)/(L\d+H\d+)")
_COMPOSITION_KEY = re.compile(r"composition/(previous_token|induction)/(L\d+H\d+)/(\w+)/(\w+)")


# --- measurements to metrics ----------------------------------------------------------------------


def flatten(measurements: Measurements) -> dict[str, float]:
    """Convert measurements to flat metrics, without unknown values."""
    row: dict[str, float] = {}
    for score, (mean, error) in measurements.scores.items():
        row |= _flatten_table(f"heads/{score}", mean)
        if not score.endswith(COMPANION_SUFFIXES):
            row |= _flatten_table(f"heads/{score}_se", error)
    emergence = measurements.emergence
    for kind, steps in (("emerged", emergence.emerged), ("lost", emergence.lost)):
        for score, heads in steps.items():
            row |= {f"{kind}/{score}/{head}": step for head, step in heads.items()}
    for name in PROBE_MEASUREMENTS:
        if (estimate := getattr(measurements, name)) is not None:
            row |= {f"probe/{name}": estimate.value, f"probe/{name}_se": estimate.error}
    for entry in measurements.composition:
        place = f"/{entry.head}/{entry.input}/{entry.upstream}"
        for suffix, (value, error) in (("", entry.share), ("_direct", entry.direct)):
            row[f"composition/{entry.score}{suffix}{place}"] = value
            row[f"composition/{entry.score}{suffix}_se{place}"] = error
    if measurements.faithfulness is not None:
        row |= {f"circuit/{head}": 1 for head in measurements.faithfulness.circuit_heads}
        row |= {f"sufficient/{head}": 1 for head in measurements.faithfulness.sufficient_heads}
        for name in FAITHFULNESS_SETS:
            value, error = getattr(measurements.faithfulness, name)
            row |= {f"faithfulness/{name}": value, f"faithfulness_se/{name}": error}
    return {key: value for key, value in row.items() if math.isfinite(value)}


def _flatten_table(name: str, table: np.ndarray) -> dict[str, float]:
    return {f"{name}/{Head(*index)}": float(value) for index, value in np.ndenumerate(table)}


# --- metrics to measurements ----------------------------------------------------------------------


def read_gain_history(rows: list[dict]) -> dict[int, Estimate]:
    """Return the copying gain in nats/token at the step of every snapshot; nan if not measured."""
    return {
        row["step"]: _read_estimate(row, "probe/copying_gain") for row in rows if is_scored(row)
    }


def read_latest(rows: list[dict]) -> Measurements | None:
    """Return the measurements of a run's last snapshot; None if there is none."""
    row = next(filter(is_scored, reversed(rows)), None)
    return None if row is None else read_measurements(row)


def read_measurements(row: dict) -> Measurements:
    """Convert a row of metrics to measurements: the inverse of `flatten`."""
    names = [name for name in PROBE_MEASUREMENTS if f"probe/{name}" in row]
    return Measurements(
        step=row["step"],
        scores=_read_scores(row),
        emergence=Emergence(read_emergence(row, "emerged"), read_emergence(row, "lost")),
        composition=tuple(_read_composition(row)),
        faithfulness=_read_faithfulness(row),
        **{name: _read_estimate(row, f"probe/{name}") for name in names},
    )


def read_emergence(row: dict, kind: str = "emerged") -> dict[str, dict[Head, int]]:
    """Return the step at which each head emerged (or was lost, if `kind` is "lost"), by score."""
    return {
        score: {head: int(step) for head, step in steps.items()}
        for score, steps in read_head_values(row, kind).items()
    }


def read_head_values(row: dict, group: str) -> dict[str, dict[Head, float]]:
    """Return the per-head values in a row of metrics, as {score: {head: value}}.

    `group` is "heads" for the scores, "emerged" or "lost" for the steps at which that happened.
    """
    columns = _read_columns(row, group).items()
    return {score: heads for score, heads in columns if not score.endswith(COMPANION_SUFFIXES)}


def _read_columns(row: dict, group: str) -> dict[str, dict[Head, float]]:
    values: dict[str, dict[Head, float]] = defaultdict(dict)
    for key, value in row.items():
        match = _HEAD_KEY.fullmatch(key) if key.startswith(group) else None
        if match and (head := parse_head(match[2])):
            values[match[1].removeprefix(f"{group}/")][head] = value
    return dict(values)


def _read_scores(row: dict) -> dict[str, Estimates]:
    values = _read_columns(row, "heads")
    heads = {head for by_head in values.values() for head in by_head}
    shape = tuple(1 + max(indices) for indices in zip(*heads))  # (n_layer, n_head)

    def table(name: str) -> np.ndarray:
        filled = np.full(shape, np.nan)
        for head, value in values.get(name, {}).items():
            filled[head] = value
        return filled

    names = [name for name in values if not name.endswith("_se")]
    return {name: Estimates(table(name), table(f"{name}_se")) for name in names}


def _read_estimate(row: dict, name: str, place: str = "") -> Estimate:
    return Estimate(row.get(f"{name}{place}", math.nan), row.get(f"{name}_se{place}", math.nan))


def _read_composition(row: dict) -> Iterator[CompositionShare]:
    for key in row:
        match = _COMPOSITION_KEY.fullmatch(key) if key.startswith("composition/") else None
        if not match or not (head := parse_head(match[2])):
            continue
        score, name, read, upstream = match.groups()
        prefix, place = f"composition/{score}", f"/{name}/{read}/{upstream}"
        share = _read_estimate(row, prefix, place)
        direct = _read_estimate(row, f"{prefix}_direct", place)
        yield CompositionShare(score, head, read, upstream, share, direct)


def _read_faithfulness(row: dict) -> Faithfulness | None:
    if not any(f"faithfulness/{name}" in row for name in FAITHFULNESS_SETS):
        return None

    def heads_of(name: str) -> tuple[Head, ...]:
        heads = (parse_head(key.removeprefix(name)) for key in row if key.startswith(name))
        return tuple(filter(None, heads))

    shares = (_read_estimate(row, "faithfulness", f"/{name}") for name in FAITHFULNESS_SETS)
    return Faithfulness(heads_of("circuit/"), heads_of("sufficient/"), *shares)


# --- for W&B and the page -------------------------------------------------------------------------


def highest_scores(row: dict) -> dict[str, float]:
    """Return the highest score of any head in a row as `heads/<score>/max`, for W&B's charts."""
    scores = read_head_values(row, "heads")
    charted = [score for score in CHARTED_SCORES if score in scores]
    return {f"heads/{score}/max": max(scores[score].values()) for score in charted}


def head_table(row: dict) -> tuple[list[str], list[list]]:
    """Return the names of columns and a row for each head: scores, errors, steps of emergence."""
    columns = _read_columns(row, "heads")
    for kind in ("emerged", "lost"):
        columns |= {f"{kind}/{score}": heads for score, heads in _read_columns(row, kind).items()}
    heads = sorted({head for values in columns.values() for head in values})
    rows = [[str(head), *(values.get(head) for values in columns.values())] for head in heads]
    return ["head", *columns], rows


def composition_table(measurements: Measurements) -> tuple[list[str], list[list]]:
    """Return the names of columns and a row for each composition share that was measured."""
    columns = ["score", "head", "input", "upstream", "share", "share_se", "direct", "direct_se"]
    rows = [
        [entry.score, str(entry.head), entry.input, entry.upstream, *entry.share, *entry.direct]
        for entry in measurements.composition
    ]
    return columns, rows
