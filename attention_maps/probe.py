"""The fixed texts that every snapshot of a run looks at."""

from dataclasses import dataclass

import numpy as np

from data.tokenizer import Tokenizer

ROWS = 16  # random texts of each kind
PERIODS = 4  # different periods among them, where they are long enough
LONGEST = 64  # tokens of a random text: a longer one has no more to tell, and a snapshot holds many
PIECE, COUNTED = 1 << 16, 1 << 22  # tokens of a piece of the training split, of all pieces counted


@dataclass(frozen=True)
class Probes:
    """Token ids to look at.

    text: (T,), an excerpt of the validation split, and `words`, its tokens as text.
    repeat: (P, T_r), each row random tokens of which row r repeats the first periods[r] right
        after themselves; `repeat_words`.
    control: (P, T_r), as `repeat` without the repetition.
    """

    text: np.ndarray
    words: list[str]
    repeat: np.ndarray
    repeat_words: list[list[str]]
    control: np.ndarray
    periods: np.ndarray

    @property
    def random(self) -> np.ndarray:
        return np.concatenate((self.repeat, self.control))


def make_probes(train: np.ndarray, val: np.ndarray, tokenizer: Tokenizer, length: int,
                seed: int) -> Probes:
    """Probes of up to `length` tokens, the same for the same arguments.

    train, val: (tokens,) ids, at least one each. Random tokens are drawn by their frequency in
    `train`, so that none is unknown to the model.
    """
    ends = [i for i, id in enumerate(val[:1000]) if b"\n" in tokenizer.token_bytes(int(id))]
    # Whole lines read better.
    start = ends[0] + 1 if ends and ends[0] + 1 + length <= len(val) else 0
    text = np.asarray(val[start:start + length], dtype=np.int64)

    share = frequencies(train, tokenizer.vocab_size)
    share[list(tokenizer.special)] = 0
    share /= share.sum()
    # No token comes twice but by repetition.
    size = min(length, LONGEST, np.count_nonzero(share))
    random = np.random.default_rng(seed)
    rows = [random.choice(len(share), size, replace=False, p=share) for _ in range(2 * ROWS)]
    repeat, control = np.array(rows[:ROWS]), np.array(rows[ROWS:])
    # A head that looks back by a fixed distance fits one of these periods at the most.
    different = np.linspace(size // 4, size // 2, PERIODS).astype(int).clip(min=1)
    periods = np.sort(np.resize(np.unique(different), ROWS))
    for row, period in zip(repeat, periods):
        row[period:2 * period] = row[:period]
    return Probes(text, words(tokenizer, text), repeat,
                  [words(tokenizer, row) for row in repeat], control, periods)


def frequencies(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id comes in `ids`, (vocab_size,); in evenly spread pieces of many ids."""
    pieces, counts = -(-len(ids) // PIECE), np.zeros(vocab_size)
    for piece in np.linspace(0, pieces - 1, min(pieces, COUNTED // PIECE)).astype(int):
        counts += np.bincount(ids[piece * PIECE:(piece + 1) * PIECE], minlength=vocab_size)
    return counts


def words(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    return [word(tokenizer, i) for i in ids]


def word(tokenizer: Tokenizer, id: int) -> str:
    """A token as text; bytes that are no whole character show as the replacement character."""
    text = tokenizer.token_bytes(int(id)).decode("utf-8", errors="replace")
    return text or tokenizer.special.get(int(id), f"<{id}>")
