"""Record what a run measures: metrics.jsonl, samples.jsonl, W&B and the terminal."""

import errno
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout
from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from cli import Terminal, printer
from cli.config_file import config_yaml
from common.errors import UserError
from common.files import atomic_write
from common.metrics import METRICS, SAMPLES, best_row, read_rows
from config import Config

# What the terminal shows of a row: name → metric, format.
SHOWN_METRICS = {
    "loss": ("train/loss", "{:.3f}"),
    "val": ("val/loss", "{:.3f}"),
    "bits/byte": ("val/bits_per_byte", "{:.3f}"),
    "tok/s": ("train/tokens_per_second", "{:,.0f}"),
}
# Shown in lines but not in the progress bar, which has to fit 80 columns.
HIDDEN_IN_PROGRESS_BAR = ("bits/byte",)
# Files that may lie in a run's folder before the run begins.
ALLOWED_BEFORE_START = {".lock", ".config.yaml.part", "job.json", "log.txt"}
# Entries of a run's folder in which files are removed, so that they must not be links.
MUST_NOT_BE_LINKS = (".lock", "checkpoints", "attention", "wandb")


# --- the run's folder -----------------------------------------------------------------------------


def is_resuming(config: Config) -> bool:
    """Return whether the run continues one that its folder contains."""
    if not config.run_dir or not config.resume:
        return False
    return Path(config.run_dir, "config.yaml").exists()


@contextmanager
def run_folder(config: Config, experiment: str) -> Iterator[Path]:
    """Open the folder of a run, and lock it against other processes.

    A folder that is still empty at the end is removed if it was created here.

    Args:
        config: The run's configuration.
        experiment: Name of the experiment, for the name of a new folder.

    Raises:
        UserError: If the folder is in use, contains something else or links.
    """
    path = Path(config.run_dir) if config.run_dir else new_run_dir(experiment)
    is_new = not config.run_dir or not path.exists()
    for name in MUST_NOT_BE_LINKS:
        if os.path.islink(path / name):
            raise UserError(
                f"{path / name} is a link, which run_dir={path} must not contain: "
                "replace or remove it"
            )
    lock = FileLock(path / ".lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not is_resuming(config) and _names_in(path) - ALLOWED_BEFORE_START:
            raise UserError(
                f"run_dir={path} is not empty: choose another folder, "
                "or resume the run in it with resume=true"
            )
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"run_dir={path} is in use by another process: wait for it, or choose another folder"
        ) from None
    try:
        yield path
    finally:
        lock.release()
        with suppress(OSError):  # removing an empty folder is best effort
            if _names_in(path) <= {".lock"}:
                (path / ".lock").unlink(missing_ok=True)
                if is_new:
                    path.rmdir()


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def new_run_dir(name: str) -> Path:
    """Create runs/<date>_<time>_<name>, with a number if a run of the same second has that name."""
    base = Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}")
    for number in count(1):
        path = base if number == 1 else base.with_name(f"{base.name}_{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("count() does not end")


# --- the record -----------------------------------------------------------------------------------


class ProgressBar:
    """The line of a terminal that shows the step, the latest losses and the time remaining."""

    def __init__(self, console: Terminal, max_steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=max_steps, status="")
        self._values: dict[str, str] = {}  # latest value by name

    def start(self) -> None:
        """Draw the bar."""
        self._progress.start()

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def render(self) -> RenderableType:
        """Return the bar as it is drawn now."""
        return self._progress.get_renderable()

    def update_values(self, values: dict[str, str]) -> None:
        """Set the latest values that the bar shows from its next step on."""
        self._values |= values

    def advance(self, step: int) -> None:
        """Show the number of completed steps and the latest values."""
        shown = [name for name in SHOWN_METRICS if name in self._values]
        status = " ".join(
            f"{name} {self._values[name]}" for name in shown if name not in HIDDEN_IN_PROGRESS_BAR
        )
        self._progress.update(self._task, completed=step, status=status)

    def show_activity(self, activity: str) -> None:
        """Show what the run does between two steps, until the next step."""
        self._progress.update(self._task, status=f"{activity} …")


class Record:
    """The record of a run: its rows, samples, W&B run and progress bar; a context manager.

    Args:
        config: The run's resolved configuration, which is written to config.yaml.
        run_dir: Folder of the run.
        step: The last step whose rows and snapshots are kept; -1 keeps none.
    """

    def __init__(self, config: Config, run_dir: Path, step: int = 0) -> None:
        self.console = Terminal()
        self.log = printer(self.console)
        self.config, self.run_dir = config, run_dir
        with atomic_write(run_dir / "config.yaml") as part:  # from now on the run can be resumed
            part.write_text(config_yaml(config), encoding="utf-8")
        self.rows = truncate_rows(run_dir / METRICS, step, self.log)
        last_row_step = self.rows[-1]["step"] if self.rows else -1
        truncate_rows(run_dir / SAMPLES, last_row_step, self.log)
        remove_snapshots_after(run_dir / "attention", step)
        self._has_reported_io_error = False
        self._progress_bar: ProgressBar | None = None

        from training.wandb_record import WandbRecord  # importing W&B takes a third of a second

        self.wandb = WandbRecord(config, run_dir, self.log)

    def __enter__(self) -> "Record":
        if self.console.is_terminal:
            self._progress_bar = ProgressBar(self.console, self.config.max_steps)
            self._progress_bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress_bar:
            self._progress_bar.stop()
        self.wandb.finish(failed=error_type is not None)

    def advance(self, step: int) -> None:
        """Move the progress bar to a step."""
        if self._progress_bar:
            self._progress_bar.advance(step)

    def show_activity(self, activity: str) -> None:
        """Show in the progress bar what the run does, until the next step."""
        if self._progress_bar:
            self._progress_bar.show_activity(activity)

    def print_metrics(self, row: dict) -> None:
        """Print the losses and the speed of a row."""
        values = {}
        for name, (key, number_format) in SHOWN_METRICS.items():
            if key in row:
                values[name] = number_format.format(row[key])
        if self._progress_bar:
            self._progress_bar.update_values(values)
            self._progress_bar.advance(row["step"])
        if values and (not self._progress_bar or "val" in values):
            width = len(str(self.config.max_steps))
            text = "  ".join(f"{name} {value}" for name, value in values.items())
            self.log(f"step {row['step']:>{width}}  {text}")

    def write(self, row: dict) -> None:
        """Append a row to metrics.jsonl, and log it to W&B with its attention grid if it has one.

        Args:
            row: Metrics by name, with `step`, `tokens` and `train_seconds`.
        """
        self.rows.append(row)
        self._append(METRICS, row)
        grid = self.run_dir / "attention" / f"step_{row['step']:08d}.png"
        self.wandb.log(row, grid if grid.exists() else None)

    def write_sample(self, step: int, text: str) -> None:
        """Append a text that the model generated after `step` steps to samples.jsonl and W&B."""
        self._append(SAMPLES, {"step": step, "text": text})
        self.wandb.log_sample(step, text)

    def _append(self, name: str, row: dict) -> None:
        """Append a complete line to a file, or nothing."""
        line = (json.dumps(row) + "\n").encode()
        with self.tolerate_io_errors(), (self.run_dir / name).open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(line) < len(line):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)

    @contextmanager
    def tolerate_io_errors(self) -> Iterator[None]:
        """Continue after a failed write, as on a full disk, and print one note about the first."""
        try:
            yield
        except OSError as e:
            if not self._has_reported_io_error:
                self.log(
                    f"warning: {e.filename or self.run_dir} could not be written "
                    f"({e.strerror or e}); training continues, but its record may be incomplete"
                )
            self._has_reported_io_error = True


