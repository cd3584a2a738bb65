"""Measure the attention heads of a model: run it on all probes and compute every measurement.

Training snapshots, `sample.py attention=…` and the Python API share this code.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.text import pluralize
from data.tokenizer import Tokenizer, encode_prompt
from generation.decoder import cut
from generation.sampling import NON_FINITE_PREDICTIONS
from generation.scoring import max_logit_rows, token_losses
from glass.heads.measure import scores
from glass.heads.measure.arguments import Text, read_ids
from glass.heads.measure.capture import ForwardPass, capture, in_float32, next_tokens, value_norms
from glass.heads.measure.circuit import find_induction_circuit, reported_copying_gain
from glass.heads.measure.composition import MAX_MEASURED_HEADS, ScoredRows, measure_composition
from glass.heads.measure.emergence import date_emergence, find_passing_heads
from glass.heads.measure.faithfulness import measure_faithfulness, measure_isolated_gains
from glass.heads.measure.logit_attribution import (
    copying_scores,
    count_explained_tokens,
    explain_predictions,
)
from glass.heads.measure.probes import Probes, make_probes, spell_tokens
from model import GPT
from run.row import COMPANION_SUFFIXES, Head, Row
from training.device import default_settings

RANDOM_ROW_TOKENS = 32  # tokens in each random row that `analyze` draws
EXPECTED_TOKENS = 1 << 16  # sampled to estimate the token frequencies of random rows
# In larger models fewer heads and components are measured, no sufficient heads are found, and
# `analyze` omits faithfulness.
LARGE_MODEL_PARAMETERS = 20_000_000
MAX_COMPONENTS_OF_LARGE_MODEL = 4


class Analysis(NamedTuple):
    """The measurements of a model's heads, and arrays of one text of T tokens."""

    row: Row  # by the names of metrics.jsonl
    # The attention patterns `text` (L, H, T, T), `text_value_norms` (L, H, T), the tokens
    # `text_ids` and `text_tokens` (T,), and those of `explain_predictions`.
    arrays: dict[str, np.ndarray]


@default_settings()
def analyze(
    model: GPT, tokenizer: Tokenizer, text: Text, log: Callable[[str], None] = print
) -> Analysis:
    """Measure every attention head on a text and on random tokens.

    The random tokens are sampled from the model's own predictions on the text. The training data
    of an imported model is unknown, and its heads may not work on tokens that it never saw.

    Only the last `block_size` tokens of the text are used; a begin-of-text token stays the first.
    """
    model = in_float32(model)
    ids = encode_end(model, tokenizer, text, model.config.block_size)
    probes = make_expected_probes(model, tokenizer, ids)
    run = ProbeRun(model, probes)
    row = Row()
    for stage in run.measure_in_stages(row):
        log(f"attention: {stage}")
    arrays = {name: run.arrays[name] for name in ("text", "text_value_norms")}
    arrays |= {"text_ids": probes.text, "text_tokens": np.array(probes.text_tokens)}
    count = count_explained_tokens(model, len(ids))
    of_all = f", the last of {len(ids):,}" if count < len(ids) else ""
    log(f"attention: token and head effects on {pluralize(count, 'prediction')}{of_all}")
    arrays |= explain_predictions(model, run.text, tokenizer)
    return Analysis(row, arrays)


def encode_end(
    model: GPT, tokenizer: Tokenizer, text: Text, max_tokens: int, name: str = "text"
) -> list[int]:
    """Return the last `max_tokens` ids of a text; a begin-of-text token stays the first.

    An error names the text as `name`.
    """
    encode = partial(encode_prompt, tokenizer)
    tokens = torch.tensor([read_ids(name, text, encode, model.config.vocab_size)])
    start = max(0, tokens.shape[1] - max_tokens)
    return cut(tokens, start, tokenizer.begin_of_text)[0].tolist()


