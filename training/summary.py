"""Print what a run has reached: at its end, or of a task that is evaluated."""

import shlex
from collections.abc import Sequence

from common.terminal import Terminal, printer
from common.text import format_minutes, format_with_error
from run.losses import best_row, loss_warning
from run.row import Row
from run.run_dir import RunDir


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


def print_summary(
    console: Terminal,
    run: RunDir,
    rows: Sequence[Row],
    findings: list[str] | None,
    seconds: dict[str, float],
) -> None:
    """Print a run's page, losses, strongest finding, time and memory, and what to do next.

    Without findings, None, no heads were measured.
    """
    print_line, print_prose = printer(console), printer(console, wrap=True)
    print_line("")
    page = run.page
    print_line(f"page     {page.absolute().as_uri()}" if page.exists() else f"run      {run.path}")
    for line in summarize_losses(rows):
        print_prose(line)
    if findings is not None:
        print_prose(f"finding  {findings[0] if findings else 'no attention head stands out yet'}")
    if findings and len(findings) > 1:
        print_prose(f"         {len(findings) - 1} more, and all measurements, on the page")
    cost = [f"{name} {format_minutes(spent)}" for name, spent in seconds.items() if spent >= 1]
    if cost:
        print_prose(f"time     {', '.join(cost)}")
    if "memory/peak_gib" in rows[-1]:
        print_prose(f"memory   {rows[-1]['memory/peak_gib']:.1f} GiB at its peak")
    folder = shlex.quote(str(run.path))
    print_line(f"next     python explore.py run_dir={folder}")
    print_line(f"         python sample.py run_dir={folder}")


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
