"""Observe a training run: measure its attention heads at snapshots, and draw its page."""

from html import escape

import numpy as np

from common.files import atomic_write, exists
from common.text import pluralize
from data.tokens import Tokens
from glass.heads.measure.capture import in_float32
from glass.heads.measure.snapshot import ABLATION_TOKENS, SnapshotMeasurer, spread_windows
from glass.heads.measure.snapshot_files import save_snapshot, save_weights
from glass.heads.measure.stored_weights import prune_stored_weights
from glass.heads.say.attention_grid import draw_attention_grid
from glass.heads.say.findings import summarize
from glass.heads.say.tables import composition_table, head_table, highest_scores
from glass.page.write import write_page
from model import GPT
from run.losses import best_row
from run.row import Row, last_scored_row
from run.run_dir import RunDir
from training.device import exact_float32
from training.evaluate import Windows
from training.intervals import is_grid_due, is_snapshot_due
from training.record import Record


class Observer:
    """Looks at the attention heads of a run, and adds them to its record."""

    def __init__(self, text: Tokens, validation: Windows, record: Record) -> None:
        self.config = record.config
        self.run = record.run
        self.record = record
        windows = spread_windows(validation, ABLATION_TOKENS)
        self.measurer = SnapshotMeasurer(self.config, self.run, text, windows)

    def look(self, model: GPT, step: int) -> Row:
        """Measure every attention head, draw the attention grid, and log them to W&B.

        Between regular snapshots it returns an empty row unless the highest prefix-matching score
        has moved. It may be interrupted anywhere and done again.
        """
        model = in_float32(model)
        previous = last_scored_row(self.record.rows)
        is_regular = is_snapshot_due(step, self.config)
        if not is_regular and not self.measurer.has_changed(model, previous):
            return Row()
        is_last = step == self.config.max_steps
        activity = "measuring head importance" if is_last else "measuring attention"
        self.record.display.show_activity(activity)
        with exact_float32():
            row, arrays = self.measurer.measure(model, step, previous)
            if is_grid_due(step, self.config):
                self._draw_grid(step, arrays["text"])
        self._log_heads(row)
        with self.record.tolerate_errors(f"saving a snapshot in {self.run.snapshots}"):
            path = self.run.snapshot(step, ".npz")
            save_snapshot(path, step, self.measurer.probes, arrays)
        with self.record.tolerate_errors("saving the weights of a snapshot"):
            save_weights(self.run.snapshot(step, ".safetensors"), step, model)
            best = best_row(self.record.rows)
            best_step = best["step"] if best else None
            prune_stored_weights(self.run, row.columns("emerged"), best_step)
        return row

    def _log_heads(self, row: Row) -> None:
        wandb = self.record.wandb
        wandb.log_table("attention/head_scores", *head_table(row))
        wandb.log_table("attention/composition", *composition_table(row))
        wandb.log(highest_scores(row))

    def _draw_grid(self, step: int, maps: np.ndarray) -> None:
        tokens = self.measurer.probes.text_tokens
        groups = self.config.model.kv_heads
        path = self.run.snapshot(step, ".png")
        after = f"after {pluralize(step, 'step')}"
        with self.record.tolerate_errors("drawing an attention grid"):
            grid = draw_attention_grid(maps, tokens, groups, f"Attention {after}")
            with atomic_write(path) as part:
                grid.save(part, format="png", compress_level=1)
            caption = f"attention patterns of all heads {after}"
            self.record.wandb.log_image("attention/map", path, caption)

    def draw_page(self, step: int) -> None:
        """Draw the page of the run, whose last row is that of the step, and log it to W&B."""
        page = self.run.page
        wandb = self.record.wandb
        with self.record.tolerate_errors(f"drawing {page}"):
            if not page.exists():
                self.record.log(f"page     {page.absolute().as_uri()}")
                self.record.log("         (open it in a browser; it updates itself)")
            self.record.display.show_activity("drawing the page")
            findings = [str(finding) for finding in summarize(*self.record.rows)]
            write_page(self.run)

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

    def list_findings(self) -> list[str]:
        """Return the findings of the run as headlines, the strongest first."""
        with self.record.tolerate_errors("summarizing the findings"):
            return [finding.headline for finding in summarize(*self.record.rows)]
        return []


def redraw_page(run: RunDir) -> None:
    """Draw the page of a finished run if it is older than the last row, as after a kill."""
    last_row_time = run.metrics_file.stat().st_mtime_ns
    if not exists(run.page) or run.page.stat().st_mtime_ns < last_row_time:
        write_page(run)