def make_expected_probes(model: GPT, tokenizer: Tokenizer, ids: Sequence[int]) -> Probes:
    """Make the probes of a text, and of random tokens that the model expects in it.

    Its windows are the control rows, if there are any.
    """
    text = np.array(ids)
    expected = draw_expected_tokens(model, capture(model, text[None]), tokenizer.vocab_size)
    length = min(RANDOM_ROW_TOKENS, model.config.block_size)
    probes = make_probes(expected, expected, tokenizer, length, seed=0)
    windows = probes.control if len(probes.control) else probes.windows
    tokens = spell_tokens(tokenizer, text)
    return replace(probes, text=text, text_tokens=tokens, windows=windows)


@torch.no_grad()
def draw_expected_tokens(model: GPT, text: ForwardPass, vocab_size: int) -> np.ndarray:
    """Sample `EXPECTED_TOKENS` ids from the mean of the model's predictions on a text."""
    logits = model.head(model.norm(text.residuals[-1, 0]))  # (T, V)
    probabilities = logits[:, :vocab_size].double().softmax(dim=-1).mean(dim=0).cpu().numpy()
    if not np.isfinite(probabilities).all():
        raise UserError(NON_FINITE_PREDICTIONS)
    probabilities = probabilities / probabilities.sum()
    return np.random.default_rng(0).choice(vocab_size, EXPECTED_TOKENS, p=probabilities)


class ProbeRun:
    """Run a model on all probes, and compute measurements from these forward passes."""

    def __init__(self, model: GPT, probes: Probes) -> None:
        self.model = model
        self.shape = model.config.n_layer, model.config.n_head
        self.periods = probes.periods
        self.is_large = model.num_parameters() > LARGE_MODEL_PARAMETERS
        self.random = capture(model, probes.random)
        self.control = self._random_rows(2)
        is_control = probes.windows is probes.control  # whose pass is not run again
        self.windows = self.control if is_control else capture(model, probes.windows)
        self.window_length = self.windows.tokens.shape[1]
        self.text = capture(model, probes.text[None])
        self.arrays = snapshot_arrays(model, self.text, self.random)

    def _random_rows(self, *kinds: int) -> ForwardPass:
        """Select the repeated (0), reshuffled (1) or control rows (2) of the random ones."""
        rows = np.arange(len(self.random.tokens)).reshape(3, -1)  # (3, P)
        return self.random.rows(rows[list(kinds)].ravel())

    def measure_in_stages(self, row: Row) -> Iterator[str]:
        """Write all measurements into `row`; yield the name of each of two stages before it.

        Faithfulness is measured in small models only.
        """
        yield "scores of every head on random tokens that the model expects in this text"
        row |= {"step": 0} | self.score_heads()
        row |= date_emergence(row, row, self.window_length)  # heads that pass now
        yield "composition of the strongest heads"
        row |= self.measure_copying()
        row |= self.measure_composition(row)
        if not self.is_large:
            row |= self.measure_faithfulness(row)

    def score_heads(self) -> Row:
        """Compute every score of every head, except head importance."""
        readings = scores.readings(
            self.windows.weights.cpu().numpy(),
            self.arrays.get("repeated"),
            self.arrays.get("control"),
            self.periods,
            self.model.config.attention_sink,
        )
        row = Row()
        for name, values in readings.items():
            mean, error = scores.mean_and_error(values)
            is_companion = name.endswith(COMPANION_SUFFIXES)  # it has no error of its own
            row.put_heads(f"heads/{name}", mean, None if is_companion else error)
        if len(self.periods):
            measured = self._select_copying_heads(row)
            row.put_heads("heads/copying", *copying_scores(self.model, self.control, measured))
        return row

    def _select_copying_heads(self, row: Row) -> np.ndarray:
        """Return for which heads copying is measured, (L, H): all, or only induction heads."""
        is_selected = np.full(self.shape, not self.is_large)
        for head in find_passing_heads(row, "induction", self.window_length):
            is_selected[head] = True
        return is_selected

    def measure_copying(self) -> Row:
        """Compute the copying gain, and the loss and accuracy on repeated random tokens."""
        row = Row()
        if len(self.periods):
            repeated = self._second_half_means("repeated_loss")
            reshuffled = self._second_half_means("reshuffled_loss")
            correct = self._second_half_means("repeated_correct")
            row.put("probe/copying_gain", scores.mean_and_error(reshuffled - repeated))
            row.put("probe/repeated_loss", scores.mean_and_error(repeated))
            row.put("probe/repeated_accuracy", scores.mean_and_error(correct))
        return row

    def _second_half_means(self, name: str) -> np.ndarray:
        return scores.second_half_means(self.arrays[name], self.periods)  # (P,)

    def measure_composition(self, scored: Row) -> Row:
        """Measure the composition of the heads with the highest scores in a row."""
        row = Row()
        if not len(self.periods):
            return row
        rows = {
            "previous_token": ScoredRows(self.windows),
            "induction": ScoredRows(self._random_rows(0, 2), self.periods),
        }
        most = MAX_MEASURED_HEADS
        max_components = None
        if self.is_large:
            del rows["previous_token"]
            most = 1
            max_components = MAX_COMPONENTS_OF_LARGE_MODEL
        for score, scored_rows in rows.items():
            heads = find_passing_heads(scored, score, self.window_length)[:most]
            row |= measure_composition(self.model, score, heads, scored_rows, max_components)
        return row

    def measure_faithfulness(self, measured: Row, finds_sufficient: bool = True) -> Row:
        """Measure the induction circuit's faithfulness; nothing if no copying gain is reported."""
        if reported_copying_gain(measured) is None:
            return Row()
        rows = self._random_rows(0, 1)
        return measure_faithfulness(
            partial(measure_isolated_gains, self.model, rows, self.periods),
            [Head(*index) for index in np.ndindex(self.shape)],
            find_induction_circuit(measured),
            finds_sufficient and not self.is_large,
        )


