"""The base of all tasks: symbols, batches, held-out sequences, and the average of measurements.

Each metric is a mean over tokens of all sequences; its standard error is that over sequences.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from string import ascii_letters, digits
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from common.statistics import ratio
from common.text import pluralize
from config import Config
from data.batches import NO_TARGET
from data.tokenizer import CharTokenizer, Tokenizer

if TYPE_CHECKING:
    from model import GPT

SEQUENCES_FORMAT = 1  # version of how sequences are generated; part of their fingerprint
# The characters that symbols are written as: digits, A to Z, a to z, then letters such as À.
CHARACTERS = "".join(
    [*digits, *sorted(ascii_letters), *filter(str.isalpha, map(chr, range(0xC0, 0x370)))]
)
BEGIN = "^"
# Random streams of a seed.
RULES, BATCH, TRAINING, VALIDATION = range(4)
# Tokens of the sequences that are measured before the last step, such as 64 sequences of 64 tokens.
# For a model of 35,000 parameters this takes 7% of the time of 25 steps of 2,048 tokens.
MAX_TOKENS = 4096
MAX_VALUES = 1 << 25  # logits or attention weights computed at once: 128 MB in float32


class Sequences(NamedTuple):
    """Sequences of symbols or tokens, one per row."""

    tokens: np.ndarray  # (n, T + 1), int64
    is_counted: np.ndarray  # whether the loss counts the prediction of tokens[:, 1:], (n, T)

    @property
    def inputs(self) -> np.ndarray:
        """All tokens but the last, (n, T)."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> np.ndarray:
        """The token after each input, or NO_TARGET if it does not count, (n, T)."""
        return np.where(self.is_counted, self.tokens[:, 1:], NO_TARGET)


@dataclass(frozen=True)
class Predictions:
    """Predictions and attention weights on n sequences of T tokens, without the begin symbol."""

    symbols: Tensor  # numbers of the symbols, from 0, (n, T)
    log_p: Tensor  # log probability of each symbol as the next token, (n, T, symbols)
    loss: Tensor  # in nats, (n, T)
    is_correct: Tensor  # whether the likeliest next token is the right one, (n, T)
    is_counted: Tensor  # whether the task counts the loss, (n, T)
    weights: Tensor  # attention of each token to each other, (L, H, n, T, T)
    begin_weights: Tensor | None  # attention to the begin symbol if there is one, (L, H, n, T)


class Reading(NamedTuple):
    """A value for each token, and whether it counts.

    If each head has a value, the metric is that of the head with the highest mean, or with the
    highest mean of another metric, `chosen_by`.
    """

    values: Tensor  # (…, n, T), with the dimensions of the heads first if it is one of heads
    is_counted: Tensor  # (n, T)
    chosen_by: str | None = None


