"""Describe the scores of a model's heads as the data of a page."""

from collections.abc import Sequence
from typing import Any

from glass.heads.say.findings import format_emergence, summarize
from glass.page.values import finite_number, thin
from run.row import Row, last_scored_row, scored_rows

# The metrics of snapshots that the page has: all but the heads of circuits.
SNAPSHOT_PREFIXES = ("heads/", "emerged/", "lost/", "composition/", "probe/", "faithfulness")
MAX_SCORED_STEPS = 200  # steps of which the page has the scores of every head


def describe_run_scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Describe the scores of every head at every snapshot of a run, and what they show."""
    steps = [row["step"] for row in scored_rows(rows)]
    latest = last_scored_row(rows)
    return {
        "emergenceIntervals": {
            f"emerged/{place}": format_emergence(latest[f"emerged/{place}"], steps)
            for place in latest.places("emerged")
        },
        "scored": _head_metrics(rows),
        "findings": [finding._asdict() for finding in summarize(*rows)],
    }


def describe_scores(step: int, rows: Sequence[Row], text: str | None = None) -> dict[str, Any]:
    """Describe the last scores of a model at one step, without the steps at which heads emerged.

    `text` is the one on which the random tokens were predicted, None if the scores are a run's.
    """
    latest = last_scored_row(rows)
    row = {key: value for key, value in latest.items() if not key.startswith("emerged/")}
    return {
        "emergenceIntervals": {},
        "scoredText": text,
        "scored": _head_metrics([Row(row, step=step)]),
        "findings": [finding._asdict() for finding in summarize(*rows)],
    }


def _head_metrics(rows: Sequence[Row]) -> dict[str, Any]:
    scored = thin(scored_rows(rows), MAX_SCORED_STEPS)
    keys = dict.fromkeys(key for row in scored for key in row if key.startswith(SNAPSHOT_PREFIXES))
    return {
        "steps": [row["step"] for row in scored],
        "columns": {key: [finite_number(row.get(key), 4) for row in scored] for key in keys},
    }
