"""Read a run's text from its files, in pieces of bounded size that no tokenizer would join."""

import json
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import sha256_of_file
from common.terminal import error_sentence
from common.text import pluralize, replace_surrogates
from config import DataConfig
from data.downloads import download_dataset, download_shakespeare
from data.sources import find_stdlib_files, find_text_files, require_text_file
from data.text_files import has_records, is_parquet, open_text, read_at_once

PIECE_CHARS = 1 << 20  # bounds the memory of a piece to a few megabytes
# Places that no splitting pattern joins, in reversed text: a line end before a letter or a digit,
# after no white space; the single space between two words.
REVERSED_LINE_BREAK = re.compile(r"(?<=[^\W_])\n(?=\S)")
REVERSED_WORD_BREAK = re.compile(r"(?<=\S) (?=\S)")
MAX_SHOWN_RECORD_CHARS = 80  # in an error message
ROWS_AT_ONCE = 64  # of a .parquet file
FileHash = tuple[str, int]  # SHA-256 in hex digits, and bytes
Record = tuple[int, Any, list[str]]  # its number in the file, what it contains, and its texts


class Piece(NamedTuple):
    """Part of a document."""

    text: str
    begins_document: bool


@dataclass(frozen=True)
class Corpus:
    """Files of text in a fixed order; a file is one document, or each of its records is one."""

    name: str  # what the text is called in messages
    files: tuple[Path, ...]
    field: str  # of a record that holds the text
    is_download: bool = False  # whose files have names that the user does not know

    def hash_files(self) -> list[FileHash]:
        """Return the hash of each file, which tells whether a text has changed."""
        try:
            return [(sha256_of_file(file), file.stat().st_size) for file in self.files]
        except OSError as e:
            raise UserError(f"{e.filename} cannot be read ({e.strerror}): repair it") from None

    def pieces(self, log: Callable[[str], None] = lambda note: None) -> Iterator[Piece]:
        """Read the corpus in pieces of less than three times `PIECE_CHARS` characters.

        See `split_document` for where documents are cut; each has at least one piece. `log` prints
        a note about lines that were skipped.
        """
        for path in self.files:
            name = self.name if self.is_download else str(path)
            if has_records(path):
                yield from split_records(path, name, self.field, PIECE_CHARS, log)
                continue
            with open_text(path, str(path)) as file:
                parts = iter(partial(file.read, PIECE_CHARS), "")
                yield from split_document(parts, PIECE_CHARS)


def open_corpus(config: DataConfig, log: Callable[[str], None] = print) -> Corpus:
    """Find the text that the configuration names, and download it if necessary.

    Its files are not read yet. `log` receives lines about downloads and skipped files. Raises
    `UserError` if there is no such text.
    """
    if config.source == "stdlib":
        name = f"Python {platform.python_version()} standard library"
        return Corpus(name, find_stdlib_files(), config.field)
    if config.source == "shakespeare":
        file = require_text_file(config.path) if config.path else download_shakespeare(log)
        return Corpus("tiny Shakespeare", (file,), config.field)
    if config.source == "hf":
        assert config.name is not None  # check_config requires it
        file = download_dataset(config.name, config.subset, config.split, log)
        return Corpus(config.name, (file,), config.field, is_download=True)
    assert config.source == "text" and config.path is not None
    files = find_text_files(config.path, log, config.exclude)
    if config.field != "text" and not any(map(has_records, files)):
        raise UserError(
            f"data.field={config.field} has no effect, because data.path={config.path} holds no "
            ".jsonl or .parquet file: leave it out"
        )
    return Corpus(config.path, files, config.field)


def split_document(parts: Iterable[str], size: int) -> Iterator[Piece]:
    """Cut one document into pieces of less than three times `size` characters.

    It is cut before a line that begins with a letter or a digit and follows a line that does not
    end in white space, or if there is none, before a word. No splitting pattern joins text across
    such a place, so the pieces have the same tokens as the document, except with a tokenizer that
    puts a mark before each text: therefore a text shorter than `size` is one piece. There is at
    least one. Each of `parts` has at most `size` characters.
    """
    begins_document = True
    text = ""
    for part in parts:
        text += part
        cut = _find_cut(text, size) if len(text) >= size else 0
        if cut:
            yield Piece(text[:cut], begins_document)
            begins_document = False
            text = text[cut:]
    if text or begins_document:
        yield Piece(text, begins_document)