def snapshot_arrays(model: GPT, text: ForwardPass, random: ForwardPass) -> dict[str, np.ndarray]:
    """Return the arrays that a snapshot saves, of a text (1, T) and random rows (3 P, T_r).

    They are attention patterns (…, H, T, T), value norms (…, H, T), losses (P, T_r) in nats, and
    whether the likeliest token is the next one (P, T_r); the last of a row is nan.
    """
    arrays = {"text": text.weights[:, 0], "text_value_norms": value_norms(model, text.v)[:, 0]}
    if P := len(random.tokens) // 3:
        x = random.residuals[-1]
        targets = next_tokens(random.tokens)
        arrays["repeated"] = random.weights[:, :P]
        arrays["control"] = random.weights[:, 2 * P :]
        arrays["repeated_value_norms"] = value_norms(model, random.v[:, :P])
        arrays["repeated_loss"] = token_losses(model, x[:P], targets[:P])
        arrays["reshuffled_loss"] = token_losses(model, x[P : 2 * P], targets[P : 2 * P])
        arrays["repeated_correct"] = _correct_predictions(model, x[:P], targets[:P])
    return {name: value.cpu().numpy() for name, value in arrays.items()}


@torch.no_grad()
def _correct_predictions(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the likeliest next token is the target, else 0; nan where the target is -1."""
    some = x.flatten(0, -2).split(max_logit_rows(model))
    likeliest = torch.cat([model.head(model.norm(rows)).argmax(dim=-1) for rows in some])
    is_correct = likeliest.view(targets.shape) == targets
    return is_correct.float().masked_fill(targets < 0, torch.nan)


def highest_induction_score(model: GPT, probes: Probes) -> float:
    """Return the highest prefix-matching score of any head: a cheap part of `ProbeRun`."""
    ids = np.concatenate((probes.repeated, probes.control))
    tokens = torch.from_numpy(ids).to(model.head.weight.device)
    A = model.attention_maps(tokens).cpu().numpy()  # (L, 2 P, H, T, T)
    repeated, control = np.split(A, 2, axis=1)
    return float(scores.induction(repeated, control, probes.periods).mean(axis=-1).max())
