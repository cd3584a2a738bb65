"""Record what a run measures: metrics.jsonl, samples.jsonl, W&B and the terminal."""

import errno
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from cli.config_file import config_yaml
from common.checkpoints import CONFIG_FILE
from common.files import atomic_write, exists, list_folder
from common.metrics import METRICS, SAMPLES, best_row, is_plotted, read_rows
from common.terminal import Terminal, failure_note, printer
from common.text import format_minutes, format_speed, format_with_error, pluralize
from config import ResolvedConfig, WandbConfig
from training.profiling import TRACE_FILE

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
LOSSES = ("train/loss", "val/loss", "val/bits_per_byte")
# What the progress bar leaves out on a narrow terminal, in this order.
DISPENSABLE_METRICS = ("val/bits_per_byte", "train/tokens_per_second", "memory/peak_gib")
MIN_BAR_WIDTH = 4


class TextFunctionColumn(ProgressColumn):
    """Shows the text that a function returns at each refresh."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:
        """Return the current text."""
        return Text(self._text(), style="progress.remaining")


class ProgressBar:
    """The line of a terminal that shows the step, the latest metrics and the time left."""

    def __init__(self, console: Terminal, max_steps: int, step: int = 0) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TextFunctionColumn(self.time_left),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=max_steps, completed=step, status="")
        self._end: float | None = None  # estimated, on the clock of time.monotonic
        self._console, self._max_steps = console, max_steps
        self._values: dict[str, str] = {}  # latest formatted value by metric

    def start(self) -> None:
        """Draw the bar, if the console is a terminal."""
        self._progress.start()

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def render(self) -> RenderableType:
        """Return the bar as it is drawn now."""
        return self._progress.get_renderable()

    def update_values(self, values: dict[str, str]) -> None:
        """Set the latest formatted values, by metric, that the bar shows from its next step on."""
        self._values |= values

    def set_time_left(self, seconds: float | None) -> None:
        """Set the estimated seconds until the end of the run, None if unknown."""
        self._end = None if seconds is None else time.monotonic() + seconds

    def time_left(self) -> str:
        """Return the estimated time until the end of the run; dashes if it is unknown."""
        if self._end is None:
            return "--:-- left"
        return f"{format_minutes(max(0.0, self._end - time.monotonic()))} left"

    def advance(self, step: int) -> None:
        """Show the number of completed steps and as many of the latest values as fit."""
        shown = {key: self._values[key] for key in SHOWN_METRICS if key in self._values}
        counts = len(f"step {self._max_steps}/{self._max_steps}  0:00:00 left ")
        room = self._console.width - counts - MIN_BAR_WIDTH - 1
        for key in DISPENSABLE_METRICS:
            if len(" ".join(shown.values())) > room:
                shown.pop(key, None)
        self._progress.update(self._task, completed=step, status=" ".join(shown.values()))

    def show_activity(self, activity: str) -> None:
        """Show what the run does between two steps, until the next step."""
        self._progress.update(self._task, status=f"{activity} …")


class Record:
    """The record of a run: its rows, samples, W&B run and progress bar; a context manager.

    The configuration is written to config.yaml. Rows and snapshots of earlier training are kept up
    to `step`; -1 keeps none.
    """

    def __init__(self, config: ResolvedConfig, run_dir: Path, step: int = 0) -> None:
        self.console = Terminal()
        self.log = printer(self.console)
        self.config, self.run_dir = config, run_dir
        with atomic_write(run_dir / CONFIG_FILE) as part:  # from now on the folder is a run's
            part.write_text(config_yaml(config), encoding="utf-8")
        self.rows = truncate_rows(run_dir / METRICS, step, self.log)
        last_row_step = self.rows[-1]["step"] if self.rows else -1
        truncate_rows(run_dir / SAMPLES, last_row_step, self.log)
        remove_snapshots_after(run_dir / "attention", step)
        self._samples: list[list] = []  # [step, text]
        self._reported: set[str] = set()  # parts of the record that have failed
        self.progress_bar = ProgressBar(self.console, config.max_steps, max(0, step))

        from training.wandb_record import WandbRecord  # importing W&B takes a third of a second

        self.wandb = WandbRecord(config, run_dir, self.log)

    def __enter__(self) -> "Record":
        self.progress_bar.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.progress_bar.stop()
        self.wandb.finish(failed=error_type is not None)

    def print_metrics(self, row: dict) -> None:
        """Show a step and its metrics: in the progress bar, and in a line if one is due."""
        values = {
            key: format_value(row[key]) for key, format_value in SHOWN_METRICS.items() if key in row
        }
        self.progress_bar.update_values(values)
        self.progress_bar.advance(row["step"])
        if self.console.is_terminal:  # the bar shows the rest
            shown = [values[key] for key in LOSSES if key in values and "val/loss" in values]
        else:
            shown = [*values.values(), self.progress_bar.time_left()]
        if values and shown:
            width = len(str(self.config.max_steps))
            self.log(f"step {row['step']:>{width}}  {'  '.join(shown)}")

    def write(self, row: dict) -> None:
        """Append a row to metrics.jsonl, and send it to W&B with what else was logged there.

        Values that are not finite are left out, because JSON has none.
        """
        row = {key: value for key, value in row.items() if math.isfinite(value)}
        self.rows.append(row)
        self._append(METRICS, row)
        self.wandb.log({key: value for key, value in row.items() if is_plotted(key)})
        self.wandb.commit(row["step"])

    def write_sample(self, step: int, text: str) -> None:
        """Append a text that the model generated after `step` steps to samples.jsonl and W&B.

        W&B gets a table with the earlier ones, together with the row of the step.
        """
        self._append(SAMPLES, {"step": step, "text": text})
        self._samples.append([step, text])
        self.wandb.log_table("samples", ["step", "text"], self._samples)

    def _append(self, name: str, row: dict) -> None:
        """Append a complete line to a file, or nothing."""
        line = (json.dumps(row) + "\n").encode()
        with (
            self.tolerate_errors(name),
            (self.run_dir / name).open("ab", buffering=0) as file,
        ):
            size = file.tell()
            if file.write(line) < len(line):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)

    @contextmanager
    def tolerate_errors(self, part: str) -> Iterator[None]:
        """Continue without a part of the record that cannot be made or written.

        One note is printed about each part, and one about files, as on a full disk.
        """
        try:
            yield
        except Exception as e:  # drawing raises errors of many types
            failed = "files" if isinstance(e, OSError) else part
            if failed not in self._reported:
                note = failure_note(e, part)
                self.log(f"{note}; training continues, but its record may be incomplete")
            self._reported.add(failed)


def check_wandb(config: WandbConfig) -> str:
    """Return the mode of W&B; raise `UserError` if it would refuse to start due to a setting."""
    if config.mode == "disabled":
        return config.mode
    from training.wandb_record import check_settings

    return check_settings(config)


def truncate_rows(path: Path, step: int, log: Callable[[str], None]) -> list[dict]:
    """Keep only the rows of a file up to `step`, and return them.

    The previous file is kept beside it, as `<name>.before`.
    """
    if not exists(path):
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
        number = path.name.removesuffix(path.suffix).removeprefix("step_")
        if number.isdecimal() and int(number) > step:
            with suppress(OSError):
                path.unlink()


def print_losses(log: Callable[[str], None], rows: list[dict]) -> None:
    """Print the best validation loss, the final losses of both splits, and the task's metrics."""
    best, last = best_row(rows), rows[-1]
    if best is None:
        return
    bits = ""
    if "val/bits_per_byte" in best:
        bits = f", {best['val/bits_per_byte']:.4f} bits/byte"
    log(f"best validation loss {best['val/loss']:.4f} nats/token{bits}")
    log(f"                     after {pluralize(best['step'], 'step')}")
    if last.keys() >= {"train/eval_loss", "val/loss"}:
        log(
            f"final loss           {last['val/loss']:.4f} in validation, "
            f"{last['train/eval_loss']:.4f} in training"
        )
    for number, line in enumerate(describe_task(last)):
        log(f"{'' if number else 'task':<21}{line}")


