"""Take snapshots during a run: measure all heads, and write attention grids and sample texts."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from common.files import refuse_link, step_name
from common.text import pluralize
from config import Config
from data.tokenizer import Tokenizer, encode_prompt
from data.tokens import Tokens
from generation.decoder import Decoder
from generation.sampling import GeneratedText, Sampling, generate_texts
from glass.heads import attention_grid, capture
from glass.heads.ablation import ablate_heads, head_importance
from glass.heads.analysis import ProbeRun, highest_induction_score
from glass.heads.logit_attribution import explain_predictions
from glass.heads.metrics import flatten, read_latest
from glass.heads.probes import make_probes
from glass.heads.results import Measurements
from glass.heads.stored_weights import prune_stored_weights
from kernels import exact_float32
from model import GPT

ABLATION_TOKENS = 4096  # validation tokens on which head importance is measured
# Token and head effects are measured at every snapshot if they process at most this share of the
# tokens trained on between two snapshots; otherwise only at snapshots with an attention grid.
MAX_EXPLAINED_SHARE = 0.02
# An extra snapshot is taken if the highest prefix-matching score has changed by this much since the
# last one. A rise from 0 to 1 causes at most 20 extra snapshots.
MIN_CHANGE = 0.05
SAMPLE_TOKENS = 100  # length of each sample text


class Snapshot(NamedTuple):
    """The results of a snapshot that the training loop records."""

    metrics: dict[str, float]  # the measurements with the keys of metrics.jsonl
    sample: str | None  # a generated text; None at snapshots without an attention grid


class Snapshots:
    """Take the snapshots of a run on the same probes, and write them to the folder `attention`."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tokens: Tokens,
        windows: tuple[Tensor, Tensor],
        tolerate_errors: Callable[[str], AbstractContextManager],
        sample_tokens: int = SAMPLE_TOKENS,
    ) -> None:
        """Make the probes and the folder.

        `windows` are validation inputs and targets (W, T), on the device, for head importance.
        `tolerate_errors` returns a context manager that handles errors in making a part of the
        record, which its argument names.
        """
        self.config, self.folder = config, run_dir / "attention"
        self.windows, self.tolerate_errors = windows, tolerate_errors
        self.tokenizer, self.sample_tokens = tokens.tokenizer, sample_tokens
        self.prompt: list[int] | None = None
        spacing = 1
        if tokens.task:  # each sample is a sequence of it
            self.prompt, spacing = tokens.task.prompt, tokens.task.block_size + 1
            self.sample_tokens = spacing - len(self.prompt)
        length = min(config.attention.tokens, config.model.block_size)
        self.probes = make_probes(
            tokens.train, tokens.val, tokens.tokenizer, length, config.seed, spacing
        )
        self._explains_always = _can_always_explain(config, length)
        self.folder.mkdir(exist_ok=True)

    @exact_float32()  # TF32 would hide small effects on the loss
    def take(self, model: GPT, step: int, rows: list[dict]) -> Snapshot:
        """Measure every head after `step` optimizer steps, and write the snapshot's files.

        If interrupted, it can simply be called again. `rows` holds the run's metrics so far.
        """
        model, has_grid = capture.in_float32(model), self.is_grid_due(step)
        measurements, arrays = self._measure(model, step, read_latest(rows), has_grid)
        metrics = flatten(measurements)
        self._write(model, step, arrays, has_grid)
        with self.tolerate_errors("the weights of a snapshot"):
            refuse_link(self.folder)
            capture.save_weights(self.folder / f"{step_name(step)}.safetensors", model)
            prune_stored_weights(self.folder, metrics)
        sample, seed = None, self.config.seed
        if has_grid:
            with self.tolerate_errors("a sample text"):  # the model may predict NaN
                sample = sample_text(model, self.tokenizer, self.sample_tokens, seed, self.prompt)
        return Snapshot(metrics, sample)

    def is_regular(self, step: int) -> bool:
        """Return whether a snapshot is due at a step, whatever the heads do."""
        return step == self.config.max_steps or step % self.config.attention.every == 0

    def has_changed(self, model: GPT, rows: list[dict]) -> bool:
        """Return whether the highest prefix-matching score has moved since the last snapshot.

        This is the sign that an induction head is forming or fading. It depends on the model and
        the run's metrics so far only, so that a resumed run takes the same snapshots.
        """
        latest = read_latest(rows)
        if latest is None or "induction" not in latest.scores:
            return False  # without random rows nothing is known between snapshots
        highest = highest_induction_score(capture.in_float32(model), self.probes)
        before = float(np.nanmax(latest.scores["induction"].mean))
        return abs(highest - before) >= MIN_CHANGE

    def is_grid_due(self, step: int) -> bool:
        """Return whether the snapshot at a step gets an attention grid and a sample text.

        Both ends of the run get them, and every `picture_every` steps between; if that is 0,
        regular snapshots 1, 2, 4, 8, … after step 0.
        """
        every, picture_every = self.config.attention.every, self.config.attention.picture_every
        if step in (0, self.config.max_steps):
            return True
        if picture_every:
            return step % picture_every == 0
        number = step // every
        return self.is_regular(step) and number & (number - 1) == 0

    def _measure(
        self, model: GPT, step: int, previous: Measurements | None, has_grid: bool
    ) -> tuple[Measurements, dict[str, np.ndarray]]:
        """Return the measurements of a snapshot, and the arrays to save."""
        run, is_last = ProbeRun(model, self.probes), step == self.config.max_steps
        arrays, head_scores = dict(run.arrays), run.score_heads()
        if has_grid or (self._explains_always and self.is_regular(step)):
            arrays |= explain_predictions(model, run.text, self.tokenizer)
        if has_grid and len(self.probes.periods):
            longest = int(np.argmax(self.probes.periods))  # the page shows this row
            effects = explain_predictions(model, run.random.rows([longest]), self.tokenizer)
            arrays |= {f"repeated_{name}": values for name, values in effects.items()}
        if is_last and (not run.is_large or _can_measure_importance(self.config)):
            ablation = ablate_heads(model, *self.windows, self.config.precision)
            head_scores["importance"] = head_importance(ablation)
            arrays["validation_loss"] = ablation.loss
            arrays["validation_loss_without_head"] = ablation.loss_without_head
        measurements = run.measure(step, head_scores, previous)
        if has_grid:
            faithfulness = run.measure_faithfulness(measurements, finds_sufficient=is_last)
            measurements = replace(measurements, faithfulness=faithfulness)
        return measurements, arrays

    def _write(self, model: GPT, step: int, arrays: dict[str, np.ndarray], has_grid: bool) -> None:
        path = self.folder / f"{step_name(step)}.npz"
        with self.tolerate_errors("a snapshot"):
            refuse_link(self.folder)
            capture.save_snapshot(path, step, self.probes, arrays)
        if not has_grid or os.path.islink(self.folder):
            return
        with self.tolerate_errors("an attention grid"):
            attention_grid.draw(
                arrays["text"],
                self.probes.text_tokens,
                path.with_suffix(".png"),
                model.config.kv_heads,
                f"Attention after {pluralize(step, 'step')}",
            )


