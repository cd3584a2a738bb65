"""Find copies of documents, which let a model see validation text in training."""

from array import array
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from common.text import pluralize
from data.splits import SplitPiece

MIN_DOCUMENT_BYTES = 32  # shorter ones may be equal by chance
MIN_COPIED_SHARE = 0.01  # of the validation text; fewer copies hardly change its loss
HASH_BYTES = 8


@dataclass(frozen=True)
class Copies:
    """How much of a corpus occurs more than once."""

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
        self._hashes = array("Q")  # of each document so far
        self._train_bytes = array("Q")
        self._validation_bytes = array("Q")
        self._hash = blake2b(digest_size=HASH_BYTES)  # of the current document

    def add(self, piece: SplitPiece) -> None:
        """Add the next piece of the corpus."""
        if piece.begins_document:
            self._hash = blake2b(digest_size=HASH_BYTES)
            for numbers in (self._hashes, self._train_bytes, self._validation_bytes):
                numbers.append(0)
        content = piece.text.encode("utf-8", "replace")
        self._hash.update(content)
        self._hashes[-1] = int.from_bytes(self._hash.digest(), "little")
        split_bytes = self._train_bytes if piece.is_train else self._validation_bytes
        split_bytes[-1] += len(content)

    def count(self) -> Copies:
        """Return the copies among the documents so far; short documents have none."""
        hashes = np.array(self._hashes)
        train_bytes = np.array(self._train_bytes)
        validation_bytes = np.array(self._validation_bytes)
        is_long = train_bytes + validation_bytes >= MIN_DOCUMENT_BYTES
        has_train = is_long & (train_bytes > 0)

        # A document may be in both splits, and is no copy of itself
        _, content, occurrences = np.unique(
            hashes[is_long], return_inverse=True, return_counts=True
        )
        trained = np.bincount(content, weights=has_train[is_long], minlength=1)
        has_trained_copy = trained[content] > has_train[is_long]
        copied_bytes = validation_bytes[is_long][has_trained_copy].sum()
        share = float(copied_bytes / max(1, validation_bytes.sum()))
        return Copies(int((occurrences > 1).sum()), share)
