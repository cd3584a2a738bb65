"""Read and interpret the rows of a run's metrics.jsonl and samples.jsonl."""

import json
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path

from common.files import ordinary_file

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # in a run's folder
TOO_LARGE = 1e300  # of a number in a row: what is reckoned from larger ones is no float any more
# What ends the names of metrics that stand beside a score of heads.
COMPANION_SUFFIXES = ("_se", "_without_first")


def read_rows(path: Path, log: Callable[[str], None] | None = None) -> list[dict]:
    """The rows of a metrics or samples file, in order; `log` is told of lines that are none."""
    lines = ordinary_file(path).read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = [row for line in lines if (row := parse_row(line)) is not None]
    if log and len(rows) < len(lines):
        log(f"note: {path} has {len(lines) - len(rows)} lines that are no rows, and are left out")
    return rows


def parse_row(line: bytes) -> dict | None:
    """The row in a line: an object with a step, whose values are numbers, or a text."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    numbers = [value for key, value in row.items() if key != "text" or not isinstance(value, str)]
    fine = all(
        type(value) in (int, float) and not TOO_LARGE <= abs(value) < inf for value in numbers
    )
    return row if fine else None


def best_row(rows: list[dict]) -> dict | None:
    """The row with the lowest validation loss of a trained model, the first of equals."""
    measured = [
        row
        for row in rows
        if row["step"] and isfinite(row.get("val/loss", inf)) and "val/bits_per_byte" in row
    ]
    return min(measured, key=lambda row: row["val/loss"], default=None)


def is_scored(row: dict) -> bool:
    """Whether a row is of a snapshot, with scores of heads."""
    return any(key.startswith("heads/") for key in row)


def snapshot_steps(rows: list[dict]) -> list[int]:
    """The steps of the snapshots."""
    return [row["step"] for row in rows if is_scored(row)]
