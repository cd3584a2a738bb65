"""Observe a training run: measure its attention heads at snapshots, and draw its page."""

import numpy as np
from torch import Tensor

from common.files import atomic_write
from common.text import pluralize
from config import Config
from data.tokens import Tokens
from glass.heads.measure.ablation import ablate_heads, head_importance
from glass.heads.measure.analysis import ProbeRun, highest_induction_score
from glass.heads.measure.capture import in_float32
from glass.heads.measure.emergence import date_emergence
from glass.heads.measure.logit_attribution import explain_predictions
from glass.heads.measure.probes import make_probes
from glass.heads.measure.snapshot_files import prune_stored_weights, save_snapshot, save_weights
from glass.heads.say.attention_grid import draw_attention_grid
from glass.heads.say.findings import announce_emergence, summarize
from glass.heads.say.tables import charted_scores, head_table
from glass.page.write import write_page
from model import GPT
from run.loss_history import best_row
from run.row import Row, last_scored_row
from training.device import exact_float32
from training.evaluate import Windows
from training.intervals import is_grid_due, is_snapshot_due
from training.record import Record

ABLATION_TOKENS = 4096  # validation tokens on which head importance is measured
MAX_WINDOWS = 128  # of those tokens: in many short windows, ablating heads one at a time takes long
# Token and head effects are measured at every snapshot if they process at most this share of the
# tokens trained on between two snapshots; otherwise only at snapshots with an attention grid.
MAX_EXPLAINED_SHARE = 0.02
# An extra snapshot is taken if the highest prefix-matching score has changed by this much since the
# last one. A rise from 0 to 1 causes at most 20 extra snapshots.
MIN_CHANGE = 0.05


