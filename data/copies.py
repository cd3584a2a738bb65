"""Find text that a model was trained on in the validation split, or in a text to score."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from common.text import pluralize
from data.splits import SplitPiece

MIN_DOCUMENT_BYTES = 32  # shorter ones may be equal by chance
MIN_COPIED_SHARE = 0.01  # of the validation text; fewer copies hardly change its loss
HASH_BYTES = 8
MAX_EXCERPTS = 16
MAX_EXCERPT_TOKENS = 128
MIN_EXCERPT_TOKENS = 32  # shorter ones may be equal by chance
SEARCHED_AT_ONCE = 1 << 24  # of the training split that are searched, to limit memory


@dataclass(frozen=True)
class Copies:
    """The documents of a corpus that occur more than once."""

    documents: int = 0  # that have a copy
    validation_share: float = 0.0  # of the validation text that is also in the training split

    def note(self) -> list[str]:
        """Return lines of at most 80 columns that say what the copies mean, if they matter."""
        if self.validation_share < MIN_COPIED_SHARE:
            return []
        documents = pluralize(self.documents, "document")
        verb = "has" if self.documents == 1 else "have"
        share = f"{self.validation_share:.0%}"
        return [
            f"note     {documents} {verb} a copy: {share} of the validation text",
            "         is also in the training text, so the validation loss is too low",
        ]


class CopyCounter:
    """Count equal documents of a corpus that is read in pieces, by a hash of each."""

    def __init__(self) -> None:
        """Begin to count."""
        # Hash, training bytes and validation bytes of each document so far
        self._documents = array("Q")
        self._hash = blake2b(digest_size=HASH_BYTES)  # of the current document

    def add(self, piece: SplitPiece) -> None:
        """Add the next piece of the corpus."""
        if piece.begins_document:
            self._hash = blake2b(digest_size=HASH_BYTES)
            self._documents.extend((0, 0, 0))
        content = piece.text.encode("utf-8", "replace")
        self._hash.update(content)
        self._documents[-3] = int.from_bytes(self._hash.digest(), "little")
        self._documents[-2 if piece.is_train else -1] += len(content)

    def count(self) -> Copies:
        """Return the copies among the documents so far; short documents have none."""
        documents = np.array(self._documents).reshape(-1, 3).T
        is_long = documents[1] + documents[2] >= MIN_DOCUMENT_BYTES
        hashes, train_bytes, validation_bytes = documents[:, is_long]

        # A document may be in both splits, and is no copy of itself
        _, content, occurrences = np.unique(hashes, return_inverse=True, return_counts=True)
        is_trained = train_bytes > 0
        trained = np.bincount(content, weights=is_trained, minlength=1)
        copied_bytes = validation_bytes[trained[content] > is_trained].sum()
        share = float(copied_bytes / max(1, documents[2].sum()))
        return Copies(int((occurrences > 1).sum()), share)


def count_trained_excerpts(ids: Sequence[int], train: np.ndarray) -> tuple[int, int]:
    """Return how many excerpts of a text (N,) are in a training split (tokens,), and of how many.

    The excerpts are spread evenly over the text, except its first and its last token, which depend
    on the text around them.
    """
    inner = np.array(ids[1:-1], dtype=train.dtype)
    length = min(MAX_EXCERPT_TOKENS, len(inner))
    if length < MIN_EXCERPT_TOKENS:
        return 0, 0
    num_excerpts = min(MAX_EXCERPTS, len(inner) // length)
    starts = np.linspace(0, len(inner) - length, num_excerpts).astype(int)
    excerpts = {inner[start : start + length].tobytes() for start in starts}
    missing = excerpts
    for begin in range(0, len(train), SEARCHED_AT_ONCE):
        part = train[begin : begin + SEARCHED_AT_ONCE + length].tobytes()
        missing = {excerpt for excerpt in missing if excerpt not in part}
    return len(excerpts) - len(missing), len(excerpts)