class Task:
    """The task of a run: its training batches, the sequences that validate it, and its metrics.

    `symbol_ids` has the token id of each symbol, then of each of the `signs`; `begin_id` is that of
    the begin symbol, or None.
    """

    signs = ""  # characters of further symbols, which are not in `data.symbols`

    def __init__(self, config: Config, tokenizer: Tokenizer | None = None) -> None:
        """Set up the task of a run; `tokenizer` is that of a model that was trained before."""
        self.data = config.data
        self.block_size = config.model.block_size
        self.batch_size = config.batch_size
        self.length = self.block_size - self.data.begin  # T without the begin symbol
        self.seed = config.seed
        symbols = CHARACTERS[: self.data.num_symbols] + self.signs
        self.tokenizer = tokenizer or CharTokenizer(symbols + BEGIN * self.data.begin)
        ids = [self.tokenizer.encode(symbol) for symbol in symbols + BEGIN * self.data.begin]
        if any(len(of_symbol) != 1 for of_symbol in ids):
            raise UserError(
                f"the tokenizer of this model has no token for each symbol of data.task="
                f"{self.data.task}; use another model"
            )
        self.symbol_ids = np.array(ids[: len(symbols)], np.int64)[:, 0]
        self.begin_id = ids[-1][0] if self.data.begin else None

    # --- what a task defines ----------------------------------------------------------------------

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        """Draw n sequences of symbols, numbered from 0, for BATCH, TRAINING or VALIDATION."""
        raise NotImplementedError

    def read(self, p: Predictions) -> dict[str, Reading]:
        """Return the readings of the task's metrics."""
        return {
            "loss": Reading(p.loss, p.is_counted),
            "accuracy": Reading(p.is_correct, p.is_counted),
        }

    # --- sequences --------------------------------------------------------------------------------

    def batch(self, step: int, rank: int = 0, processes: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return one process's inputs and targets of a step, as `Batches.batch` does.

        Targets that do not count are NO_TARGET.
        """
        rows = self.batch_size // processes
        chosen = slice(rank * rows, (rank + 1) * rows)
        tokens, is_counted = self.generate(BATCH, self.batch_size, step)
        share = Sequences(tokens[chosen], is_counted[chosen])
        return share.inputs, share.targets

    @cached_property
    def training(self) -> Sequences:
        """Sequences like those of the batches; in modular addition all training pairs."""
        return self.generate(TRAINING, self._num_sequences)

    @cached_property
    def validation(self) -> Sequences:
        """Sequences of `data.val_max_tokens` held-out tokens; in modular addition all pairs."""
        return self.generate(VALIDATION, self._num_sequences)

    @property
    def rules(self) -> np.random.Generator:
        """The random generator of the rules that all sequences of a run share."""
        return np.random.default_rng((self.seed, RULES))

    @property
    def prompt(self) -> list[int]:
        """The first held-out sequence up to the first token that counts, such as 3+4=."""
        tokens, is_counted = self.validation
        return tokens[0, : is_counted[0].argmax() + 1].tolist()

    @property
    def _num_sequences(self) -> int:
        return max(1, self.data.val_max_tokens // self.block_size)

    def generate(self, stream: int, count: int, step: int = 0) -> Sequences:
        """Return sequences of a stream, such as those of the batch of a step, as token ids."""
        random = np.random.default_rng((self.seed, stream, step))
        symbols, is_counted = self._draw(stream, count, random)
        tokens = self.symbol_ids[symbols]
        if self.begin_id is not None:
            tokens = np.insert(tokens, 0, self.begin_id, axis=1)
            is_counted = np.insert(is_counted, 0, is_counted[:, 0], axis=1)
        return Sequences(tokens, is_counted)

    def symbols_of(self, sequences: Sequences) -> Tensor:
        """Return the symbols of sequences without the begin symbol, numbered from 0, (n, T + 1)."""
        numbers = torch.full((self.tokenizer.vocab_size,), -1)
        numbers[torch.from_numpy(self.symbol_ids)] = torch.arange(len(self.symbol_ids))
        return numbers[torch.from_numpy(sequences.tokens)[:, int(self.data.begin) :]]

    # --- metrics ----------------------------------------------------------------------------------

    def measure(self, model: "GPT", is_last: bool = False) -> dict[str, float]:
        """Return `task/<name>` of a model, with the standard errors `task/<name>_se`.

        At the last step of a run all held-out sequences are measured, before it only some of them.
        The model's mode and torch's random state do not change.
        """
        metrics = self.measure_sequences(model, self.validation, is_last)
        return {f"task/{name}": value for name, value in metrics.items()}

    def measure_sequences(
        self, model: "GPT", sequences: Sequences, is_last: bool
    ) -> dict[str, float]:
        """Return metrics and errors; before the last step of only some sequences."""
        T, config = self.block_size, model.config
        n = len(sequences.tokens)
        max_sequences = n if is_last else max(1, MAX_TOKENS // T)
        chosen = np.linspace(0, n - 1, min(n, max_sequences)).round().astype(int)
        logits_per_row = T * len(model.head.weight)
        weights_per_row = config.n_layer * config.n_head * T * T
        rows = max(1, MAX_VALUES // max(logits_per_row, weights_per_row))
        return average(
            self.read(
                self.predict(model, Sequences(sequences.tokens[which], sequences.is_counted[which]))
            )
            for which in np.split(chosen, range(rows, len(chosen), rows))
        )

    @torch.no_grad()
    def predict(self, model: "GPT", sequences: Sequences) -> Predictions:
        """Run the model on sequences."""
        device = model.head.weight.device
        tokens = torch.from_numpy(sequences.tokens).to(device)  # (n, T + 1)
        logits, values = model.run_with_cache(tokens[:, :-1], "weights")
        log_p = logits.float().log_softmax(-1)  # (n, T, V)
        loss = F.nll_loss(log_p.transpose(1, 2), tokens[:, 1:], reduction="none")
        is_correct = log_p.argmax(-1) == tokens[:, 1:]
        weights = torch.stack(list(values.values())).transpose(1, 2)  # (L, H, n, T, T)
        ids = torch.from_numpy(self.symbol_ids[: self.data.num_symbols]).to(device)
        first = int(self.data.begin)
        return Predictions(
            self.symbols_of(sequences).to(device)[:, :-1],
            log_p[:, first:, ids],
            loss[:, first:],
            is_correct[:, first:],
            torch.from_numpy(sequences.is_counted).to(device)[:, first:],
            weights[..., first:, first:],
            weights[..., first:, 0] if first else None,
        )

    # --- descriptions -----------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Return the hash (hex) of what determines the sequences."""
        # Older versions had two more settings, which had no effect on these tasks
        settings = asdict(self.data) | {"symbols": self.data.num_symbols, "pairs": 8}
        made_from = json.dumps([SEQUENCES_FORMAT, settings, self.block_size, self.seed])
        made_from = made_from.replace('"field": ', '"lines": "kept", "field": ')
        return hashlib.sha256(made_from.encode()).hexdigest()

    def _describe_training(self) -> str:
        return "new sequences in each step"

    def summary(self) -> list[str]:
        """Describe the task in lines of at most 80 columns."""
        held_out = len(self.validation.tokens)
        counted = int(self.validation.is_counted[0].sum())
        return [
            f"data     generated sequences of {pluralize(self.block_size, 'token')}: "
            f"{self.data.task}",
            f"         {self._describe_training()}, {held_out:,} held out for validation",
            f"         the loss counts {pluralize(counted, 'token')} of each",
            f"tokens   vocabulary {self.tokenizer.vocab_size:,}",
        ]


def average(batches: Iterable[dict[str, Reading]]) -> dict[str, float]:
    """Return the means and errors of metrics from their readings of batches of sequences."""
    sums, counts = defaultdict(list), defaultdict(list)
    chosen_by: dict[str, str] = {}
    for readings in batches:
        for name, (values, is_counted, other) in readings.items():
            sums[name].append((values * is_counted).sum(-1).double())  # (…, n)
            counts[name].append(is_counted.sum(-1))  # (n,)
            chosen_by[name] = other or name
    estimates = {
        name: ratio(
            torch.cat(sums[name], dim=-1).cpu().numpy(), torch.cat(counts[name]).cpu().numpy()
        )
        for name in sums
    }
    metrics: dict[str, float] = {}
    for name, (mean, error) in estimates.items():
        by_head, _ = estimates[chosen_by[name]]
        strongest = np.unravel_index(np.argmax(by_head), by_head.shape)
        metrics |= {name: float(mean[strongest]), f"{name}_se": float(error[strongest])}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def read_previous_token(weights: Tensor) -> Reading:
    """Return the weight of each token but the first on the one before, (…, n, T)."""
    values = F.pad(weights.diagonal(-1, -2, -1), (1, 0))  # (…, n, T)
    is_counted = torch.ones(values.shape[-2:], dtype=torch.bool, device=values.device)
    is_counted[:, 0] = False
    return Reading(values, is_counted)
