"""Show a run in the terminal: the progress bar, its metrics, and what takes long."""

import threading
import time
from collections import deque
from collections.abc import Callable

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from common.terminal import Terminal, printer
from common.text import format_minutes, format_perplexity, format_speed
from config import ResolvedConfig

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
SILENT_SECONDS = 30  # after which a run without a terminal says what it is doing
SPEED_SECONDS = 60  # of the last steps, evaluations and snapshots, whose speed gives the time left
LOSSES = ("train/loss", "val/loss", "val/bits_per_byte")


class Display:
    """The output of a run, which begins at a step, in the terminal.

    Its last line has the step, the latest metrics and the time left.
    """

    def __init__(self, console: Terminal, config: ResolvedConfig, step: int) -> None:
        self.console = console
        self.log = printer(console)
        self.config = config
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=config.max_steps, completed=step, status="", left=""
        )
        self._recent_steps: deque[tuple[int, float]] = deque()  # with the time after each
        self._activity = "training"
        self._latest_values: dict[str, str] = {}  # formatted, by metric
        self._has_ended = False
        self._has_printed = threading.Event()
        self._reporter = threading.Thread(target=self._report_progress, daemon=True)

    def start(self) -> None:
        """Show the progress bar, or without a terminal a line now and then."""
        self._bar.start()
        self._reporter.start()

    def stop(self) -> None:
        """Remove the progress bar, and print no more lines."""
        self._has_ended = True
        self._has_printed.set()
        self._reporter.join()
        self._bar.stop()

    def show_activity(self, activity: str) -> None:
        """Show what the run does between two steps, until the next step."""
        self._activity = activity
        self._bar.update(self._task, status=f"{activity} …")

    def show(self, step: int, row: dict[str, float]) -> None:
        """Show a step and its metrics: in the progress bar, and in a line if one is due."""
        values = {
            key: format_value(row[key]) for key, format_value in SHOWN_METRICS.items() if key in row
        }
        self._activity = "training"
        self._latest_values |= values
        status = [self._latest_values[key] for key in BAR_METRICS if key in self._latest_values]
        recent, now = self._recent_steps, time.monotonic()
        recent.append((step, now))
        while len(recent) > 2 and recent[0][1] < now - SPEED_SECONDS:
            recent.popleft()
        self._bar.update(
            self._task, completed=step, status=" ".join(status), left=self._time_left()
        )
        if "val/loss" in values:  # the bar has no room for it
            values["val/loss"] += f" ({format_perplexity(row['val/loss'])})"
        if self.console.is_terminal:  # the bar shows the rest
            shown = [values[key] for key in LOSSES if key in values and "val/loss" in values]
        else:
            shown = [*values.values(), self._time_left()]
        if values and shown:
            self._print_step("  ".join(shown))
            self._has_printed.set()

    def _print_step(self, status: str) -> None:
        width = len(str(self.config.max_steps))
        self.log(f"step {self._bar.tasks[0].completed:>{width}}  {status}")

    def _time_left(self) -> str:
        """Return the time that the rest of the run takes at the speed of the last minute."""
        if len(self._recent_steps) < 2:
            return "--:-- left"
        (first, start), (last, end) = self._recent_steps[0], self._recent_steps[-1]
        seconds = (end - start) / (last - first) * (self.config.max_steps - last)
        return f"{format_minutes(seconds)} left"

    def _report_progress(self) -> None:
        """Without a terminal, print what the run does if there were no metrics for a while."""
        while not self._has_ended and not self.console.is_terminal:
            if not self._has_printed.wait(SILENT_SECONDS):
                self._print_step(f"{self._activity} …  {self._time_left()}")
            self._has_printed.clear()
