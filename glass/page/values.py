"""Reduce values to what a page shows: rounded numbers and curves of few points."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")


def finite_number(value: float | None, digits: int = 6) -> float | None:
    """Round a number to significant digits; return None if it is not finite, as JSON has no NaN."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def thin(items: Sequence[Item], max_count: int) -> Sequence[Item]:
    """Return at most `max_count` items, evenly spaced, with the last one."""
    if len(items) <= max_count:
        return items
    indices = np.linspace(0, len(items) - 1, max_count).round().astype(int)
    return [items[i] for i in indices]


def metric_curve(rows: Sequence[dict], key: str, max_points: int) -> dict[str, Any]:
    """Return the steps and finite values of a metric, thinned, and how many were measured."""
    points = [(row["step"], finite_number(row.get(key))) for row in rows]
    finite = [(step, value) for step, value in points if value is not None]
    curve = thin(finite, max_points)
    return {
        "steps": [step for step, _ in curve],
        "values": [value for _, value in curve],
        "of": len(finite),
    }
