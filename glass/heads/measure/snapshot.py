"""Measure the snapshots of a run."""

import numpy as np
from torch import Tensor

from config import Config
from data.tokens import Tokens
from glass.heads.measure.ablation import ablate_heads, head_importance
from glass.heads.measure.analysis import ProbeRun, highest_induction_score
from glass.heads.measure.emergence import date_emergence
from glass.heads.measure.logit_attribution import explain_predictions
from glass.heads.measure.probes import make_probes
from model import GPT
from run.row import Row
from run.run_dir import RunDir
from training.evaluate import Windows
from training.intervals import is_grid_due, is_snapshot_due

ABLATION_TOKENS = 4096  # validation tokens on which head importance is measured
MAX_WINDOWS = 128  # of those tokens: in many short windows, ablating heads one at a time takes long
# Token and head effects are measured at every snapshot if they process at most this share of the
# tokens trained on between two snapshots; otherwise only at snapshots with an attention grid.
MAX_EXPLAINED_SHARE = 0.02
# An extra snapshot is taken if the highest prefix-matching score has changed by this much since the
# last one. A rise from 0 to 1 causes at most 20 extra snapshots.
MIN_CHANGE = 0.05


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


class SnapshotMeasurer:
    """Measures the snapshots of a run on the same probes; their files go to `attention`."""

    def __init__(
        self, config: Config, run: RunDir, tokens: Tokens, windows: tuple[Tensor, Tensor]
    ) -> None:
        """Make the probes and the folder; head importance is measured on `windows` (W, T)."""
        self.config = config
        self.windows = windows
        self.tokenizer = tokens.tokenizer
        spacing = tokens.task.block_size + 1 if tokens.task else 1
        length = min(config.attention.tokens, config.model.block_size)
        self.probes = make_probes(
            tokens.train, tokens.val, tokens.tokenizer, length, config.seed, spacing
        )
        self._explains_always = _can_always_explain(config, length)
        run.snapshots.mkdir(exist_ok=True)

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
        run = ProbeRun(model, self.probes)
        arrays = run.arrays
        row = run.score_heads()
        if has_grid or (self._explains_always and is_snapshot_due(step, self.config)):
            arrays |= explain_predictions(model, run.text, self.tokenizer)
        if has_grid and len(self.probes.periods):
            longest = int(self.probes.periods.argmax())  # the page shows this row
            effects = explain_predictions(model, run.random.rows([longest]), self.tokenizer)
            arrays |= {f"repeated_{name}": values for name, values in effects.items()}
        if is_last and (not run.is_large or _can_measure_importance(self.config)):
            ablation = ablate_heads(model, *self.windows, self.config.precision)
            row.put_heads("heads/importance", *head_importance(ablation))
            arrays["validation_loss"] = ablation.loss
            arrays["validation_loss_without_head"] = ablation.loss_without_head
        row |= date_emergence(previous, row, run.window_length)
        row |= run.measure_copying()
        row |= run.measure_composition(row)
        if has_grid:
            row |= run.measure_faithfulness(row, finds_sufficient=is_last)
        return row, arrays


def _can_always_explain(config: Config, length: int) -> bool:
    c = config.model
    explained_tokens = length * length + c.n_layer * c.n_head * length
    trained_tokens = config.attention.every * config.batch_size * c.block_size
    return explained_tokens <= MAX_EXPLAINED_SHARE * trained_tokens


def _can_measure_importance(config: Config) -> bool:
    c = config.model
    # Ablating a head recomputes half of the layers on average.
    ablated_tokens = ABLATION_TOKENS * c.n_layer * c.n_head / 2
    return ablated_tokens < config.max_steps * config.batch_size * c.block_size
