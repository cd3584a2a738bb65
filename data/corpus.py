"""Read a run's text from its files, in pieces of bounded size."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

from common.text_files import is_jsonl, open_text
from config import DataConfig
from data.pieces import LineArranger, Piece, split_document, split_records
from data.sources import (
    download_dataset,
    download_shakespeare,
    find_stdlib_files,
    find_text_files,
    require_text_file,
)

PIECE_CHARS = 1 << 20  # bounds the memory of a piece to a few megabytes


@dataclass(frozen=True)
class Corpus:
    """Files of text in a fixed order, read only when iterated over.

    A file is one document; in a .jsonl file each line is one.

    Attributes:
        name: What the text is called in messages.
        files: The files, in the order in which they are read.
        field: Field of a .jsonl file that holds the text.
        lines: How lines are arranged; see `LineArranger`.
        piece_chars: Desired length of a piece, in characters.
        max_chars: Reading stops after the piece with which this many characters are read.
    """

    name: str
    files: tuple[Path, ...]
    field: str = "text"
    lines: str = "kept"
    piece_chars: int = PIECE_CHARS
    max_chars: float = inf

    def pieces(self, on_skip: Callable[[], None] = lambda: None) -> Iterator[Piece]:
        """Read the corpus in pieces of less than three times `piece_chars` characters.

        Files are read as `open_text` reads them. See `split_document` for where documents are cut;
        each document has at least one piece.

        Args:
            on_skip: Called for each line of a .jsonl file whose text is null.

        Raises:
            UserError: A file cannot be read, is not UTF-8 text, or lacks the field.
        """
        arranger = LineArranger(self.lines)
        num_chars = 0
        alternative = ", or leave it out with data.exclude" if len(self.files) > 1 else ""
        for path in self.files:
            with open_text(path, str(path), alternative) as file:
                if is_jsonl(path):
                    pieces = split_records(file, path, self.field, self.piece_chars, on_skip)
                else:
                    parts = iter(partial(file.read, self.piece_chars), "")
                    pieces = split_document(parts, self.piece_chars)
                for text, begins_document in pieces:
                    yield Piece(arranger.arrange(text), begins_document)
                    num_chars += len(text)
                    if num_chars >= self.max_chars:
                        return


def open_corpus(config: DataConfig, log: Callable[[str], None] = print) -> Corpus:
    """Find the text that the configuration names, and download it if necessary.

    Its files are not read yet. `log` receives lines about downloads and skipped files. Raises
    `UserError` if there is no such text.
    """
    make_corpus = partial(Corpus, field=config.field, lines=config.lines)
    if config.source == "stdlib":
        name = f"Python {platform.python_version()} standard library"
        return make_corpus(name, find_stdlib_files())
    if config.source == "shakespeare":
        if config.path is None:
            file = download_shakespeare(log)
        else:
            file = require_text_file(config.path)
        return make_corpus("tiny Shakespeare", (file,))
    if config.source == "hf":
        assert config.name is not None  # DataConfig.check requires it
        file = download_dataset(config.name, config.subset, config.split, log)
        return make_corpus(config.name, (file,))
    assert config.path is not None
    return make_corpus(config.path, find_text_files(config.path, log, config.exclude))
