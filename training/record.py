"""Record what a run measures: metrics.jsonl, samples.jsonl, W&B and the terminal."""

import errno
import json
import math
import os
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from statistics import median

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from common.files import atomic_write, list_folder
from common.terminal import Terminal, printer, tolerate_errors
from common.text import format_minutes, format_speed, format_with_error
from config import ResolvedConfig
from run.config_file import config_yaml
from run.losses import best_row, loss_warning
from run.row import Row
from run.run_dir import RunDir, parse_step, read_rows
from training.wandb_record import WandbRecord

# What the terminal shows of a row: metric → function that formats it.
SHOWN_METRICS: dict[str, Callable[[float], str]] = {
    "train/loss": "loss {:.3f}".format,
    "val/loss": "val {:.3f}".format,
    "val/bits_per_byte": "bits/byte {:.3f}".format,
    "train/tokens_per_second": lambda speed: f"{format_speed(speed)} tok/s",
    "train/ms_per_step": lambda duration: f"{format_speed(duration)} ms/step",
    "train/mfu": lambda share: f"MFU {share:.1%}" if share < 0.1 else f"MFU {share:.0%}",
    "memory/peak_gib": "{:.1f} GiB".format,
}
BAR_METRICS = ("train/loss", "val/loss", "train/ms_per_step", "train/mfu")  # fit 80 columns
SLOWDOWN = 3  # times the median of the earlier steps, from which on a run reports it once
MIN_EARLIER_ROWS = 5  # of which the first may contain the compilation
SILENT_SECONDS = 30  # after which a run without a terminal says what it is doing
SPEED_SECONDS = 600  # of the last steps, evaluations and snapshots, whose speed gives the time left
PER_HEAD = re.compile(r"/L\d+H\d+(/|$)")  # W&B gets those of the strongest heads, and tables
LOSSES = ("train/loss", "val/loss", "val/bits_per_byte")


class ProgressBar:
    """The line of a terminal that shows the step, the latest metrics and the time left."""

    def __init__(self, console: Terminal, max_steps: int, step: int = 0) -> None:
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            speed_estimate_period=SPEED_SECONDS,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task("", total=max_steps, completed=step, status="")
        self._activity = "training"
        self._values: dict[str, str] = {}  # latest formatted value by metric

    def advance(self, step: int, values: dict[str, str]) -> None:
        """Show the number of completed steps and the latest formatted values."""
        self._activity = "training"
        self._values |= values
        status = " ".join(self._values[key] for key in BAR_METRICS if key in self._values)
        self.progress.update(self._task, completed=step, status=status)

    @property
    def time_left(self) -> str:
        """The time that the rest of the run takes at the speed of the last minutes."""
        seconds = self.progress.tasks[self._task].time_remaining
        return f"{'--:--' if seconds is None else format_minutes(seconds)} left"

    def show_activity(self, activity: str) -> None:
        """Show what the run does between two steps, until the next step."""
        self._activity = activity
        self.progress.update(self._task, status=f"{activity} …")

    def __str__(self) -> str:
        task = self.progress.tasks[self._task]
        width = len(str(task.total))
        return f"step {task.completed:>{width}}  {self._activity} …  {self.time_left}"


