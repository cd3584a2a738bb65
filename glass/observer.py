"""Observe a training run: measure its attention heads, write its record and draw its page."""

from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.files import atomic_write
from common.text import pluralize
from config import ResolvedConfig
from data.tokenizer import save_tokenizer
from data.tokens import Tokens
from glass.heads.measure.capture import in_float32, save_snapshot, save_weights
from glass.heads.measure.snapshot import ABLATION_TOKENS, Snapshots
from glass.heads.measure.stored_weights import prune_stored_weights
from glass.heads.say.attention_grid import draw_attention_grid
from glass.heads.say.findings import summarize
from glass.heads.say.tables import composition_table, head_table, highest_scores
from glass.page.write import write_page
from kernels import exact_float32
from model import GPT
from run.losses import best_row
from run.row import Row, last_scored_row
from run.run_dir import RunDir
from training.evaluate import Windows
from training.flops import memory_metrics, tokens_until
from training.profiling import StepProfiler
from training.record import Record, print_summary
from training.schedule import is_snapshot_due
from training.stopwatch import Stopwatch


class Snapshot(NamedTuple):
    """The results of a snapshot that are written with the metrics of its step."""

    row: Row
    sample: str | None  # a generated text; None at snapshots without an attention grid


class Observer:
    """Records a run on rank 0, and profiles it: a context manager that ends with the run.

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
        tokenizer_path = RunDir(run_dir).tokenizer_file  # which the page reads
        with (
            self.record.tolerate_errors(f"writing {tokenizer_path}"),
            atomic_write(tokenizer_path) as part,
        ):
            save_tokenizer(text.tokenizer, part)
        self.record.progress_bar.show_activity("compiling" if config.compile else "starting")
        self.profiler = StepProfiler(config, run_dir, clock, max(0, recorded_step))
        self.snapshots = Snapshots(config, run_dir, text, validation.excerpt(ABLATION_TOKENS))

    def __enter__(self) -> "Observer":
        self.record.__enter__()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *details: object) -> None:
        self.profiler.close()
        self.record.__exit__(error_type, *details)

    def show(self, step: int, row: dict[str, float]) -> None:
        """Show the step, and its metrics or the profile if there are any, in the terminal."""
        with self.record.tolerate_errors("profiling"):
            if table := self.profiler.advance(step):
                self.record.log(table)
                self.record.log(f"trace    {self.profiler.path}, for https://ui.perfetto.dev")
        memory = memory_metrics(self.config.device) if row else {}
        self.record.print_metrics({"step": step} | row | memory)

    def snapshot(self, model: GPT, step: int) -> Snapshot | None:
        """Measure every attention head, draw the attention grid, and log them to W&B.

        Between regular snapshots it returns None unless the highest prefix-matching score has
        moved. It may be interrupted anywhere and done again.
        """
        self.clock.switch("attention")
        model, previous = in_float32(model), last_scored_row(self.record.rows)
        is_regular = is_snapshot_due(step, self.config)
        if not is_regular and not self.snapshots.has_changed(model, previous):
            return None
        is_last, has_grid = step == self.config.max_steps, self.snapshots.is_grid_due(step)
        activity = "measuring head importance" if is_last else "measuring attention"
        self.record.progress_bar.show_activity(activity)
        wandb, sample = self.record.wandb, None
        with exact_float32():
            row, arrays = self.snapshots.measure(model, step, previous)
            if has_grid:
                self._draw_grid(step, arrays["text"])
            wandb.log_table("attention/head_scores", *head_table(row))
            wandb.log_table("attention/composition", *composition_table(row))
            wandb.log(highest_scores(row))
            folder = self.snapshots.run.snapshots
            with self.record.tolerate_errors(f"saving a snapshot in {folder}"):
                path = self.snapshots.run.snapshot(step, ".npz")
                save_snapshot(path, step, self.snapshots.probes, arrays)
            with self.record.tolerate_errors("saving the weights of a snapshot"):
                save_weights(self.snapshots.run.snapshot(step, ".safetensors"), step, model)
                best = best_row(self.record.rows)
                best_step = best["step"] if best else None
                prune_stored_weights(self.snapshots.run, row.columns("emerged"), best_step)
            if has_grid:
                with self.record.tolerate_errors("generating a sample text"):
                    sample = self.snapshots.sample(model)
        return Snapshot(row, sample)

    def _draw_grid(self, step: int, maps: np.ndarray) -> None:
        tokens, groups = self.snapshots.probes.text_tokens, self.config.model.kv_heads
        path, after = self.snapshots.run.snapshot(step, ".png"), f"after {pluralize(step, 'step')}"
        with self.record.tolerate_errors("drawing an attention grid"):
            grid = draw_attention_grid(maps, tokens, groups, f"Attention {after}")
            with atomic_write(path) as part:
                grid.save(part, format="png", compress_level=1)
            caption = f"attention patterns of all heads {after}"
            self.record.wandb.log_image("attention/map", path, caption)

    def write(self, step: int, row: dict[str, float], snapshot: Snapshot | None) -> None:
        """Write the metrics of a step, if there are any; redraw the page at regular snapshots."""
        if snapshot:
            row = row | snapshot.row
            if snapshot.sample is not None:
                self.record.write_sample(step, snapshot.sample)
        if row:
            self.clock.switch(None)
            tokens = tokens_until(step, self.config)
            row = {"step": step, "tokens": tokens} | row | self.clock.metrics()
            self.record.write(row | memory_metrics(self.config.device))
        if snapshot and is_snapshot_due(step, self.config):
            self._draw_page(step)

    def _draw_page(self, step: int) -> None:
        self.clock.switch("attention")
        page, wandb = RunDir(self.run_dir).page, self.record.wandb
        with self.record.tolerate_errors(f"drawing {page}"):
            if not page.exists():
                self.record.log(f"page     {page.absolute().as_uri()}")
                self.record.log("         (open it in a browser; it updates itself)")
            self.record.progress_bar.show_activity("drawing the page")
            findings = [str(finding) for finding in summarize(*self.record.rows)]
            write_page(self.run_dir)

            is_last = step == self.config.max_steps  # this page contains all earlier snapshots
            if is_last or step == 0:
                wandb.log_html("attention/explorer", page)
            if findings:
                paragraphs = [f"<p>{escape(finding)}</p>" for finding in findings]
                wandb.log_html("findings", "".join(paragraphs))
            wandb.commit(step)
            if is_last:
                row = self.record.rows[-1]
                emerged = {key: row[key] for key in row if key.startswith("emerged/")}
                wandb.summarize({**emerged, "findings": "\n".join(findings)})

    def print_summary(self) -> None:
        """Print where the run's page is, its loss and strongest finding, and what to do next."""
        self.clock.switch(None)
        record, findings = self.record, []
        with record.tolerate_errors("summarizing the findings"):
            findings = [finding.headline for finding in summarize(*record.rows)]
        print_summary(record.console, self.run_dir, record.rows, findings, self.clock.seconds)
