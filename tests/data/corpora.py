"""Corpora of small files, for the tests of this folder."""

from config import DataConfig
from data.corpus import Corpus, open_corpus


def refuse_to_log(line: str) -> None:
    """Log function for calls that must not log anything."""
    raise AssertionError(f"unexpected message: {line}")


def ignore(line: str) -> None:
    """Log function for calls whose messages do not matter."""


def text_corpus(path, log=refuse_to_log, **settings) -> Corpus:
    """Open the corpus of data=text at a path."""
    return open_corpus(DataConfig(source="text", path=str(path), **settings), log)


def documents(corpus: Corpus) -> list[str]:
    """Return the text of each document."""
    texts: list[str] = []
    for text, begins_document in corpus.pieces():
        if begins_document:
            texts.append(text)
        else:
            texts[-1] += text
    return texts
