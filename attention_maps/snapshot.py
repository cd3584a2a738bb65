"""Take the snapshots of a run: scores at each, an attention grid and a sample text at some."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from attention_maps import attention_grid, capture
from attention_maps.ablation import ablate_heads, head_importance
from attention_maps.analysis import ProbeRun
from attention_maps.logit_attribution import explain_predictions
from attention_maps.metrics import flatten, read_latest
from attention_maps.probes import make_probes
from attention_maps.results import Measurements, Scores
from config import Config
from data.tokenizer import Tokenizer, encode_prompt
from data.tokens import Tokens
from decoding import GeneratedText, Sampling, generate_texts
from model import GPT

ABLATION_TOKENS = 4096  # of the validation split, on which head importance is measured at the end
# Token and head effects are measured at every snapshot if that takes at most this share of the
# tokens trained on between two snapshots, else only with an attention grid.
MAX_EXPLAINED_SHARE = 0.02
SAMPLE_TOKENS = 100  # of the text that the model writes with each attention grid


class Snapshot(NamedTuple):
    """What a snapshot adds to the record of a run.

    Attributes:
        metrics: The measurements by the keys of metrics.jsonl.
        sample: A text by the model, if an attention grid was due.
    """

    metrics: dict[str, float]
    sample: str | None


class Snapshots:
    """Takes the snapshots of a run, all on the same probes, and writes them to its folder."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tokens: Tokens,
        windows: tuple[Tensor, Tensor],
        tolerate_io_errors: Callable[[], AbstractContextManager],
        sample_tokens: int = SAMPLE_TOKENS,
    ) -> None:
        """Make the probes and the folder `attention`.

        Args:
            config: The resolved configuration of the run.
            run_dir: Its folder.
            tokens: The text that it trains on.
            windows: Inputs and targets (W, T) of the validation split, on the device, on which
                head importance is measured.
            tolerate_io_errors: Context in which files are written.
            sample_tokens: Tokens of a sample text.
        """
        self.config, self.folder = config, run_dir / "attention"
        self.windows, self.tolerate_io_errors = windows, tolerate_io_errors
        self.tokenizer, self.sample_tokens = tokens.tokenizer, sample_tokens
        length = min(config.attention.tokens, config.model.block_size)
        self.probes = make_probes(tokens.train, tokens.val, tokens.tokenizer, length, config.seed)
        self._explains_always = _can_always_explain(config, length)
        self._measures_importance = _can_measure_importance(config)
        self.folder.mkdir(exist_ok=True)

    def take(self, model: GPT, step: int, rows: list[dict]) -> Snapshot:
        """Measure every head after `step` optimizer steps, and write the snapshot's files.

        It may be interrupted at any line and taken again.

        Args:
            model: The model of the run.
            step: Optimizer steps taken so far.
            rows: The run's metrics so far.
        """
        model, has_grid = capture.in_float32(model), self.is_grid_due(step)
        measurements, arrays = self._measure(model, step, read_latest(rows), has_grid)
        with self.tolerate_io_errors():
            self._write(model, step, arrays, has_grid)
        sample = None
        if has_grid:
            sample = sample_text(model, self.tokenizer, self.sample_tokens, self.config.seed)
        return Snapshot(flatten(measurements), sample)

    def is_grid_due(self, step: int) -> bool:
        """Return whether the snapshot of a step has an attention grid and a sample text.

        They are due every `picture_every` steps; if that is 0, at the first snapshot and at each
        doubling of their number; and at both ends of the run.
        """
        every, picture_every = self.config.attention.every, self.config.attention.picture_every
        if step in (0, self.config.max_steps):
            return True
        if picture_every:
            return step % picture_every == 0
        number = step // every
        return number & (number - 1) == 0

    def _measure(
        self, model: GPT, step: int, previous: Measurements | None, has_grid: bool
    ) -> tuple[Measurements, dict[str, np.ndarray]]:
        """Return the measurements of a snapshot, and the arrays that it saves."""
        run = ProbeRun(model, self.probes)
        arrays, head_scores = dict(run.arrays), run.score_heads()
        if has_grid or self._explains_always:
            arrays |= explain_predictions(model, run.text, self.tokenizer)
        if has_grid and len(self.probes.periods):
            longest = int(np.argmax(self.probes.periods))  # the row that the page shows
            effects = explain_predictions(model, run.random.rows([longest]), self.tokenizer)
            arrays |= {f"repeated_{name}": values for name, values in effects.items()}
        if step == self.config.max_steps and (self._measures_importance or not run.is_large):
            arrays |= self._measure_importance(model, head_scores)
        measurements = run.measure(step, head_scores, previous)
        if has_grid:
            faithfulness = run.measure_faithfulness(measurements)
            measurements = replace(measurements, faithfulness=faithfulness)
        return measurements, arrays

    def _measure_importance(self, model: GPT, head_scores: Scores) -> dict[str, np.ndarray]:
        """Add head importance to the scores, and return the losses it was computed from."""
        ablation = ablate_heads(model, *self.windows, self.config.precision)
        head_scores["importance"] = head_importance(ablation)
        return {
            "validation_loss": ablation.loss,
            "validation_loss_without_head": ablation.loss_without_head,
        }

    def _write(self, model: GPT, step: int, arrays: dict[str, np.ndarray], has_grid: bool) -> None:
        path = self.folder / f"step_{step:08d}.npz"
        capture.save_snapshot(path, step, self.probes, arrays)
        if has_grid:
            capture.save_weights(path.with_suffix(".safetensors"), model)
            attention_grid.draw(
                arrays["text"],
                self.probes.text_tokens,
                path.with_suffix(".png"),
                model.config.kv_heads,
                f"Attention after {step:,} steps",
            )


def _can_always_explain(config: Config, length: int) -> bool:
    """Return whether explaining a text of `length` tokens is cheap beside training."""
    c = config.model
    explained_tokens = length * length + c.n_layer * c.n_head * length
    trained_tokens = config.attention.every * config.batch_size * c.block_size
    return explained_tokens <= MAX_EXPLAINED_SHARE * trained_tokens


def _can_measure_importance(config: Config) -> bool:
    """Return whether measuring head importance is cheap beside the whole training."""
    c = config.model
    # On average half of the layers are recomputed for a head.
    ablated_tokens = ABLATION_TOKENS * c.n_layer * c.n_head / 2
    return ablated_tokens < config.max_steps * config.batch_size * c.block_size


def sample_text(model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int) -> str:
    """Generate a text without a prompt, the same for the same weights and seed."""
    text = GeneratedText(tokenizer, encode_prompt(tokenizer, ""), seed, max_documents=2)
    decoder = model.make_decoder(1, 1 + max_new_tokens)
    for _ in generate_texts(decoder, [text], max_new_tokens, Sampling(temperature=0.8)):
        pass
    return text.text
