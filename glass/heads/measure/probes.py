"""Make the probes: texts and random rows on which every snapshot measures the attention heads."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data.tokenizer import Tokenizer

MAX_ROWS = 16  # windows of the text, and random rows of each kind
DIFFERENT_PERIODS = 4  # number of different periods in the repeated rows, if long enough
MIN_PERIOD = 3  # tokens; fewer cannot be reshuffled with the first one kept in place
MIN_VOCABULARY = 5  # tokens; with fewer, random rows cannot avoid accidental repeats
MAX_SCORED_LENGTH = 64  # tokens; longer rows improve no score and make snapshots larger
# Token frequencies are counted on evenly spaced pieces of a long training split.
PIECE_TOKENS = 1 << 16
MAX_FREQUENCY_TOKENS = 1 << 22


@dataclass(frozen=True)
class RandomRows:
    """Token ids of the probes of random tokens, (P, T_r); P is 0 if the vocabulary is too small."""

    repeated: np.ndarray  # row r begins with periods[r] different tokens, then repeats them
    reshuffled: np.ndarray  # `repeated` with the repetition in another order
    control: np.ndarray  # without repetition
    periods: np.ndarray  # of the repeated rows, in tokens, (P,)


@dataclass(frozen=True)
class Probes(RandomRows):
    """Token ids on which attention is measured."""

    text: np.ndarray  # an excerpt of the validation split, (T,)
    text_tokens: list[str]
    windows: np.ndarray  # excerpts spread over the split, (W, T_w); the first begins like `text`
    repeated_tokens: list[list[str]]

    @property
    def random(self) -> np.ndarray:
        """All random rows (3 P, T_r): repeated, reshuffled, control."""
        return np.concatenate((self.repeated, self.reshuffled, self.control))


def make_probes(
    train: np.ndarray,
    val: np.ndarray,
    tokenizer: Tokenizer,
    length: int,
    seed: int,
    spacing: int = 1,
) -> Probes:
    """Make the probes from the ids of both splits; equal arguments give equal probes.

    Random tokens follow their frequencies in the training split. The text is an excerpt of the
    validation split of at most `length` tokens. Windows begin at multiples of `spacing`, for a
    split that consists of sequences of this length.
    """
    start = _start_of_line(val, tokenizer, length)
    text = np.array(val[start : start + length], dtype=np.int64)
    windows = _choose_windows(val, start, min(len(text), MAX_SCORED_LENGTH), spacing)
    if tokenizer.begin_of_text is not None:  # a model with this token reads it first
        text[0] = windows[:, 0] = tokenizer.begin_of_text

    frequencies = token_frequencies(train, tokenizer.vocab_size)
    frequencies[list(tokenizer.special)] = 0
    probabilities = frequencies / max(1, frequencies.sum())
    rows = make_random_rows(probabilities, length, np.random.default_rng(seed))
    return Probes(
        text=text,
        text_tokens=spell_tokens(tokenizer, text),
        windows=windows,
        repeated_tokens=[spell_tokens(tokenizer, row) for row in rows.repeated],
        **vars(rows),
    )


def _choose_windows(val: np.ndarray, start: int, size: int, spacing: int) -> np.ndarray:
    """Return windows (W, size) from `start` on, which do not overlap, of different sequences."""
    count = min(MAX_ROWS, (len(val) - start) // max(size, spacing))
    starts = np.linspace(start, len(val) - size, count).astype(int)
    starts -= (starts - start) % spacing
    return np.stack([np.asarray(val[at : at + size], dtype=np.int64) for at in starts])


def _start_of_line(val: np.ndarray, tokenizer: Tokenizer, length: int) -> int:
    """Return the start of the first line that is not blank; 0 if less than `length` is left."""
    start = None
    for index, id in enumerate(val[:1000]):
        token = tokenizer.token_bytes(int(id))
        if start is not None and token.strip():
            return start if start + length <= len(val) else 0
        if b"\n" in token:
            start = index + 1
    return 0


def make_random_rows(
    probabilities: np.ndarray, length: int, generator: np.random.Generator
) -> RandomRows:
    """Draw random rows of at most `length` tokens, given the probability of each token (V,)."""
    vocabulary = np.count_nonzero(probabilities)
    size = max(min(length, MAX_SCORED_LENGTH, vocabulary), 2 * MIN_PERIOD)
    if vocabulary < MIN_VOCABULARY or length < size:
        no_rows = np.zeros((0, length), np.int64)
        return RandomRows(no_rows, no_rows, no_rows, np.zeros(0, np.int64))
    # A row draws different tokens. Only a vocabulary of five is smaller than a row: its first token
    # occurs again, at a distance that is not a period.
    count = min(size, vocabulary)
    drawn = [
        generator.choice(len(probabilities), count, replace=False, p=probabilities)
        for _ in range(2 * MAX_ROWS)
    ]
    rows = np.array([np.resize(tokens, size) for tokens in drawn])
    repeated = rows[:MAX_ROWS]
    control = rows[MAX_ROWS:]
    # Several periods, because a head that attends at a fixed distance can match only one.
    different = np.linspace(size // 4, size // 2, DIFFERENT_PERIODS).astype(int)
    periods = np.sort(np.resize(np.unique(different.clip(min=MIN_PERIOD)), MAX_ROWS))
    reshuffled = repeated.copy()
    for repeated_row, reshuffled_row, period in zip(repeated, reshuffled, periods):
        first = repeated_row[:period]
        repeated_row[period : 2 * period] = first
        reshuffled_row[period : 2 * period] = first[draw_other_order(period, generator)]
    return RandomRows(repeated, reshuffled, control, periods)


def draw_other_order(count: int, generator: np.random.Generator) -> np.ndarray:
    """Draw an order of 0 … count - 1 that begins with 0 and in which n + 1 never follows n."""
    while True:
        order = np.concatenate(([0], 1 + generator.permutation(count - 1)))
        if (np.diff(order) != 1).all():
            return order


def token_frequencies(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Count each id in `ids`, or in evenly spaced pieces of long `ids`: (vocab_size,)."""
    pieces = -(-len(ids) // PIECE_TOKENS)
    chosen = min(pieces, MAX_FREQUENCY_TOKENS // PIECE_TOKENS)
    counts = np.zeros(vocab_size)
    for start in PIECE_TOKENS * np.linspace(0, pieces - 1, chosen).astype(int):
        counts += np.bincount(ids[start : start + PIECE_TOKENS], minlength=vocab_size)
    return counts


def spell_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return the tokens as strings, one for each id."""
    return [spell_token(tokenizer, id) for id in ids]


def spell_token(tokenizer: Tokenizer, id: int) -> str:
    """Return a token as a string; incomplete characters become the replacement character.

    A special token has its name. Any other id without text is written <id>, such as those that an
    imported model has beyond the vocabulary of its tokenizer.
    """
    text = tokenizer.token_bytes(int(id)).decode("utf-8", errors="replace")
    return text or tokenizer.special.get(int(id), f"<{id}>")
