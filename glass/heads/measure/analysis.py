"""Measure the attention heads of a model: run it on all probes and compute every measurement.

Training snapshots, `sample.py attention=…` and the Python API share this code.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from common.errors import UserError
from common.text import pluralize
from data.tokenizer import Tokenizer, encode_prompt
from generation.decoder import cut
from generation.sampling import NON_FINITE_PREDICTIONS
from glass.heads.measure import composition, scores
from glass.heads.measure.arguments import Text, read_ids
from glass.heads.measure.capture import (
    ForwardPass,
    capture,
    in_float32,
    snapshot_arrays,
    value_norms,
)
from glass.heads.measure.circuit import find_induction_circuit, reported_copying_gain
from glass.heads.measure.emergence import threshold, update_emergence
from glass.heads.measure.faithfulness import measure_faithfulness, measure_isolated_gains
from glass.heads.measure.logit_attribution import (
    copying_scores,
    count_explained_tokens,
    explain_predictions,
)
from glass.heads.measure.probes import Probes, make_probes, spell_tokens
from glass.heads.measure.results import (
    CompositionShare,
    Estimates,
    Faithfulness,
    Head,
    Measurements,
    Scores,
)
from model import GPT
from training.device import default_settings

RANDOM_ROW_TOKENS = 32  # tokens in each random row that `analyze` draws
EXPECTED_TOKENS = 1 << 16  # sampled to estimate the token frequencies of random rows
# In larger models fewer heads and components are measured, no sufficient heads are found, and
# `analyze` omits faithfulness.
LARGE_MODEL_PARAMETERS = 20_000_000
MAX_COMPONENTS_OF_LARGE_MODEL = 4


@dataclass(frozen=True)
class Analysis(Measurements):
    """Measurements of a model's heads, with arrays for one text of T tokens.

    `arrays` has the attention patterns `text` (L, H, T, T), `text_value_norms` (L, H, T), the
    tokens `text_ids` and `text_tokens` (T,), and those of `explain_predictions`.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)


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
    ids = np.array(encode_end(model, tokenizer, text, model.config.block_size))
    text_pass = capture(model, ids[None])
    measurements = call_with_lines(measure_heads(model, tokenizer, text_pass), log)
    arrays = {
        "text": text_pass.weights[:, 0].cpu().numpy(),
        "text_value_norms": value_norms(model, text_pass.v)[:, 0].cpu().numpy(),
        "text_ids": ids,
        "text_tokens": np.array(spell_tokens(tokenizer, ids)),
    }
    count = count_explained_tokens(model, len(ids))
    of_all = f", the last of {len(ids):,}" if count < len(ids) else ""
    log(f"attention: token and head effects on {pluralize(count, 'prediction')}{of_all}")
    arrays |= explain_predictions(model, text_pass, tokenizer)
    return Analysis(**vars(measurements), arrays=arrays)


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


def measure_heads(
    model: GPT, tokenizer: Tokenizer, text: ForwardPass
) -> Generator[str, None, Measurements]:
    """Measure every head on random tokens, drawn from the model's predictions on a text.

    Yields the name of each of two stages before it. Faithfulness is measured in small models only.
    """
    expected = draw_expected_tokens(model, text, tokenizer.vocab_size)
    length = min(RANDOM_ROW_TOKENS, model.config.block_size)
    probes = make_probes(expected, expected, tokenizer, length, seed=0)
    windows = probes.control if len(probes.control) else probes.windows
    yield "scores of every head on random tokens"
    run = ProbeRun(model, replace(probes, windows=windows), text)
    head_scores = run.score_heads()
    yield "composition of the strongest heads"
    measurements = run.measure(0, head_scores)
    emergence = update_emergence(measurements, measurements, run.window_length)
    measurements = replace(measurements, emergence=emergence)  # heads that pass now
    if not run.is_large:
        measurements = replace(measurements, faithfulness=run.measure_faithfulness(measurements))
    return measurements