def truncate_rows(path: Path, step: int, log: Callable[[str], None]) -> list[dict]:
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
    for path in folder.glob("step_*.*"):
        number = path.name.removesuffix(path.suffix).removeprefix("step_")
        if number.isdecimal() and int(number) > step:
            path.unlink()


class Stopwatch:
    """Measures the seconds that a run spends on each activity.

    Args:
        synchronize: Waits until the device has finished its work.
        seconds: Seconds by activity that a resumed run has spent before.
        tokens: Tokens that a resumed run has trained on before.
    """

    def __init__(
        self, synchronize: Callable[[], None], seconds: dict[str, float], tokens: int = 0
    ) -> None:
        self.seconds = {"train": 0.0, "evaluate": 0.0, "attention": 0.0, "save": 0.0, **seconds}
        self._synchronize = synchronize
        self._activity: str | None = None
        self._started = 0.0
        self._speed_tokens, self._speed_seconds = tokens, self.seconds["train"]

    def switch(self, activity: str | None) -> None:
        """Attribute the time from now on to an activity, or to none.

        Switching to the current activity does not wait for the device.
        """
        if activity != self._activity:
            self.read_train_seconds()
            self._activity = activity

    def metrics(self) -> dict[str, float]:
        """Return the seconds by their names in metrics.jsonl."""
        return {
            "train_seconds" if activity == "train" else f"seconds/{activity}": seconds
            for activity, seconds in self.seconds.items()
        }

    def read_train_seconds(self) -> float:
        """Return the seconds of training so far, including the device's pending work."""
        self._synchronize()
        now = time.perf_counter()
        if self._activity is not None:
            self.seconds[self._activity] += now - self._started
        self._started = now
        return self.seconds["train"]

    def speed(self, tokens: int) -> float:
        """Return the training speed since the last call, in tokens per second.

        Args:
            tokens: Tokens that the run has trained on so far.
        """
        seconds = self.read_train_seconds()
        speed = (tokens - self._speed_tokens) / (seconds - self._speed_seconds)
        self._speed_tokens, self._speed_seconds = tokens, seconds
        return speed


# --- the end of a run -----------------------------------------------------------------------------


def print_losses(log: Callable[[str], None], rows: list[dict]) -> None:
    """Print the best validation loss, and the final losses of both splits if they were measured."""
    best, last = best_row(rows), rows[-1]
    if best is None:
        return
    log(
        f"best validation loss {best['val/loss']:.4f} nats/token, "
        f"{best['val/bits_per_byte']:.4f} bits/byte"
    )
    log(f"                     after {best['step']:,} steps")
    if "train/eval_loss" in last:
        log(
            f"final loss           {last['val/loss']:.4f} in validation, "
            f"{last['train/eval_loss']:.4f} in training"
        )


def print_summary(log: Callable[[str], None], run_dir: Path, seconds: dict[str, float]) -> None:
    """Print where a run's files are, how long it took, and what to do next."""
    times = [f"{activity} {spent:.0f} s" for activity, spent in seconds.items() if spent]
    grids = sorted((run_dir / "attention").glob("*.png"))
    lines = [("run", str(run_dir))]
    if grids:
        lines.append(("attention", str(grids[-1])))
    lines += [
        ("metrics", str(run_dir / METRICS)),
        ("page", str(run_dir / "report.html")),
        ("time", ", ".join(times)),
        ("sample from it", f"python sample.py run_dir={shlex.quote(str(run_dir))}"),
    ]
    for name, value in lines:
        log(f"{name:<21}{value}".rstrip())
