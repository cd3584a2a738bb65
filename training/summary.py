"""Say what a run has reached: its losses, and the metrics of its task."""

from collections.abc import Sequence

from common.text import format_with_error
from run.losses import best_row, loss_warning
from run.row import Row


def describe_task(metrics: dict[str, float]) -> list[str]:
    """Return a line for each metric of a task, such as "task     repeated loss 0.25 ± 0.01"."""
    lines: list[str] = []
    for key in metrics:
        if key.startswith("task/") and not key.endswith("_se"):
            label = "" if lines else "task"
            name = key.removeprefix("task/").replace("_", " ")
            value = format_with_error(metrics[key], metrics.get(f"{key}_se"))
            lines.append(f"{label:<9}{name} {value}")
    return lines


def summarize_losses(rows: Sequence[Row]) -> list[str]:
    """Return lines with the best validation loss, a warning, and the last metrics of a task."""
    best = best_row(rows)
    if best is None:
        return []
    bits = ""
    if "val/bits_per_byte" in best:
        bits = f", {best['val/bits_per_byte']:.4f} bits/byte"
    lines = [
        f"loss     {best['val/loss']:.4f} nats/token{bits} in validation (best, step "
        f"{best['step']:,})"
    ]
    if warning := loss_warning(rows):
        lines.append(f"note     {warning}")
    return lines + describe_task(rows[-1])