def call_with_lines(
    stages: Generator[str, None, Measurements], log: Callable[[str], None]
) -> Measurements:
    """Call `log` with each line that a measurement yields, and return its result."""
    while True:
        try:
            log(f"attention: {next(stages)}")
        except StopIteration as end:
            return end.value


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

    def __init__(self, model: GPT, probes: Probes, text: ForwardPass | None = None) -> None:
        self.model, self.periods = model, probes.periods
        # Whether fewer heads and components are measured.
        self.is_large = model.num_parameters() > LARGE_MODEL_PARAMETERS
        self.text = capture(model, probes.text[None]) if text is None else text
        self.random = capture(model, probes.random)
        self._control = self._random_rows(2)
        is_control = probes.windows is probes.control
        self._windows = self._control if is_control else capture(model, probes.windows)
        self.arrays = snapshot_arrays(model, self.text, self.random)
        self.window_length = self._windows.tokens.shape[1]  # tokens in each scored window

    def _random_rows(self, *kinds: int) -> ForwardPass:
        """Select the repeated (0), reshuffled (1) or control rows (2) of the random ones."""
        rows = np.arange(len(self.random.tokens)).reshape(3, -1)  # (3, P)
        return self.random.rows(rows[list(kinds)].ravel())

    def score_heads(self) -> Scores:
        """Compute every score of every head, except head importance."""
        readings = scores.readings(
            self._windows.weights.cpu().numpy(),
            self.arrays.get("repeated"),
            self.arrays.get("control"),
            self.periods,
            self.model.config.attention_sink,
        )
        head_scores = {name: scores.mean_and_error(values) for name, values in readings.items()}
        if len(self.periods):
            mean, error = head_scores["induction"]
            measured = np.ones(mean.shape, bool)
            if self.is_large:  # measure induction heads only
                measured = mean - error >= threshold("induction", self.window_length)
            head_scores["copying"] = copying_scores(self.model, self._control, measured)
        return head_scores

    def measure(
        self, step: int, head_scores: Scores, previous: Measurements | None = None
    ) -> Measurements:
        """Compute all measurements except faithfulness; `previous` is the snapshot before."""
        measurements = Measurements(step, head_scores)
        emergence = update_emergence(previous, measurements, self.window_length)
        measurements = replace(measurements, emergence=emergence)
        if not len(self.periods):
            return measurements
        names = ("repeated_loss", "reshuffled_loss", "repeated_correct")
        repeated, reshuffled, correct = (
            scores.second_half_means(self.arrays[name], self.periods) for name in names
        )
        return replace(
            measurements,
            copying_gain=scores.mean_estimate(reshuffled - repeated),
            repeated_loss=scores.mean_estimate(repeated),
            repeated_accuracy=scores.mean_estimate(correct),
            composition=self._measure_composition(head_scores),
        )

    def _measure_composition(self, head_scores: Scores) -> tuple[CompositionShare, ...]:
        most = dict.fromkeys(composition.MEASURED_SCORES, composition.MAX_MEASURED_HEADS)
        if self.is_large:
            most = {"induction": 1}
        heads = {}
        for name, count in most.items():
            minimum = threshold(name, self.window_length)
            heads[name] = strongest_heads(head_scores[name], minimum)[:count]
        shares = composition.measure_composition(
            self.model,
            self._windows,
            self._random_rows(0, 2),
            self.periods,
            heads,
            MAX_COMPONENTS_OF_LARGE_MODEL if self.is_large else None,
        )
        return tuple(shares)

    def measure_faithfulness(
        self, measurements: Measurements, finds_sufficient: bool = True
    ) -> Faithfulness | None:
        """Measure the induction circuit's faithfulness; None if no copying gain is reported."""
        if reported_copying_gain(measurements) is None:
            return None
        rows, config = self._random_rows(0, 1), self.model.config
        return measure_faithfulness(
            partial(measure_isolated_gains, self.model, rows, self.periods),
            [Head(*index) for index in np.ndindex(config.n_layer, config.n_head)],
            find_induction_circuit(measurements),
            finds_sufficient and not self.is_large,
        )


def highest_induction_score(model: GPT, probes: Probes) -> float:
    """Return the highest prefix-matching score of any head: a cheap part of `ProbeRun`."""
    ids = np.concatenate((probes.repeated, probes.control))
    tokens = torch.from_numpy(ids).to(model.head.weight.device)
    A = model.attention_maps(tokens).cpu().numpy()  # (L, 2 P, H, T, T)
    repeated, control = np.split(A, 2, axis=1)
    return float(scores.induction(repeated, control, probes.periods).mean(axis=-1).max())


def strongest_heads(head_scores: Estimates, minimum: float) -> list[Head]:
    """Return the heads whose score minus its standard error reaches `minimum`, strongest first."""
    passing = np.argwhere(head_scores.mean - head_scores.error >= minimum)
    heads = [Head(*index) for index in passing.tolist()]
    return sorted(heads, key=lambda head: -head_scores.mean[head])