def split_text(text: str, size: int) -> Iterator[Piece]:
    """Cut a document in memory into pieces."""
    parts = (text[start : start + size] for start in range(0, len(text), size))
    return split_document(parts, size)


def split_records(
    path: Path, name: str, field: str, size: int, log: Callable[[str], None]
) -> Iterator[Piece]:
    """Read a file of records, each of which is a document, in pieces of about `size` characters.

    Dots that are not part of the name of `field` lead into objects, as in "messages.content". A
    record without text there is no document: `log` prints how many there are, and `UserError` is
    raised if none has any.
    """
    unit, read = ("row", _read_rows) if is_parquet(path) else ("line", _read_lines)
    has_documents = False
    skipped = 0
    first = ""  # of the skipped records
    for number, record, texts in read(path, name, field):
        if texts:
            has_documents = True
            yield from split_text(replace_surrogates("\n\n".join(texts)), size)
        else:
            skipped += 1
            fields = ", ".join(record) if isinstance(record, dict) else "none"
            shown = _beginning(json.dumps(record, ensure_ascii=False, default=str))
            first = first or f"{unit} {number}, whose fields are {fields:.200}: {shown}"
    if skipped and not has_documents:
        raise UserError(
            f"{name} has no text in data.field={field}: set data.field to another field. The "
            f"first is {first}"
        )
    if skipped:
        log(
            f"note: {name} has {pluralize(skipped, unit)} without text in data.field={field}, such "
            f"as {first}"
        )


def _read_lines(path: Path, name: str, field: str) -> Iterator[Record]:
    with open_text(path, str(path)) as file:
        for number in count(1):
            line = read_at_once(file.readline, f"line {number} of {name}")
            if not line:
                break
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                texts = _texts_of_record(record, field)
            except (ValueError, RecursionError):
                raise UserError(
                    f"line {number} of {name} is not JSON ({_beginning(line)}): correct it"
                ) from None
            yield number, record, texts


def _read_rows(path: Path, name: str, field: str) -> Iterator[Record]:
    try:
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as file:
            columns = [c for c in file.schema_arrow.names if f"{field}.".startswith(f"{c}.")]
            batches = file.iter_batches(ROWS_AT_ONCE, columns=columns or None)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, record in enumerate(rows, 1):
                yield number, record, _texts_of_record(record, field)
    except ImportError:
        raise UserError(
            f"{name} needs the library pyarrow, which is not installed: run pip install pyarrow"
        ) from None
    except Exception as e:  # the library raises errors of many classes
        raise UserError(f"{name} cannot be read ({error_sentence(e)}): repair it") from None


def _beginning(line: str) -> str:
    return line[:MAX_SHOWN_RECORD_CHARS].strip()


def _texts_of_record(record: Any, field: str) -> list[str]:
    """Return the texts in a field of a record; dots that its name lacks lead into objects."""
    has_field = isinstance(record, dict) and field in record
    return _texts_of_value(record, [field] if has_field else field.split("."))


def _texts_of_value(value: Any, names: list[str]) -> list[str]:
    """Return the texts in a value. Names lead into objects; a list gives the texts of its items."""
    if isinstance(value, list):
        return [text for item in value for text in _texts_of_value(item, names)]
    if isinstance(value, dict) and names:
        return _texts_of_value(value.get(names[0]), names[1:])
    return [value] if isinstance(value, str) and not names else []


def _find_cut(text: str, size: int) -> int:
    """Return where to cut a text that goes on, or 0 to read more first."""
    reversed_text = text[::-1]
    if line_break := REVERSED_LINE_BREAK.search(reversed_text):
        return len(text) - line_break.start()
    if len(text) < 2 * size:
        return 0
    word_break = REVERSED_WORD_BREAK.search(reversed_text)
    return len(text) - word_break.end() if word_break else len(text)
