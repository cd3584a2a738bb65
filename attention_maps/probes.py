"""The fixed texts that every snapshot of a run looks at."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.tokenizer import Tokenizer

ROWS = 16  # windows of the text, and random texts of each kind
PERIODS = 4  # different periods among these, where they are long enough
LEAST = 3  # tokens of a period: what is shorter cannot come again in another order
FEWEST = 5  # tokens of a vocabulary of which random texts are told
LONGEST = 64  # tokens of a scored text: a longer one has no more to tell, and a snapshot holds many
PIECE, COUNTED = 1 << 16, 1 << 22  # tokens of a piece of the training split, of all pieces counted


@dataclass(frozen=True)
class Probes:
    """Token ids to look at.

    text: (T,), an excerpt of the validation split, and `words`, its tokens as text.
    windows: (W, T_w), excerpts spread over all of it; the first is the text's beginning.
    repeated: (P, T_r), each row random tokens of which row r repeats the first periods[r] right
        after themselves; `repeated_words`. No rows where the vocabulary has too few tokens.
    reshuffled: (P, T_r), as `repeat`, what is repeated in another order.
    control: (P, T_r), as `repeat` without the repetition."""

    text: np.ndarray
    words: list[str]
    windows: np.ndarray
    repeated: np.ndarray
    repeated_words: list[list[str]]
    reshuffled: np.ndarray
    control: np.ndarray
    periods: np.ndarray

    @property
    def random(self) -> np.ndarray:
        """All random texts (3 P, T_r): those that repeat, the reshuffled, the control."""
        return np.concatenate((self.repeated, self.reshuffled, self.control))


def make_probes(
    train: np.ndarray, val: np.ndarray, tokenizer: Tokenizer, length: int, seed: int
) -> Probes:
    """Probes of up to `length` tokens, the same for the same arguments. train, val: (tokens,) ids,
    at least one each. Random tokens are drawn by their frequency in `train`, so that none is
    unknown to the model."""
    ends = [i for i, id in enumerate(val[:1000]) if b"\n" in tokenizer.token_bytes(int(id))]
    # Whole lines read better.
    start = ends[0] + 1 if ends and ends[0] + 1 + length <= len(val) else 0
    text = np.asarray(val[start : start + length], dtype=np.int64)
    size = min(len(text), LONGEST)
    count = min(ROWS, (len(val) - start) // size)  # none overlaps another
    starts = np.linspace(start, len(val) - size, count).astype(int)
    windows = np.stack([np.asarray(val[at : at + size], dtype=np.int64) for at in starts])

    share = frequencies(train, tokenizer.vocab_size)
    share[list(tokenizer.special)] = 0
    share /= share.sum()
    repeat, reshuffled, control, periods = random_texts(share, length, np.random.default_rng(seed))
    return Probes(
        text,
        words(tokenizer, text),
        windows,
        repeat,
        [words(tokenizer, row) for row in repeat],
        reshuffled,
        control,
        periods,
    )


def random_texts(
    share: np.ndarray, length: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Repeat, reshuffled and control (P, T_r) of tokens drawn by their share (V,), and periods."""
    known = np.count_nonzero(share)
    size = max(min(length, LONGEST, known), 2 * LEAST)
    if known < FEWEST or length < size:
        return *(np.zeros((0, 2 * LEAST), np.int64) for _ in range(3)), np.zeros(0, np.int64)
    # No token comes twice but by repetition; of five the first once more, at no period's distance.
    rows = np.array(
        [
            np.resize(random.choice(len(share), min(size, known), replace=False, p=share), size)
            for _ in range(2 * ROWS)
        ]
    )
    repeat, control = rows[:ROWS], rows[ROWS:]
    # A head that looks back by a fixed distance fits one of these periods at the most.
    different = np.linspace(size // 4, size // 2, PERIODS).astype(int).clip(min=LEAST)
    periods = np.sort(np.resize(np.unique(different), ROWS))
    reshuffled = repeat.copy()
    for row, other, period in zip(repeat, reshuffled, periods):
        row[period : 2 * period] = row[:period]
        other[period : 2 * period] = row[reordered(period, random)]
    return repeat, reshuffled, control, periods


def reordered(count: int, random: np.random.Generator) -> np.ndarray:
    """0 … count - 1 in an order that begins alike, and in which no number follows the one that it
    follows by nature."""
    while True:
        order = np.concatenate(([0], 1 + random.permutation(count - 1)))
        if (np.diff(order) != 1).all():
            return order


def pieces(ids: np.ndarray) -> Iterator[np.ndarray]:
    """The ids; of many, evenly spread pieces."""
    count = -(-len(ids) // PIECE)
    for piece in np.linspace(0, count - 1, min(count, COUNTED // PIECE)).astype(int):
        yield ids[piece * PIECE : (piece + 1) * PIECE]


def frequencies(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id comes in `ids`, (vocab_size,)."""
    return np.sum(
        [np.bincount(piece, minlength=vocab_size) for piece in pieces(ids)],
        axis=0,
        dtype=np.float64,
    )


def words(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    return [word(tokenizer, i) for i in ids]


def word(tokenizer: Tokenizer, id: int) -> str:
    """A token as text; bytes that are no whole character show as the replacement character."""
    text = tokenizer.token_bytes(int(id)).decode("utf-8", errors="replace")
    return text or tokenizer.special.get(int(id), f"<{id}>")