class Record:
    """The record of a run: its rows, samples, W&B run and progress bar; a context manager.

    Rows and snapshots of earlier training are kept up to `step`; -1 keeps none.
    """

    def __init__(self, config: ResolvedConfig, run_dir: Path, step: int = 0) -> None:
        self.console = Terminal()
        self.log = printer(self.console)
        self.note = cache(self.log)  # prints a note that recurs, as on a full disk, only once
        self.config, self.run = config, RunDir(run_dir)
        with atomic_write(self.run.config_file) as part:  # from now on the folder is a run's
            part.write_text(config_yaml(config), encoding="utf-8")
        self.rows = truncate_rows(self.run.metrics_file, step, self.log)
        last_row_step = self.rows[-1]["step"] if self.rows else -1
        truncate_rows(self.run.samples_file, last_row_step, self.log)
        remove_snapshots_after(self.run.snapshots, step)
        self._samples: list[list] = []  # [step, text]
        self.progress_bar = ProgressBar(self.console, config.max_steps, max(0, step))
        self.wandb = WandbRecord(config, run_dir, self.note)
        self._has_slowed_down = self._has_ended = False
        self._has_printed = threading.Event()
        self._reporter = threading.Thread(target=self._report_progress, daemon=True)

    def __enter__(self) -> "Record":
        self.progress_bar.progress.start()
        self._reporter.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._has_ended = True
        self._has_printed.set()
        self._reporter.join()
        self.progress_bar.progress.stop()
        self.wandb.finish(failed=error_type is not None)

    def print_metrics(self, row: dict) -> None:
        """Show a step and its metrics: in the progress bar, and in a line if one is due."""
        values = {
            key: format_value(row[key]) for key, format_value in SHOWN_METRICS.items() if key in row
        }
        self.progress_bar.advance(row["step"], values)
        if self.console.is_terminal:  # the bar shows the rest
            shown = [values[key] for key in LOSSES if key in values and "val/loss" in values]
        else:
            shown = [*values.values(), self.progress_bar.time_left]
        if values and shown:
            width = len(str(self.config.max_steps))
            self.log(f"step {row['step']:>{width}}  {'  '.join(shown)}")
            self._has_printed.set()
        if "train/ms_per_step" in row and self.config.device == "cpu":
            self._note_slow_steps(row["train/ms_per_step"])

    def _note_slow_steps(self, duration: float) -> None:
        earlier = [row["train/ms_per_step"] for row in self.rows if "train/ms_per_step" in row]
        if self._has_slowed_down or len(earlier) < MIN_EARLIER_ROWS:
            return
        slowdown = duration / median(earlier)
        if slowdown >= SLOWDOWN:
            self._has_slowed_down = True
            self.log(
                f"note     steps take {slowdown:.0f} times as long as before: close other "
                "programs, or stop and resume this run, so that its threads sleep while they wait"
            )

    def _report_progress(self) -> None:
        """Without a terminal, print what the run does if there were no metrics for a while."""
        while not self._has_ended and not self.console.is_terminal:
            if not self._has_printed.wait(SILENT_SECONDS):
                self.log(str(self.progress_bar))
            self._has_printed.clear()

    def write(self, row: dict) -> None:
        """Append a row to metrics.jsonl, and send it to W&B with what else was logged there.

        Values that are not finite are left out, because JSON has none.
        """
        row = Row({key: value for key, value in row.items() if math.isfinite(value)})
        self.rows.append(row)
        self._append(self.run.metrics_file, row)
        self.wandb.log({key: value for key, value in row.items() if not PER_HEAD.search(key)})
        self.wandb.commit(row["step"])

    def write_sample(self, step: int, text: str) -> None:
        """Append a text generated after `step` steps to samples.jsonl, and all so far to W&B."""
        self._append(self.run.samples_file, {"step": step, "text": text})
        self._samples.append([step, text])
        self.wandb.log_table("samples", ["step", "text"], self._samples)

    def _append(self, path: Path, row: dict) -> None:
        """Append a complete line to a file, or nothing."""
        line = (json.dumps(row) + "\n").encode()
        with self.tolerate_errors(f"writing {path}"), path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(line) < len(line):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def tolerate_errors(self, activity: str) -> AbstractContextManager:
        """Continue without a part of the record that cannot be made or written, with one note."""
        return tolerate_errors(activity, self.note)


def truncate_rows(path: Path, step: int, log: Callable[[str], None]) -> list[Row]:
    """Keep only the rows of a file up to `step`, and return them.

    The previous file is kept beside it, as `<name>.before`.
    """
    if not path.exists():
        return []
    rows = [row for row in read_rows(path, log) if row["step"] <= step]
    with atomic_write(path.with_name(f"{path.name}.before")) as part:
        shutil.copyfile(path, part)
    with atomic_write(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def remove_snapshots_after(folder: Path, step: int) -> None:
    """Remove the snapshots after `step`, from which a resumed run may differ."""
    for path in list_folder(folder, "step_*.*"):
        number = parse_step(path.stem)
        if number is not None and number > step:
            path.unlink()


def describe_task(metrics: dict[str, float]) -> list[str]:
    """Return a line for each metric of a task, such as "task     repeated loss 0.25 ± 0.01"."""
    lines: list[str] = []
    for key in metrics:
        if key.startswith("task/") and not key.endswith("_se"):
            label, name = "" if lines else "task", key.removeprefix("task/").replace("_", " ")
            value = format_with_error(metrics[key], metrics.get(f"{key}_se"))
            lines.append(f"{label:<9}{name} {value}")
    return lines


def print_summary(
    console: Terminal,
    run_dir: Path,
    rows: Sequence[dict],
    findings: list[str],
    seconds: dict[str, float],
) -> None:
    """Print a run's page, losses, strongest finding, time and memory, and what to do next."""
    print_line, print_prose = printer(console), printer(console, wrap=True)
    print_line("")
    page = RunDir(run_dir).page
    print_line(f"page     {page.absolute().as_uri()}" if page.exists() else f"run      {run_dir}")
    for line in summarize_losses(rows):
        print_prose(line)
    print_prose(f"finding  {findings[0] if findings else 'no attention head stands out yet'}")
    if len(findings) > 1:
        print_prose(f"         {len(findings) - 1} more, and all measurements, on the page")
    cost = [f"{name} {format_minutes(spent)}" for name, spent in seconds.items() if spent >= 1]
    if cost:
        print_prose(f"time     {', '.join(cost)}")
    if "memory/peak_gib" in rows[-1]:
        print_prose(f"memory   {rows[-1]['memory/peak_gib']:.1f} GiB at its peak")
    folder = shlex.quote(str(run_dir))
    print_line(f"next     python explore.py run_dir={folder}")
    print_line(f"         python sample.py run_dir={folder}")


def summarize_losses(rows: Sequence[dict]) -> list[str]:
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
