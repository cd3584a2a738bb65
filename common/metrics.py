"""Read and interpret the rows of a run's metrics.jsonl and samples.jsonl."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf, isfinite
from pathlib import Path
from typing import Any

from common.text import pluralize

METRICS = "metrics.jsonl"  # in a run's folder: one row per logged step
SAMPLES = "samples.jsonl"  # in a run's folder: texts that the model generated during training
# Suffixes of the metrics that accompany a head's score.
COMPANION_SUFFIXES = ("_se", "_without_first")


def read_rows(path: Path, log: Callable[[str], None] | None = None) -> list[dict]:
    """Read the rows of a metrics or samples file in order; none if it does not exist.

    A line that is not a row with a step, as after a power loss, is skipped with a note to `log`.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    if log and len(rows) < len(lines):
        log(f"note: skipped {pluralize(len(lines) - len(rows), 'invalid line')} of {path}")
    return rows


def best_row(rows: Sequence[dict]) -> dict | None:
    """Return the first row with the lowest validation loss after step 0, or None without one."""
    evaluated = [row for row in rows if row["step"] and isfinite(row.get("val/loss", inf))]
    return min(evaluated, key=lambda row: row["val/loss"], default=None)


def is_scored(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a snapshot, with scores of heads."""
    return any(key.startswith("heads/") for key in row)


def is_plotted(key: str) -> bool:
    """Return whether W&B plots a metric of a row: not one of a single head, nor a companion."""
    is_companion = any(part.endswith(COMPANION_SUFFIXES) for part in key.split("/"))
    return not is_companion and not re.search(r"/L\d+H\d+(/|$)", key)


def snapshot_steps(rows: Sequence[dict]) -> list[int]:
    """Return the steps of the snapshots."""
    return [row["step"] for row in rows if is_scored(row)]
