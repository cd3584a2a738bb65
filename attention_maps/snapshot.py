"""A snapshot of a run: maps, scores, births, a picture and a text where they are due, importance at
the end. And a look at one prompt."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attention_maps import ablation, capture, card, picture, scores, stages, wiring
from attention_maps.card import copying, explain
from attention_maps.enough import Alone, enough, smallest
from attention_maps.findings import CLEAR, ERRORS, told_heads
from attention_maps.probe import LONGEST, Probes, make_probes, word, words
from config import Config
from data.tokenizer import Tokenizer, prompt_ids
from data.tokens import Tokens
from decoding import Text, generate_texts
from files import is_scored
from model import GPT

ABLATION_TOKENS = 4096  # of validation, on which each head's importance is measured at the end
# What the predictions of the text needed is measured at every snapshot where that takes at most
# this share of the tokens trained on between two, else where a picture is due, as of the repeats.
EXPLAINED = 0.02
SAMPLE_TOKENS = 100  # of the text that the model writes where a picture is due
DRAWN = 1 << 16  # tokens of which those that repeat are taken
# What the predictions of a text needed is measured up to so many tokens² · parameters: minutes on
# two cores, for GPT-2 at 200 tokens.
LOOKED_AT = 5e12


class Snapshots:
    """Takes the snapshots of a run, on the same probes, into its folder."""

    def __init__(self, config: Config, run_dir: Path, tokens: Tokens,
                 windows: tuple[Tensor, Tensor], may_fail: Callable[[], AbstractContextManager]):
        """windows: x, y (W, T) of validation, to measure importance on, on the device."""
        self.config, self.folder = config, run_dir / "attention"
        self.windows, self.may_fail = windows, may_fail
        self.tokenizer = tokens.tokenizer
        length = min(config.attention.tokens, config.model.block_size)
        self.probes = make_probes(tokens.train, tokens.val, tokens.tokenizer, length, config.seed)
        self.length = self.probes.windows.shape[1]
        self.tables = stages.Tables(tokens.train, self.probes.windows, config.model.vocab_size)
        c, between = config.model, config.attention.every * config.batch_size
        passes = length * length + c.n_layer * c.n_head * length  # tokens
        self.affordable = passes <= EXPLAINED * between * c.block_size
        self.folder.mkdir(exist_ok=True)

    def take(self, model: GPT, step: int, rows: list[dict]
             ) -> tuple[dict[str, float], str | None]:
        """Capture and score every head after `step` optimizer steps, and write it down.

        rows: the run's metrics so far. May be left at any line: all of it can be done again.

        Returns the scores, their errors and the births up to now; where a picture is due, a text
        by the model, else None.
        """
        model, due = capture.in_float32(model), self.picture_due(step)
        last = step == self.config.max_steps
        seen = Seen(model, self.probes)
        held, tables = seen.score()
        if due or self.affordable:
            held |= explain(model, seen.text, self.tokenizer)
        if due and len(self.probes.periods):
            row = seen.random.rows([np.argmax(self.probes.periods)])  # the one that the page shows
            told = explain(model, row, self.tokenizer)
            held |= {f"repeat_{name}": value for name, value in told.items()}
        if last:
            held |= self.without_heads(model)
            tables["importance"] = ablation.importance(held["loss"], held["loss_without"])
        metrics = scores.as_metrics(tables)
        metrics |= ablation.loss_by_place(model, *self.windows, self.config.precision)
        metrics |= self.tables.distances(model, seen.windows)
        metrics |= seen.circuits(held, tables)
        before = next((row for row in reversed(rows) if is_scored(row)), {})
        metrics |= scores.births(before, metrics, self.length)
        if due:
            metrics |= seen.enough(metrics, last)
        path = self.folder / f"step_{step:08d}.npz"
        with self.may_fail():
            capture.save(path, step, self.probes, held)
            if due:
                capture.save_weights(path.with_suffix(".safetensors"), model)
                picture.draw(held["text"], self.probes.words, path.with_suffix(".png"),
                             model.config.kv_heads, f"Attention after {step:,} steps")
        if not due:
            return metrics, None
        return metrics, sample_text(model, self.tokenizer, SAMPLE_TOKENS, self.config.seed)

    def without_heads(self, model: GPT) -> dict[str, np.ndarray]:
        """The losses of windows of validation without each head, and their tokens as text."""
        x, y = self.windows
        ids = torch.cat((x, y[:, -1:]), dim=1).cpu().numpy()  # (W, T + 1)
        tokens = [["" if id < 0 else word(self.tokenizer, id)[:card.LONGEST] for id in row]
                  for row in ids]
        losses = ablation.losses_without_heads(model, x, y, self.config.precision)
        return losses | {"loss_tokens": np.array(tokens)}

    def picture_due(self, step: int) -> bool:
        """Whether it is drawn: each `picture_every` steps, or at the first and each doubling."""
        every, picture_every = self.config.attention.every, self.config.attention.picture_every
        if step in (0, self.config.max_steps):
            return True
        number = step // every
        return step % picture_every == 0 if picture_every else number & (number - 1) == 0


class Seen:
    """The forward passes of a model over all probes."""

    def __init__(self, model: GPT, probes: Probes):
        self.model, self.probes = model, probes
        self.text = capture.capture(model, probes.text[None])
        self.windows, self.random = (capture.capture(model, ids)
                                     for ids in (probes.windows, probes.random))

    def score(self) -> tuple[dict[str, np.ndarray], scores.Tables]:
        """What is kept of the passes, by `capture.arrays`, and the scores of every head."""
        held, periods = capture.arrays(self.model, self.text, self.random), self.probes.periods
        windows = self.windows.weights.cpu().numpy()
        tables = scores.tables(windows, held.get("repeat"), held.get("control"), periods)
        if len(periods):
            tables["copying"] = copying(self.model, capture.thirds(self.random)[2])
        return held, tables

    def circuits(self, held: dict[str, np.ndarray], tables: scores.Tables) -> dict[str, float]:
        """The repeat gain, and who feeds the strongest heads, as metrics."""
        periods, length = self.probes.periods, self.windows.tokens.shape[1]
        if not len(periods):
            return {}
        gains = scores.repeat_gains(held["repeat_loss"], held["reshuffled_loss"], periods)
        heads = {name: strongest(*tables[name], scores.threshold(name, length))
                 for name in wiring.SCORES}
        rows = [*range(len(periods)), *range(2 * len(periods), 3 * len(periods))]
        found = wiring.wiring(self.model, self.windows, self.random.rows(rows), periods, heads)
        return scores.probed({"repeat_gain": gains}) | found

    def enough(self, metrics: dict[str, float], last: bool) -> dict[str, float]:
        """Whether the heads that findings name are enough for a clear repeat gain, as metrics;
        at the last step also which few are."""
        gain, error = (metrics.get(f"probe/repeat_gain{end}", 0) for end in ("", "_se"))
        if gain < max(CLEAR, ERRORS * error):
            return {}
        twice = self.random.rows(range(2 * len(self.probes.periods)))
        alone = Alone(self.model, self.windows, twice, self.probes.periods)
        found = enough(alone, told_heads(metrics))
        return found | (smallest(alone) if last else {})


def strongest(mean: np.ndarray, error: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """The heads (layer, head) that wiring asks for: of a kind, the strongest first."""
    found = np.argwhere(mean - error >= threshold)
    return sorted(map(tuple, found.tolist()), key=lambda head: -mean[head])[:wiring.MOST]


def sample_text(model: GPT, tokenizer: Tokenizer, max_new_tokens: int, seed: int) -> str:
    """A text as the model begins one, always the same for the same weights and seed."""
    text = Text(tokenizer, prompt_ids(tokenizer, ""), seed, documents=2)
    decoder = model.make_decoder(1, 1 + max_new_tokens)
    for _ in generate_texts(decoder, [text], max_new_tokens, temperature=0.8):
        pass
    return text.text


def look(model: GPT, tokenizer: Tokenizer, ids: list[int],
         log: Callable[[str], None]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """What `report.page.attention_page` takes of a text (T), and the scores of every head."""
    model, ids = capture.in_float32(model), np.array(ids)
    text = capture.capture(model, ids[None])
    drawn = expected_tokens(model, text, tokenizer.vocab_size)
    probes = make_probes(drawn, drawn, tokenizer, min(LONGEST, model.config.block_size), seed=0)
    held, tables = Seen(model, replace(probes, text=ids)).score()
    found = {"text": held["text"].astype(np.float16), "text_value_norms": held["text_value_norms"],
             "text_tokens": np.array(words(tokenizer, ids))}
    if len(ids) ** 2 * model.num_parameters() <= LOOKED_AT:
        found |= explain(model, text, tokenizer)
    else:
        log(f"attention: to measure what each of {len(ids)} predictions needed would take too "
             "long with this model, so the page lacks it; fewer tokens have it")
    return found, scores.as_metrics(tables)


@torch.no_grad()
def expected_tokens(model: GPT, text: capture.Forward, vocab_size: int) -> np.ndarray:
    """Tokens (DRAWN,) by how likely the model holds them anywhere in the text: of a model of others
    the training text is not known, and what it never saw tells nothing of its heads."""
    logits = model.head(model.norm(text.residuals[-1, 0]))  # (T, V)
    share = logits[:, :vocab_size].double().softmax(dim=-1).mean(dim=0).cpu().numpy()
    return np.random.default_rng(0).choice(vocab_size, DRAWN, p=share / share.sum())
