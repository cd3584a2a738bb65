"""Measure the snapshots of a run: when they are due, what is measured, and a sample text."""

from pathlib import Path

import numpy as np
from torch import Tensor

from config import Config
from data.tokenizer import encode_prompt
from data.tokens import Tokens
from generation.decoder import Decoder
from generation.sampling import Sampling, draw_batch, stream_text
from glass.heads.measure.ablation import ablate_heads, head_importance
from glass.heads.measure.analysis import ProbeRun, highest_induction_score
from glass.heads.measure.emergence import date_emergence
from glass.heads.measure.logit_attribution import explain_predictions
from glass.heads.measure.probes import make_probes
from model import GPT
from run.row import Row
from run.run_dir import RunDir
from training.schedule import is_doubling, is_snapshot_due

ABLATION_TOKENS = 4096  # validation tokens on which head importance is measured
# Token and head effects are measured at every snapshot if they process at most this share of the
# tokens trained on between two snapshots; otherwise only at snapshots with an attention grid.
MAX_EXPLAINED_SHARE = 0.02
# An extra snapshot is taken if the highest prefix-matching score has changed by this much since the
# last one. A rise from 0 to 1 causes at most 20 extra snapshots.
MIN_CHANGE = 0.05
SAMPLE_TOKENS = 100  # length of each sample text


class Snapshots:
    """Measures the snapshots of a run on the same probes; their files go to `attention`."""

    def __init__(
        self, config: Config, run_dir: Path, tokens: Tokens, windows: tuple[Tensor, Tensor]
    ) -> None:
        """Make the probes and the folder; head importance is measured on `windows` (W, T)."""
        self.config, self.run, self.windows = config, RunDir(run_dir), windows
        self.tokenizer, self.task = tokens.tokenizer, tokens.task
        spacing = self.task.block_size + 1 if self.task else 1
        length = min(config.attention.tokens, config.model.block_size)
        self.probes = make_probes(
            tokens.train, tokens.val, tokens.tokenizer, length, config.seed, spacing
        )
        self._explains_always = _can_always_explain(config, length)
        self.run.snapshots.mkdir(exist_ok=True)

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

    def is_grid_due(self, step: int) -> bool:
        """Return whether the snapshot at a step gets an attention grid and a sample text.

        Both ends of the run get them, and every `picture_every` steps between; if that is 0,
        the first, second, fourth, eighth, … multiple of `every`.
        """
        every, picture_every = self.config.attention.every, self.config.attention.picture_every
        if step in (0, self.config.max_steps):
            return True
        if picture_every:
            return step % picture_every == 0
        return is_doubling(step, every)

    def measure(self, model: GPT, step: int, previous: Row) -> tuple[Row, dict[str, np.ndarray]]:
        """Measure every head of a float32 model; return the arrays that are saved too."""
        has_grid = self.is_grid_due(step)
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

    def sample(self, model: GPT) -> str:
        """Generate a text, or one sequence of a task; equal weights and seed give equal texts."""
        prompt, count = [], SAMPLE_TOKENS
        if self.task:
            prompt = self.task.prompt
            count = self.task.block_size + 1 - len(prompt)
        start = prompt if self.task else encode_prompt(self.tokenizer, "")
        decoder = Decoder(model, 1, len(start) + count)
        sampling = Sampling(temperature=0.8, vocab_size=self.tokenizer.vocab_size)
        (ids,) = draw_batch(decoder, start, count, sampling, [self.config.seed])
        text = stream_text(self.tokenizer, ids, has_prompt=bool(prompt))
        return self.tokenizer.decode(prompt) + "".join(text)


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
