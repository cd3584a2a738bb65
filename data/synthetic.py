"""Generate the sequences of a task: a pure function of the settings, the seed and the step.

A new task is a function here, an entry in `TASKS`, and one in `config.TASK_SYMBOLS`.
"""

import hashlib
import json
from dataclasses import asdict
from functools import cached_property
from string import ascii_letters, digits
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.errors import UserError
from common.text import pluralize
from config import Config, DataConfig
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
MIXING_STEPS = 64  # after which a Markov chain is close to its stationary distribution


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


class Draw(NamedTuple):
    """Which sequences of a task to generate."""

    stream: int  # BATCH, TRAINING or VALIDATION
    n: int  # number of sequences
    length: int  # T
    rules: np.random.Generator  # draws what all sequences of a run share
    random: np.random.Generator  # draws the sequences


def repeat_passages(data: DataConfig, draw: Draw) -> Sequences:
    """Repeat a passage of `min_period` to `max_period` symbols until the sequence is full.

    A passage is a Markov chain with transitions that are fixed for the run, so what follows a
    symbol can be guessed at first, and is certain once the passage has come before.

    Reference: cf. Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    n, V = draw.n, data.num_symbols
    transitions = draw.rules.exponential(size=(V, V)) ** 2  # each symbol has a few usual successors
    transitions /= transitions.sum(-1, keepdims=True)
    period = draw.random.integers(data.min_period, data.max_period + 1, size=(n, 1))
    first = draw.random.integers(V, size=n)
    passages = walk(first, transitions, data.max_period, draw.random)  # (n, max_period)
    tokens = np.take_along_axis(passages, np.arange(draw.length + 1) % period, axis=1)
    return Sequences(tokens, np.ones((n, draw.length), bool))


def sample_markov_chains(data: DataConfig, draw: Draw) -> Sequences:
    """Draw Markov chains, each with Dirichlet transition probabilities of its own.

    The first state follows the stationary distribution.

    Reference: Edelman et al. 2024, "The Evolution of Statistical Induction Heads".
    """
    n, K = draw.n, data.num_symbols
    transitions = draw.random.dirichlet(np.full(K, data.concentration), size=(n, K))  # (n, K, K)
    stationary = np.linalg.matrix_power(transitions, MIXING_STEPS).mean(1)  # (n, K)
    first = (draw.random.random((n, 1)) > stationary.cumsum(-1)[:, :-1]).sum(-1)
    tokens = walk(first, transitions, draw.length + 1, draw.random)
    return Sequences(tokens, np.ones((n, draw.length), bool))


def add_modulo(data: DataConfig, draw: Draw) -> Sequences:
    """Write additions a+b=c with c = (a + b) mod P, of which only c counts.

    Unordered pairs are split into training and validation, so a+b and b+a are on the same side. A
    batch cycles through a random order of the training pairs; the other streams hold all.

    Reference: Power et al. 2022, "Grokking"; Nanda et al. 2023, "Progress measures for grokking".
    """
    P = data.num_symbols
    pairs = np.stack(np.triu_indices(P), axis=1)
    order = draw.rules.permutation(len(pairs))
    num_training = round(data.train_share * len(pairs))
    is_validation = draw.stream == VALIDATION
    chosen = pairs[order[num_training:] if is_validation else order[:num_training]]
    mirrored = chosen[chosen[:, 0] < chosen[:, 1], ::-1]
    a, b = np.concatenate((chosen, mirrored)).T
    if draw.stream == BATCH:
        picks = np.resize(draw.random.permutation(len(a)), draw.n)
        a, b = a[picks], b[picks]
    plus, equals = np.full_like(a, P), np.full_like(a, P + 1)
    tokens = np.stack((a, plus, b, equals, (a + b) % P), axis=1)
    return Sequences(tokens, np.tile([False, False, False, True], (len(a), 1)))


def recall_pairs(data: DataConfig, draw: Draw) -> Sequences:
    """List pairs of a key and a value, then each key again in another order with its value.

    Only the values in the second part count. Keys are the first half of the symbols.

    Reference: Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language
    Models".
    """
    n, pairs, num_keys = draw.n, data.pairs, data.num_symbols // 2
    keys = draw.random.random((n, num_keys)).argsort(-1)[:, :pairs]  # distinct in each row
    values = draw.random.integers(num_keys, data.num_symbols, size=(n, pairs))
    order = draw.random.random((n, pairs)).argsort(-1)
    facts = np.stack((keys, values), axis=-1)  # (n, pairs, 2)
    questions = np.take_along_axis(facts, order[..., None], axis=1)
    tokens = np.concatenate((facts, questions), axis=1).reshape(n, 4 * pairs)
    positions = np.arange(1, 4 * pairs)  # of the predicted tokens
    is_answer = (positions > 2 * pairs) & (positions % 2 == 1)
    return Sequences(tokens, np.tile(is_answer, (n, 1)))


TASKS = {
    "passages": repeat_passages,
    "markov": sample_markov_chains,
    "modular": add_modulo,
    "recall": recall_pairs,
}
SIGNS = {"modular": "+="}  # characters of further symbols, which are not in `data.symbols`


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


class Task:
    """The task of a run: its training batches, and the sequences that validate it.

    `symbol_ids` has the token id of each symbol, then of each of the `SIGNS`; `begin_id` is that of
    the begin symbol, or None.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer | None = None) -> None:
        """Set up the task of a run; `tokenizer` is that of a model that was trained before."""
        self.data = config.data
        self.block_size = config.model.block_size
        self.batch_size = config.batch_size
        self.seed = config.seed
        symbols = CHARACTERS[: self.data.num_symbols] + SIGNS.get(self.data.task, "")
        self.tokenizer = tokenizer or CharTokenizer(symbols + BEGIN * self.data.begin)
        self.symbol_ids = np.concatenate([self._encode(symbol) for symbol in symbols])
        self.begin_id = int(self._encode(BEGIN)[0]) if self.data.begin else None

    def _encode(self, symbol: str) -> np.ndarray:
        try:
            ids = self.tokenizer.encode_array(symbol)
        except UserError:  # a character that the model was not trained on
            ids = np.array([])
        if len(ids) != 1:
            raise UserError(
                f"the tokenizer of this model encodes the symbol {symbol} of data.task="
                f"{self.data.task} as {pluralize(len(ids), 'token')}; use a model with one token "
                "for each, or fewer data.symbols"
            )
        return ids.astype(np.int64)

    def batch(self, step: int, rank: int = 0, processes: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return one process's inputs and targets of a step, counted from 0.

        Both are int64 arrays of (batch_size / processes, T). Targets that do not count are
        NO_TARGET.
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
    def prompt(self) -> list[int]:
        """The first held-out sequence up to the first token that counts, such as 3+4=."""
        tokens, is_counted = self.validation
        return tokens[0, : is_counted[0].argmax() + 1].tolist()

    @property
    def _num_sequences(self) -> int:
        return max(1, self.data.val_max_tokens // self.block_size)

    def generate(self, stream: int, count: int, step: int = 0) -> Sequences:
        """Return sequences of a stream, such as those of the batch of a step, as token ids."""
        draw = Draw(
            stream,
            count,
            self.block_size - self.data.begin,
            np.random.default_rng((self.seed, RULES)),
            np.random.default_rng((self.seed, stream, step)),
        )
        symbols, is_counted = TASKS[self.data.task](self.data, draw)
        tokens = self.symbol_ids[symbols]
        if self.begin_id is not None:
            tokens = np.insert(tokens, 0, self.begin_id, axis=1)
            is_counted = np.insert(is_counted, 0, is_counted[:, 0], axis=1)
        return Sequences(tokens, is_counted)

    def measure(self, model: "GPT", is_last: bool = False) -> dict[str, float]:
        """Return how well a model solves the task, as `data.task_metrics.measure_task` does."""
        from data.task_metrics import measure_task  # torch is slow to import

        return measure_task(model, self, is_last)

    def fingerprint(self) -> str:
        """Return the hash (hex) of what determines the sequences."""
        settings = asdict(self.data) | {"symbols": self.data.num_symbols}
        made_from = json.dumps([SEQUENCES_FORMAT, settings, self.block_size, self.seed])
        # Older versions had another setting, which had no effect on a task
        made_from = made_from.replace('"field": ', '"lines": "kept", "field": ')
        return hashlib.sha256(made_from.encode()).hexdigest()

    def summary(self) -> list[str]:
        """Describe the task in lines of at most 80 columns."""
        if self.data.task == "modular":
            trained_on = f"{pluralize(len(self.training.tokens), 'pair')} to train on"
        else:
            trained_on = "new sequences in each step"
        held_out = len(self.validation.tokens)
        counted = int(self.validation.is_counted[0].sum())
        return [
            f"data     generated sequences of {pluralize(self.block_size, 'token')}: "
            f"{self.data.task}",
            f"         {trained_on}, {held_out:,} held out for validation",
            f"         the loss counts {pluralize(counted, 'token')} of each",
            f"tokens   vocabulary {self.tokenizer.vocab_size:,}",
        ]