def describe_task(metrics: dict[str, float]) -> list[str]:
    """Return a line for each metric of a task, such as "repeated loss 0.25 ± 0.01"."""
    names = [key for key in metrics if key.startswith("task/") and not key.endswith("_se")]
    return [
        f"{name.removeprefix('task/').replace('_', ' ')} "
        f"{format_with_error(metrics[name], metrics.get(f'{name}_se'))}"
        for name in names
    ]


def print_summary(log: Callable[[str], None], run_dir: Path, seconds: dict[str, float]) -> None:
    """Print where a run's files are, how long it took, and what to do next."""
    times = [f"{activity} {spent:.0f} s" for activity, spent in seconds.items() if spent]
    grids: list[Path] = []
    with suppress(OSError):
        grids = list_folder(run_dir / "attention", "*.png")
    lines = [("run", str(run_dir))]
    if grids:
        lines.append(("attention", str(grids[-1])))
    if exists(run_dir / TRACE_FILE):
        lines.append(("profile", str(run_dir / TRACE_FILE)))
    lines += [
        ("metrics", str(run_dir / METRICS)),
        ("page", str(run_dir / "report.html")),
        ("time", ", ".join(times)),
        ("sample from it", f"python sample.py run_dir={shlex.quote(str(run_dir))}"),
    ]
    for name, value in lines:
        log(f"{name:<21}{value}".rstrip())