class Observer:
    """Looks at the attention heads of a run, and adds them to its record."""

    def __init__(self, text: Tokens, validation: Windows, record: Record) -> None:
        self.config = record.config
        self.run_dir = record.run_dir
        self.record = record
        self.tokenizer = text.tokenizer
        self.windows = spread_windows(validation, ABLATION_TOKENS)
        spacing = text.task.block_size + 1 if text.task else 1
        length = min(self.config.attention.tokens, self.config.model.block_size)
        self.probes = make_probes(
            text.train, text.val, text.tokenizer, length, self.config.seed, spacing
        )
        self.run_dir.snapshots.mkdir(exist_ok=True)

    def look(self, model: GPT, step: int) -> Row:
        """Measure every attention head, draw the attention grid, and log them to W&B.

        Between regular snapshots it returns an empty row unless the highest prefix-matching score
        has moved. It may be interrupted anywhere and done again.
        """
        model = in_float32(model)
        previous = last_scored_row(self.record.rows)
        is_regular = is_snapshot_due(step, self.config)
        if not is_regular and not self.has_changed(model, previous):
            return Row()
        self.record.display.show_activity("measuring attention")
        with exact_float32():
            row, arrays = self.measure(model, step, previous)
            if is_grid_due(step, self.config):
                self._draw_grid(step, arrays["text"])
        wandb = self.record.wandb
        wandb.log_table("attention/head_scores", *head_table(step, row))
        wandb.log(charted_scores(row))
        with self.record.tolerate_errors(f"saving a snapshot in {self.run_dir.snapshots}"):
            path = self.run_dir.snapshot(step, ".npz")
            save_snapshot(path, step, self.probes, arrays)
        with self.record.tolerate_errors("saving the weights of a snapshot"):
            save_weights(self.run_dir.snapshot(step, ".safetensors"), step, model)
            best = best_row(self.record.rows)
            best_step = best["step"] if best else None
            prune_stored_weights(self.run_dir, row, best_step)
        return row

    def has_changed(self, model: GPT, previous: Row) -> bool:
        """Return whether the highest prefix-matching score has moved since the previous snapshot.

        Then an induction head is forming or fading. It depends only on the model and the metrics so
        far, so that a resumed run takes the same snapshots.
        """
        before = previous.heads("heads/induction")
        if not before:
            return False  # without random rows nothing is known between snapshots
        change = highest_induction_score(model, self.probes) - max(before.values())
        return abs(change) >= MIN_CHANGE

    def measure(self, model: GPT, step: int, previous: Row) -> tuple[Row, dict[str, np.ndarray]]:
        """Measure every head of a float32 model; return the arrays that are saved too."""
        has_grid = is_grid_due(step, self.config)
        is_last = step == self.config.max_steps
        probe_run = ProbeRun(model, self.probes)
        arrays = probe_run.arrays
        row = probe_run.score_heads()
        is_regular = is_snapshot_due(step, self.config)
        if has_grid or (is_regular and _can_always_explain(self.config)):
            arrays |= explain_predictions(model, probe_run.text, self.tokenizer)
        if has_grid and len(self.probes.periods):
            longest = int(self.probes.periods.argmax())  # the page shows this row
            effects = explain_predictions(model, probe_run.random.rows([longest]), self.tokenizer)
            arrays |= {f"repeated_{name}": values for name, values in effects.items()}
        if is_last and (not probe_run.is_large or _can_measure_importance(self.config)):
            losses = ablate_heads(model, *self.windows, self.config.precision)
            row.put_heads("heads/importance", *head_importance(*losses))
            arrays["validation_loss"], arrays["validation_loss_without_head"] = losses
        row |= date_emergence(previous, row, probe_run.window_length)
        row |= probe_run.measure_copying()
        row |= probe_run.measure_composition(row)
        if has_grid:
            row |= probe_run.measure_faithfulness(row, finds_sufficient=is_last)
        return row, arrays

    def _draw_grid(self, step: int, maps: np.ndarray) -> None:
        tokens = self.probes.text_tokens
        groups = self.config.model.kv_heads
        path = self.run_dir.snapshot(step, ".png")
        after = f"after {pluralize(step, 'step')}"
        with self.record.tolerate_errors("drawing an attention grid"):
            grid = draw_attention_grid(maps, tokens, groups, f"Attention {after}", self.record.log)
            with atomic_write(path) as part:
                grid.save(part, format="png", compress_level=1)
            caption = f"attention patterns of all heads {after}"
            self.record.wandb.log_image("attention/map", path, caption)

    def draw_page(self, step: int) -> None:
        """Draw the page of the run, whose last row is that of the step, and log it to W&B."""
        page = self.run_dir.page
        wandb = self.record.wandb
        with self.record.tolerate_errors(f"drawing {page}"):
            if not page.exists():
                self.record.log(f"page     {page.absolute().as_uri()}")
                self.record.log("         (open it in a browser; it updates itself)")
            self.record.display.show_activity("drawing the page")
            findings = [str(finding) for finding in summarize(*self.record.rows)]
            write_page(self.run_dir)
            for finding in announce_emergence(*self.record.rows):
                address = f"{page.absolute().as_uri()}#head={finding.heads[0]}"
                self.record.log(f"finding  {finding.text}: look at {address}")

            if step in (0, self.config.max_steps):  # the last page contains all earlier snapshots
                wandb.log_page("attention/explorer", page)
                wandb.commit(step)
            row = self.record.rows[-1]
            emerged = {key: row[key] for key in row if key.startswith("emerged/")}
            wandb.update_summary({**emerged, "findings": "\n".join(findings)})

    def list_findings(self) -> list[str]:
        """Return the findings of the run as headlines, the strongest first."""
        with self.record.tolerate_errors("summarizing the findings"):
            return [finding.headline for finding in summarize(*self.record.rows)]
        return []


def spread_windows(validation: Windows, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, on the device, of spread windows of roughly `num_tokens` tokens.

    There are at least 16 windows if the text has them, because standard errors are computed over
    windows, and at most `MAX_WINDOWS`.
    """
    windows, T = validation.inputs.shape
    count = min(windows, max(16, min(MAX_WINDOWS, num_tokens // T)))
    chosen = np.linspace(0, windows - 1, count).round().astype(int)
    inputs = validation.inputs[chosen].to(validation.device)
    targets = validation.targets[chosen].to(validation.device)
    return inputs, targets


def _can_always_explain(config: Config) -> bool:
    c = config.model
    length = min(config.attention.tokens, c.block_size)
    explained_tokens = length * length + c.n_layer * c.n_head * length
    trained_tokens = config.attention.every * config.batch_size * c.block_size
    return explained_tokens <= MAX_EXPLAINED_SHARE * trained_tokens


def _can_measure_importance(config: Config) -> bool:
    c = config.model
    # Ablating a head recomputes half of the layers on average.
    ablated_tokens = ABLATION_TOKENS * c.n_layer * c.n_head / 2
    return ablated_tokens < config.max_steps * config.batch_size * c.block_size
