"""Generate the sequences of data=synthetic: the tasks, their batches and held-out sequences.

A new task is a class here, an entry in `TASKS`, one in `config.TASK_SYMBOLS`, and its metrics in
training/task_metrics.py.
"""

import hashlib
import json
from dataclasses import asdict
from functools import cached_property
from string import ascii_letters, digits
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from common.text import pluralize
from config import Config
from data.batches import NO_TARGET
from data.tokenizer import CharTokenizer, Tokenizer

SEQUENCES_FORMAT = 1  # version of how sequences are generated; part of their fingerprint
# The characters that symbols are written as: digits, A to Z, a to z, then letters such as À.
CHARACTERS = "".join(
    [*digits, *sorted(ascii_letters), *filter(str.isalpha, map(chr, range(0xC0, 0x370)))]
)
BEGIN = "^"
MIXING_STEPS = 64  # after which a Markov chain is close to its stationary distribution
# Random streams of a seed.
RULES, BATCH, TRAINING, VALIDATION = range(4)


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


class Task:
    """The task of a run: its training batches, and the sequences that validate it.

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
                f"{self.data.task}: use another model"
            )
        self.symbol_ids = np.array(ids[: len(symbols)], np.int64)[:, 0]
        self.begin_id = ids[-1][0] if self.data.begin else None

    # --- what a task defines ----------------------------------------------------------------------

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        """Draw n sequences of symbols, numbered from 0, for BATCH, TRAINING or VALIDATION."""
        raise NotImplementedError

    # --- sequences --------------------------------------------------------------------------------

    def batch(self, step: int, rank: int = 0, processes: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return one process's inputs and targets of a step, as `Batches.batch` does.

        Targets that do not count are NO_TARGET.
        """
        rows = self.batch_size // processes
        chosen = slice(rank * rows, (rank + 1) * rows)
        sequences = self.generate(BATCH, self.batch_size, step)
        return sequences.inputs[chosen], sequences.targets[chosen]

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

    def symbols_of(self, sequences: Sequences) -> np.ndarray:
        """Return the symbols of sequences without the begin symbol, numbered from 0, (n, T + 1)."""
        numbers = np.full(self.tokenizer.vocab_size, -1)
        numbers[self.symbol_ids] = np.arange(len(self.symbol_ids))
        return numbers[sequences.tokens[:, int(self.data.begin) :]]

    # --- descriptions -----------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Return the hash (hex) of the settings that determine the sequences, and the seed."""
        settings = asdict(self.data) | {"symbols": self.data.num_symbols}
        made_from = json.dumps([SEQUENCES_FORMAT, settings, self.block_size])
        return f"{hashlib.sha256(made_from.encode()).hexdigest()}-{self.seed}"

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


# --- the tasks ------------------------------------------------------------------------------------


class Passages(Task):
    """Repeat a passage of `min_period` to `max_period` symbols until the sequence is full.

    A passage is a Markov chain with transitions that are fixed for the run, so what follows a
    symbol can be guessed at first, and is certain once the passage has come before.

    Reference: cf. Olsson et al. 2022, "In-context Learning and Induction Heads".
    """

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        V = self.data.num_symbols
        # Each symbol has a few usual successors
        transitions = self.rules.exponential(size=(V, V)) ** 2
        transitions /= transitions.sum(-1, keepdims=True)
        period = random.integers(self.data.min_period, self.data.max_period + 1, size=(n, 1))
        first = random.integers(V, size=n)
        passages = walk(first, transitions, self.data.max_period, random)  # (n, max_period)
        tokens = np.take_along_axis(passages, np.arange(self.length + 1) % period, axis=1)
        return Sequences(tokens, np.ones((n, self.length), bool))


class MarkovChains(Task):
    """Draw Markov chains, each with Dirichlet transition probabilities of its own.

    The first state follows the stationary distribution.

    Reference: Edelman et al. 2024, "The Evolution of Statistical Induction Heads".
    """

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        K = self.data.num_symbols
        transitions = random.dirichlet(np.full(K, self.data.concentration), size=(n, K))
        stationary = np.linalg.matrix_power(transitions, MIXING_STEPS).mean(1)  # (n, K)
        first = (random.random((n, 1)) > stationary.cumsum(-1)[:, :-1]).sum(-1)
        tokens = walk(first, transitions, self.length + 1, random)
        return Sequences(tokens, np.ones((n, self.length), bool))


def walk(
    first: np.ndarray, transitions: np.ndarray, length: int, random: np.random.Generator
) -> np.ndarray:
    """Return Markov chains (n, length) from states (n,), transitions (K, K) or (n, K, K)."""
    n, K = len(first), transitions.shape[-1]
    thresholds = np.broadcast_to(transitions.cumsum(-1)[..., :-1], (n, K, K - 1))
    uniform = random.random((length, n, 1))
    states = np.empty((length, n), np.int64)
    states[0], rows = first, np.arange(n)
    for t in range(1, length):
        states[t] = (uniform[t] > thresholds[rows, states[t - 1]]).sum(-1)
    return states.T


class ModularAddition(Task):
    """Write additions a+b=c with c = (a + b) mod P, of which only c counts.

    Unordered pairs are split into training and validation, so a+b and b+a are on the same side. A
    batch cycles through a random order of the training pairs; the other streams hold all.

    Reference: Power et al. 2022, "Grokking"; Nanda et al. 2023, "Progress measures for grokking".
    """

    signs = "+="

    def _draw(self, stream: int, n: int, random: np.random.Generator) -> Sequences:
        P = self.data.num_symbols
        pairs = np.stack(np.triu_indices(P), axis=1)
        order = self.rules.permutation(len(pairs))
        num_training = round(self.data.train_share * len(pairs))
        is_validation = stream == VALIDATION
        chosen = pairs[order[num_training:] if is_validation else order[:num_training]]
        mirrored = chosen[chosen[:, 0] < chosen[:, 1], ::-1]
        a, b = np.concatenate((chosen, mirrored)).T
        if stream == BATCH:
            picks = np.resize(random.permutation(len(a)), n)
            a = a[picks]
            b = b[picks]
        plus = np.full_like(a, P)
        equals = np.full_like(a, P + 1)
        tokens = np.stack((a, plus, b, equals, (a + b) % P), axis=1)
        return Sequences(tokens, np.tile([False, False, False, True], (len(a), 1)))

    def _describe_training(self) -> str:
        return f"{pluralize(len(self.training.tokens), 'pair')} to train on"


TASKS: dict[str, type[Task]] = {
    "passages": Passages,
    "markov": MarkovChains,
    "modular": ModularAddition,
}


def make_task(config: Config, tokenizer: Tokenizer | None = None) -> Task:
    """Make the task of a run; `tokenizer` is that of a model that was trained before."""
    return TASKS[config.data.task](config, tokenizer)
