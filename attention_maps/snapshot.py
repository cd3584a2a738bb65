"""A snapshot of a run: maps, scores, births, a picture and a text where they are due, importance at
the end. And a look at one prompt."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attention_maps import ablation, capture, picture, scores, wiring
from attention_maps.card import copying, explain
from attention_maps.probe import LONGEST, make_probes, words
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

Images = dict[str, Path | np.ndarray]


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
        # From what score on, less its error, a head is one of its kind.
        self.thresholds = {kind: scores.threshold(kind, len(self.probes.text))
                           for kind in scores.SHARES}
        c, between = config.model, config.attention.every * config.batch_size
        passes = length * length + c.n_layer * c.n_head * length  # tokens
        self.affordable = passes <= EXPLAINED * between * c.block_size
        self.folder.mkdir(exist_ok=True)

    def take(self, model: GPT, step: int, rows: list[dict]
             ) -> tuple[dict[str, float], Images, str | None]:
        """Capture and score every head after `step` optimizer steps, and write it down.

        rows: the run's metrics so far. May be left at any line: all of it can be done again.

        Returns the scores, their errors and the births up to now; where a picture is due, images
        for W&B and a text by the model, else {} and None.
        """
        model, probes, due = capture.in_float32(model), self.probes, self.picture_due(step)
        text, random = (capture.capture(model, ids) for ids in (probes.text[None], probes.random))
        held, tables = score(model, text, random, probes.periods)
        if due or self.affordable:
            held |= explain(model, text, self.tokenizer)
        if due:
            row = random.rows([np.argmax(probes.periods)])  # the one that the page shows
            told = explain(model, row, self.tokenizer)
            held |= {f"repeat_{name}": value for name, value in told.items()}
        if step == self.config.max_steps:
            losses = ablation.losses_without_heads(model, *self.windows, self.config.precision)
            tables["importance"] = ablation.importance(**losses)
            tables |= ablation.costs(*self.windows, **losses)
            held |= losses
        heads = {name: strongest(*tables[name], self.thresholds[name]) for name in wiring.SCORES}
        metrics = scores.repeat_gain(held["repeat_loss"], probes.periods)
        metrics |= wiring.named(wiring.wiring(model, text, random, probes.periods, heads))
        metrics |= scores.as_metrics(tables)
        before = next((row for row in reversed(rows) if is_scored(row)), {})
        metrics |= scores.births(before, metrics, len(probes.text))
        path = self.folder / f"step_{step:08d}.npz"
        with self.may_fail():
            capture.save(path, step, probes, held)
        if not due:
            return metrics, {}, None
        images = self.draw(held["text"], step, tables)
        sample = sample_text(model, self.tokenizer, SAMPLE_TOKENS, self.config.seed)
        return metrics, images, sample

    def picture_due(self, step: int) -> bool:
        """Whether it is drawn: each `picture_every` steps, or at the first and each doubling."""
        every, picture_every = self.config.attention.every, self.config.attention.picture_every
        if step in (0, self.config.max_steps):
            return True
        number = step // every
        return step % picture_every == 0 if picture_every else number & (number - 1) == 0

    def draw(self, maps: np.ndarray, step: int, tables: scores.Tables) -> Images:
        """Draw the maps (L, H, T, T), and each score's table; without what cannot be written."""
        images: Images = {f"heads/{name}": picture.table_image(mean)
                          for name, (mean, _) in scores.own(tables).items()}
        path = self.folder / f"step_{step:08d}.png"
        with self.may_fail():
            picture.draw(maps, self.probes.words, path, self.config.model.kv_heads,
                         f"Attention after {step:,} steps")
            images["attention/map"] = path
        gc.collect()  # a figure's parts refer to each other: ten, of 5 to 10 MB each, would wait
        return images


def score(model: GPT, text: capture.Forward, random: capture.Forward, periods: np.ndarray
          ) -> tuple[dict[str, np.ndarray], scores.Tables]:
    """What is kept of the passes, by `capture.arrays`, and the scores of every head."""
    held = capture.arrays(model, text, random)
    tables = scores.tables(held["text"], held["repeat"], held["control"], periods)
    return held, tables | {"copying": copying(model, random.rows([len(periods)]))}


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
    held, tables = score(model, text, capture.capture(model, probes.random), probes.periods)
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
