"""The fixed texts that every snapshot of a run looks at."""

from dataclasses import dataclass

import numpy as np

from data.tokenizer import Tokenizer

PERIODS = 4  # how many different periods the repeated texts have, where they are long enough


@dataclass(frozen=True)
class Probes:
    """Token ids to look at.

    text: (T,), an excerpt of the validation split, and `words`, its tokens as text.
    repeat: (P, T_r), each row random tokens of which row r repeats the first periods[r] right after themselves; `repeat_words`.
    control: (P, T_r), as `repeat` without the repetition.
    """

    text: np.ndarray
    words: list[str]
    repeat: np.ndarray
    repeat_words: list[list[str]]
    control: np.ndarray
    periods: np.ndarray


def make_probes(val: np.ndarray, tokenizer: Tokenizer, length: int, seed: int) -> Probes:
    """Probes of up to `length` tokens, the same for the same arguments; val (tokens,) has at least one."""
    line_ends = [i for i, id in enumerate(val[:1000]) if b"\n" in tokenizer.token_bytes(int(id))]
    start = line_ends[0] + 1 if line_ends and line_ends[0] + 1 + length <= len(val) else 0  # whole lines read better
    text = np.asarray(val[start:start + length], dtype=np.int64)

    random = np.random.default_rng(seed)
    ids = np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special))
    size = min(length, len(ids))  # so that no token comes twice but by repetition
    rows = [random.choice(ids, size, replace=False) for _ in range(2 * PERIODS)]
    repeat, control = np.array(rows[:PERIODS]), np.array(rows[PERIODS:])
    # Different periods, so that a head which looks back by a fixed distance fits one of them at the most.
    periods = np.unique(np.linspace(size // 4, size // 2, PERIODS).astype(int).clip(min=1))
    for row, period in zip(repeat, periods):
        row[period:2 * period] = row[:period]
    repeat, control = repeat[:len(periods)], control[:len(periods)]
    return Probes(text, words(tokenizer, text), repeat, [words(tokenizer, row) for row in repeat], control, periods)


def words(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    return [word(tokenizer, i) for i in ids]


def word(tokenizer: Tokenizer, id: int) -> str:
    """A token as text; bytes that are no whole character show as the replacement character."""
    return tokenizer.token_bytes(int(id)).decode("utf-8", errors="replace") or tokenizer.special.get(int(id), f"<{id}>")
