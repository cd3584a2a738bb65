"""A snapshot of a run: maps, scores, births; picture and text where due, importance at the end."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from torch import Tensor

from attention_maps import ablation, attention_grid, capture, scores
from attention_maps.analysis import Seen
from attention_maps.logit_attribution import explain_predictions
from attention_maps.probes import make_probes
from common.metrics import is_scored
from config import Config
from data.tokenizer import Tokenizer, encode_prompt
from data.tokens import Tokens
from decoding import GeneratedText, Sampling, generate_texts
from model import GPT

ABLATION_TOKENS = 4096  # of validation, on which each head's importance is measured at the end
# What the predictions of the text needed is measured at every snapshot where that takes at most
# this share of the tokens trained on between two, else where a picture is due, as of the repeats.
EXPLAINED = 0.02
SAMPLE_TOKENS = 100  # of the text that the model writes where a picture is due


class Snapshots:
    """Takes the snapshots of a run, on the same probes, into its folder."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tokens: Tokens,
        windows: tuple[Tensor, Tensor],
        may_fail: Callable[[], AbstractContextManager],
    ):
        """windows: x, y (W, T) of validation, to measure importance on, on the device."""
        self.config, self.folder = config, run_dir / "attention"
        self.windows, self.may_fail = windows, may_fail
        self.tokenizer = tokens.tokenizer
        length = min(config.attention.tokens, config.model.block_size)
        self.probes = make_probes(tokens.train, tokens.val, tokens.tokenizer, length, config.seed)
        self.length = self.probes.windows.shape[1]
        c, between = config.model, config.attention.every * config.batch_size
        passes = length * length + c.n_layer * c.n_head * length  # tokens
        self.affordable = passes <= EXPLAINED * between * c.block_size
        # Importance takes half of these tokens a head: of a large model where it trained on more.
        self.long = ABLATION_TOKENS * c.n_layer * c.n_head < (
            2 * config.max_steps * config.batch_size * c.block_size
        )
        self.folder.mkdir(exist_ok=True)

    def take(self, model: GPT, step: int, rows: list[dict]) -> tuple[dict[str, float], str | None]:
        """Capture and score every head after `step` optimizer steps, and write it down.

        rows: the run's metrics so far. May be left at any line: all of it can be done again.

        Returns the scores, their errors and the births up to now; where a picture is due, a text
        by the model, else None."""
        model, due = capture.in_float32(model), self.picture_due(step)
        last = step == self.config.max_steps
        seen = Seen(model, self.probes)
        held, tables = seen.score()
        if due or self.affordable:
            held |= explain_predictions(model, seen.text, self.tokenizer)
        if due and len(self.probes.periods):
            row = seen.random.rows([np.argmax(self.probes.periods)])  # the one that the page shows
            told = explain_predictions(model, row, self.tokenizer)
            held |= {f"repeated_{name}": value for name, value in told.items()}
        if last and (self.long or not seen.large):
            held |= ablation.losses_without_heads(model, *self.windows, self.config.precision)
            tables["importance"] = ablation.importance(
                held["validation_loss"], held["validation_loss_without_head"]
            )
        metrics = scores.as_metrics(tables)
        metrics |= seen.circuits(held, tables)
        before = next((row for row in reversed(rows) if is_scored(row)), {})
        metrics |= scores.births(before, metrics, self.length)
        if due:
            metrics |= seen.enough(metrics)
        path = self.folder / f"step_{step:08d}.npz"
        with self.may_fail():
            capture.save(path, step, self.probes, held)
            if due:
                capture.save_weights(path.with_suffix(".safetensors"), model)
                attention_grid.draw(
                    held["text"],
                    self.probes.words,
                    path.with_suffix(".png"),
                    model.config.kv_heads,
                    f"Attention after {step:,} steps",
                )
        if not due:
            return metrics, None
        return metrics, sample_text(model, self.tokenizer, SAMPLE_TOKENS, self.config.seed)

    def picture_due(self, step: int) -> bool:
        """Whether it is drawn: each `picture_every` steps, or at the first and each doubling."""
        every, picture_every = self.config.attention.every, self.config.attention.picture_every
        if step in (0, self.config.max_steps):
            return True
        number = step // every
        return step % picture_every == 0 if picture_every else number & (number - 1) == 0


def sample_text(model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int) -> str:
    """A text as the model begins one, always the same for the same weights and seed."""
    text = GeneratedText(tokenizer, encode_prompt(tokenizer, ""), seed, max_documents=2)
    decoder = model.make_decoder(1, 1 + max_new_tokens)
    for _ in generate_texts(decoder, [text], max_new_tokens, Sampling(temperature=0.8)):
        pass
    return text.text
