"""Judge the losses in the rows of a run: the best one, overfitting, and a warning."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, nan
from statistics import fmean
from typing import Any

# Overfitting is reported if the validation loss has risen by more than each of these.
MIN_RISE_NATS = 0.01
MIN_RISE_SHARE = 0.01  # of the best loss
MIN_RISE_IN_FALLS = 2  # times the largest fall from one evaluation to the next since the best


def best_row(rows: Sequence[dict]) -> dict | None:
    """Return the first row with the lowest validation loss after step 0, or None without one."""
    evaluated = [row for row in rows if row["step"] and isfinite(row.get("val/loss", inf))]
    return min(evaluated, key=lambda row: row["val/loss"], default=None)


def overfitting(rows: Sequence[dict]) -> float:
    """Return by how many nats the validation loss has risen since its best; 0 within noise.

    The noise is estimated from the falls of the validation loss since then. The rise is 0 as well
    unless the training loss is lower than it was at the best step.
    """
    evaluated = [row for row in rows if row["step"] and "val/loss" in row]
    best = best_row(rows)
    if best is None or best is evaluated[-1]:
        return 0.0
    losses = [row["val/loss"] for row in evaluated[evaluated.index(best) :]]
    rise, largest_fall = losses[-1] - losses[0], max(a - b for a, b in pairwise(losses))
    noise = max(MIN_RISE_NATS, MIN_RISE_SHARE * losses[0], MIN_RISE_IN_FALLS * largest_fall)
    end, interval = evaluated[-1]["step"], evaluated[-1]["step"] - evaluated[-2]["step"]

    logged = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]

    def training_loss(until: int) -> float:
        """Return the mean training loss over an interval before `until`, or the next one logged."""
        near = [loss for step, loss in logged if until - interval < step <= until]
        near = near or [loss for step, loss in logged if step > until][:1]
        return fmean(near) if near else nan

    return rise if rise > noise and training_loss(end) < training_loss(best["step"]) else 0.0


def loss_warning(rows: Sequence[dict]) -> str:
    """Return a sentence if the model overfits, or was better before training; "" otherwise."""
    best = best_row(rows)
    if best is None:
        return ""
    if rise := overfitting(rows):
        return (
            f"overfitting since step {best['step']:,}: the validation loss rose by {rise:.2f} "
            "nats, while the training loss fell"
        )
    untrained = rows[0].get("val/loss", inf) if rows[0]["step"] == 0 else inf
    if untrained < best["val/loss"]:
        return (
            f"training did not lower the validation loss: it was {untrained:.4f} nats/token at "
            f"step 0, and at best {best['val/loss']:.4f} afterwards"
        )
    return ""


def is_scored(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a snapshot, with scores of heads."""
    return any(key.startswith("heads/") for key in row)


def snapshot_steps(rows: Sequence[dict]) -> list[int]:
    """Return the steps of the snapshots."""
    return [row["step"] for row in rows if is_scored(row)]
