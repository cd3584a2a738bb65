"""Learn the vocabulary of byte-pair encoding.

As a program, `python -m data.learn SIZE PATTERN`: texts in as lines of JSON, tokens and ids out.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from config import UserError

# Characters of one kind in a row that BPE sees as one: its time grows with their square.
LONGEST = 512
LITTLE = 100_000  # characters that a vocabulary is learned from in a second or two
# The kinds that patterns keep together; an underscore is a letter to some and a sign to others.
KINDS = [re.compile(kind)
         for kind in (r"\s+", r"[^\W\d]+", r"\d+", r"_*[^\w\s]+(?:_+[^\w\s]+)*_*")]
ANY_KIND = re.compile("|".join(kind.pattern for kind in KINDS))


def learn(texts: Iterable[str], vocab_size: int, pattern: str) -> dict[str, int]:
    """A vocabulary, less end-of-text: the tokens in the byte-level alphabet with their ids.

    More than a little text is learned in a process of its own, which Ctrl-C ends at once: the
    library cannot be stopped.

    Raises:
        UserError: that process ended before it was done.
    """
    parts, first, length = (part for text in texts for part in bounded(text)), [], 0
    for part in parts:
        first.append(part)
        length += len(part)
        if length > LITTLE:
            return _learn_apart(chain(first, parts), vocab_size, pattern)
    return learn_here(first, vocab_size, pattern)


def _learn_apart(parts: Iterable[str], vocab_size: int, pattern: str) -> dict[str, int]:
    command = [sys.executable, "-m", "data.learn", str(vocab_size), pattern]
    # In a session of its own: Ctrl-C in a terminal is for this process alone.
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            with suppress(BrokenPipeError):
                for part in parts:
                    child.stdin.write(json.dumps(part).encode() + b"\n")
                child.stdin.close()
            learned = child.stdout.read()
            if child.wait():
                raise UserError(f"learning the vocabulary ended with status {child.returncode} "
                                "(too little memory?): lower tokenizer.vocab_size, or give less "
                                "text")
            return json.loads(learned)
        finally:
            child.kill()
            with suppress(BrokenPipeError):
                child.stdin.close()


def learn_here(parts: Iterable[str], vocab_size: int, pattern: str) -> dict[str, int]:
    """`learn` in this process, of text that `bounded` has cut."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trained.train_from_iterator(parts, trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return trained.get_vocab()


def bounded(text: str) -> list[str]:
    """The text cut after each LONGEST characters of a longer run of one kind, or left whole.

    A run that long fills one of the blocks of half its length: only their beginnings are looked at.
    """
    cuts, half = [0], LONGEST // 2
    for end in range(half, len(text) + 1, half):
        if end > cuts[-1] + half and ANY_KIND.fullmatch(text, end - half, end):
            kind = next(kind for kind in KINDS if kind.fullmatch(text, end - half, end))
            before = kind.match(text[max(cuts[-1], end - LONGEST):end - half][::-1])
            begin = end - half - (before.end() if before else 0)
            cuts += range(begin + LONGEST, kind.match(text, begin).end(), LONGEST)
    return [text[a:b] for a, b in pairwise([*cuts, len(text)])]


if __name__ == "__main__":
    vocabulary = learn_here(map(json.loads, sys.stdin.buffer), int(sys.argv[1]), sys.argv[2])
    with suppress(BrokenPipeError):  # who asked was killed
        print(json.dumps(vocabulary), flush=True)
