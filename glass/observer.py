"""Observe a training run: measure its attention heads, write its record and draw its page."""

from pathlib import Path

import cli
from common.files import exists
from config import ResolvedConfig
from data.tokens import Tokens
from glass.heads.findings import summarize_run
from glass.heads.snapshot import ABLATION_TOKENS, Snapshot, Snapshots
from glass.page.write import write_page
from model import GPT
from training.evaluate import Windows
from training.flops import memory_metrics, tokens_per_step
from training.profiling import TRACE_FILE, TRACE_VIEWER, StepProfiler
from training.record import Record, print_losses, print_summary
from training.stopwatch import Stopwatch
from training.time_left import TimeLeft


class Observer:
    """Records a run on rank 0, and profiles it. A context manager, which ends with the run.

    The text gives the probes, and the validation windows are those on which heads are ablated.
    Records up to `recorded_step` are kept; -1 for a new run.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        run_dir: Path,
        text: Tokens,
        validation: Windows,
        clock: Stopwatch,
        recorded_step: int,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.clock = clock
        self.record = Record(config, run_dir, recorded_step)
        self.time_left = TimeLeft(config, clock, validation)
        self.record.progress_bar.set_time_left(self.time_left.estimate(recorded_step))
        self.record.progress_bar.show_activity("compiling" if config.compile else "starting")
        self.profiler = StepProfiler(config, run_dir, clock, max(0, recorded_step))
        self.snapshots = Snapshots(
            config,
            run_dir,
            text,
            validation.excerpt(ABLATION_TOKENS),
            self.record.tolerate_errors,
        )

    def __enter__(self) -> "Observer":
        self.record.__enter__()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *details: object) -> None:
        self.profiler.close()
        self.record.__exit__(error_type, *details)

    def show(self, step: int, row: dict[str, float]) -> None:
        """Show the step, and its metrics or the profile if there are any, in the terminal."""
        self._profile(step)
        self.record.progress_bar.set_time_left(self.time_left.estimate(step))
        memory = memory_metrics(self.config.device) if row else {}
        self.record.print_metrics({"step": step} | row | memory)

    def _profile(self, step: int) -> None:
        with self.record.tolerate_errors(TRACE_FILE):
            profile = self.profiler.advance(step)
            if profile is None:
                return
            for line in profile.table():
                self.record.log(line)
            self.record.log(f"         trace for {TRACE_VIEWER}: {self.profiler.path}")

    def take_snapshot(self, model: GPT, step: int) -> Snapshot | None:
        """Measure every attention head; may be interrupted anywhere and done again.

        Between regular snapshots it returns None unless an induction head is forming or fading.
        """
        self.clock.switch("attention")
        is_last = step == self.config.max_steps
        rows = self.record.rows
        if not self.snapshots.is_regular(step) and not self.snapshots.has_changed(model, rows):
            return None
        activity = "measuring head importance" if is_last else "measuring attention"
        self.record.progress_bar.show_activity(activity)
        return self.snapshots.take(model, step, rows)

    def write(self, step: int, row: dict[str, float], snapshot: Snapshot | None) -> None:
        """Write the metrics of a step, if there are any; redraw the page at regular snapshots."""
        if snapshot:
            row = row | snapshot.metrics
            if snapshot.sample is not None:
                self.record.write_sample(step, snapshot.sample)
        if row:
            self.clock.switch(None)
            tokens = tokens_until(step, self.config)
            row = {"step": step, "tokens": tokens} | row | self.clock.metrics()
            self.record.write(row | memory_metrics(self.config.device))
        if snapshot and self.snapshots.is_regular(step):
            self._draw_page(is_last=step == self.config.max_steps)

    def _draw_page(self, is_last: bool) -> None:
        self.clock.switch("attention")
        page = self.run_dir / "report.html"
        with self.record.tolerate_errors(str(page)):
            if not exists(page):
                self.record.log(f"page     {page} (open it in a browser; it updates itself)")
            self.record.progress_bar.show_activity("drawing the page")
            rows = self.record.rows
            findings = [str(finding) for finding in summarize_run(rows)]
            self.record.wandb.log_page(write_page(self.run_dir), rows[-1], findings, is_last)

    def print_summary(self) -> None:
        """Print the best loss, the findings and where the run's files are."""
        self.clock.switch(None)
        log = self.record.log
        log("")
        print_losses(log, self.record.rows)
        print_findings = cli.printer(self.record.console, wrap=True)
        with cli.tolerate_errors("the findings", log):
            for finding in summarize_run(self.record.rows):
                print_findings(str(finding))
        log("")
        print_summary(log, self.run_dir, self.clock.seconds)


def tokens_until(step: int, config: ResolvedConfig) -> int:
    """Return the number of tokens trained on in `step` optimizer steps."""
    return step * tokens_per_step(config)
