"""Split a corpus into training and validation text, and sample text to learn a vocabulary from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from data.corpus import Corpus, split_text

VALIDATION_PERIOD = 10  # one document in ten validates, or the last tenth of the characters
MIN_DOCUMENTS_TO_SPLIT = 100  # from this many on, whole documents validate
MAX_LEARNING_CHARS = 50_000_000  # about how many characters a vocabulary is learned from
# Text with fewer spaces and line ends than one in 64 characters counts as unbroken. Each stretch of
# it is a distinct word, so learning needs 65 times its size in memory.
MIN_UNBROKEN_CHARS = 64
MAX_UNBROKEN_BYTES = 8_000_000
LEARNING_PIECE_CHARS = 1 << 16  # the tokenizers library takes 256 pieces at a time


class SplitPiece(NamedTuple):
    """Part of a document, and the split that it belongs to."""

    is_train: bool
    text: str
    begins_document: bool


@dataclass
class CorpusSize:
    """Sizes of a corpus."""

    documents: int = 0
    characters: int = 0
    bytes: int = 0  # in UTF-8
    longest_document: int = 0  # in characters


def count_corpus(corpus: Corpus, log: Callable[[str], None] = print) -> CorpusSize:
    """Read the corpus once and count it; `log` prints a note about lines that were skipped."""
    size = CorpusSize()
    document_length = 0  # characters of the current document so far
    distinct: set[str] = set()
    for text, begins_document in corpus.pieces(log):
        if begins_document:
            document_length = 0
            size.documents += 1
        document_length += len(text)
        size.longest_document = max(size.longest_document, document_length)
        size.characters += len(text)
        size.bytes += utf8_length(text)
        if len(distinct) < 2:
            distinct.update(text)
    if len(distinct) < 2:
        content = f"no character except {distinct.pop()!r}" if distinct else "no text"
        raise UserError(f"{corpus.name} has {content}: give another text")
    return size


def find_split_position(size: CorpusSize) -> int | None:
    """Return the character at which validation begins, or None if whole documents validate.

    Documents are drawn if there are at least `MIN_DOCUMENTS_TO_SPLIT` and none is so long that
    either split could be left with too little.
    """
    is_balanced = size.longest_document <= size.characters / VALIDATION_PERIOD
    if size.documents >= MIN_DOCUMENTS_TO_SPLIT and is_balanced:
        return None
    return size.characters * (VALIDATION_PERIOD - 1) // VALIDATION_PERIOD


def split_corpus(corpus: Corpus, split_position: int | None) -> Iterator[SplitPiece]:
    """Read a corpus in pieces that belong to one split each.

    If `split_position` is None, one document in `VALIDATION_PERIOD` is for validation, drawn with a
    fixed seed.
    """
    if split_position is None:
        yield from _split_by_document(corpus)
    else:
        yield from _split_by_position(corpus, split_position)


def sample_training_text(
    corpus: Corpus, split_position: int | None, characters: int
) -> Iterator[str]:
    """Read the training text that a vocabulary is learned from, in pieces of bounded length.

    Of more than `MAX_LEARNING_CHARS`, pieces of about that length in all are drawn with a fixed
    seed. Text without white space is limited to `MAX_UNBROKEN_BYTES`. The whole corpus has
    `characters` characters.
    """
    rng = np.random.default_rng(0)
    training_characters = characters * (VALIDATION_PERIOD - 1) / VALIDATION_PERIOD
    share = MAX_LEARNING_CHARS / training_characters
    unbroken_bytes = 0
    for is_train, text, _ in split_corpus(corpus, split_position):
        if not is_train:
            continue
        if share < 1 and rng.random() >= share:
            continue
        if len(text) > MIN_UNBROKEN_CHARS * (1 + text.count(" ") + text.count("\n")):
            unbroken_bytes += utf8_length(text)
            if unbroken_bytes > MAX_UNBROKEN_BYTES:
                continue
        for piece in split_text(text, LEARNING_PIECE_CHARS):
            yield piece.text


def utf8_length(text: str) -> int:
    """Return the length of a text in bytes of UTF-8."""
    return len(text.encode("utf-8", "replace"))


def _split_by_document(corpus: Corpus) -> Iterator[SplitPiece]:
    rng = np.random.default_rng(0)
    document = validation_document = -1
    for text, begins_document in corpus.pieces():
        if begins_document:
            document += 1
            if document % VALIDATION_PERIOD == 0:
                validation_document = document + int(rng.integers(VALIDATION_PERIOD))
        yield SplitPiece(document != validation_document, text, begins_document)


def _split_by_position(corpus: Corpus, split_position: int) -> Iterator[SplitPiece]:
    position = 0
    for text, begins_document in corpus.pieces():
        train_text = text[: max(0, split_position - position)]
        validation_text = text[len(train_text) :]
        if train_text:
            yield SplitPiece(True, train_text, begins_document)
        if validation_text:
            yield SplitPiece(False, validation_text, begins_document and not train_text)
        position += len(text)