def _can_always_explain(config: Config, length: int) -> bool:
    """Return whether explaining a text of `length` tokens is cheap compared with training."""
    c = config.model
    explained_tokens = length * length + c.n_layer * c.n_head * length
    trained_tokens = config.attention.every * config.batch_size * c.block_size
    return explained_tokens <= MAX_EXPLAINED_SHARE * trained_tokens


def _can_measure_importance(config: Config) -> bool:
    """Return whether measuring head importance is cheap compared with the whole training."""
    c = config.model
    # Ablating a head recomputes half of the layers on average.
    ablated_tokens = ABLATION_TOKENS * c.n_layer * c.n_head / 2
    return ablated_tokens < config.max_steps * config.batch_size * c.block_size


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    max_new_tokens: int,
    seed: int,
    prompt: list[int] | None = None,
) -> str:
    """Generate a text, and return it with its prompt; equal weights and seed give equal texts.

    Without a prompt it starts from the `start_token`, which is not returned.
    """
    prompt_tokens = encode_prompt(tokenizer, "") if prompt is None else prompt
    text = GeneratedText(tokenizer, prompt_tokens, seed, max_documents=2)
    decoder = Decoder(model, 1, len(prompt_tokens) + max_new_tokens)
    for _ in generate_texts(decoder, [text], max_new_tokens, Sampling(temperature=0.8)):
        pass
    return tokenizer.decode(prompt or []) + text.text
