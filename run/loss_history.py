"""Judge the losses in the rows of a run: the best one, overfitting, and a warning."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite, nan
from statistics import fmean

from run.row import Row

# Overfitting is reported if the validation loss has risen by more than each of these.
MIN_RISE_NATS = 0.01
MIN_RISE_SHARE = 0.01  # of the best loss
MIN_RISE_IN_FALLS = 2  # times the largest fall from one evaluation to the next since the best


def best_row(rows: Sequence[Row]) -> Row | None:
    """Return the first row with the lowest validation loss after step 0, or None without one."""
    best = min(rows, key=trained_loss, default=None)
    return None if best is None or trained_loss(best) == inf else best


def trained_loss(row: Row) -> float:
    """Return the validation loss of a row; inf if it is not finite, or that of step 0."""
    loss = row.get("val/loss", inf)
    return loss if row["step"] and isfinite(loss) else inf


def overfitting(rows: Sequence[Row]) -> float:
    """Return by how many nats the validation loss has risen since its best; 0 within noise.

    The rise is 0 as well unless the training loss is lower than it was at the best step.
    """
    best = best_row(rows)
    evaluated = [row for row in rows if row["step"] and "val/loss" in row]
    if best is None or best is evaluated[-1]:
        return 0.0
    losses = [row["val/loss"] for row in evaluated[evaluated.index(best) :]]
    rise = losses[-1] - losses[0]
    # The noise of one evaluation shows in the falls from one to the next
    largest_fall = max(earlier - later for earlier, later in pairwise(losses))
    if rise <= max(MIN_RISE_NATS, MIN_RISE_SHARE * losses[0], MIN_RISE_IN_FALLS * largest_fall):
        return 0.0

    *_, previous, last = (row["step"] for row in evaluated)
    interval = last - previous
    is_lower = _training_loss(rows, last, interval) < _training_loss(rows, best["step"], interval)
    return rise if is_lower else 0.0


def _training_loss(rows: Sequence[Row], step: int, interval: int) -> float:
    """Return the mean training loss over an interval up to a step, or the next one that is logged.

    It is nan if there is neither.
    """
    logged = [row for row in rows if "train/loss" in row]
    near = [row["train/loss"] for row in logged if step - interval < row["step"] <= step]
    later = [row["train/loss"] for row in logged if row["step"] > step]
    return fmean(near or later[:1] or [nan])


def loss_warning(rows: Sequence[Row]) -> str:
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
