"""Cut documents into pieces of bounded size, at places that no tokenizer joins."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from common.errors import UserError
from common.text import replace_surrogates

# Places in unbroken text that no splitting pattern joins: before the single space between two
# words, and between a letter and the punctuation mark that ends a clause.
CLAUSE_BREAK = re.compile(r"(?<=\S) (?=\S)|(?<=[^\W\d_])[.,;:!?。，、；：！？]")
# A line end before a letter or a digit and after no white space, in reversed text.
REVERSED_LINE_BREAK = re.compile(r"(?<=[^\W_])\n(?=\S)")
CLAUSE_BREAK_SEARCH_CHARS = 4096  # from the end of a text that has no line break
MAX_SHOWN_RECORD_CHARS = 80  # of a faulty line of JSON, in its error message


class Piece(NamedTuple):
    """Part of a document."""

    text: str
    begins_document: bool


class LineArranger:
    """Applies the setting `data.lines` to the pieces of a corpus, one after the other.

    `kept` leaves lines as they are, `once` drops every line that occurred before in the corpus,
    `shuffled` permutes the lines of each piece, and `doubled` repeats each line right after itself.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._hashes_of_lines: set[bytes] = set()
        self._random = np.random.default_rng(0)

    def arrange(self, text: str) -> str:
        """Return a piece's text with its lines arranged."""
        if self._mode == "kept":
            return text
        lines = text.splitlines(keepends=True)
        if self._mode == "shuffled":
            order = self._random.permutation(len(lines))
            return "".join(lines[k] for k in order)
        if self._mode == "doubled":
            return "".join(line + line for line in lines)
        return "".join(line for line in lines if self._is_new(line))

    def _is_new(self, line: str) -> bool:
        """Return whether a line occurs for the first time, ignoring white space at its ends."""
        digest = hashlib.md5(line.strip().encode("utf-8", "replace")).digest()
        if digest in self._hashes_of_lines:
            return False
        self._hashes_of_lines.add(digest)
        return True


def split_document(parts: Iterable[str], size: int) -> Iterator[Piece]:
    """Cut one document into pieces of less than three times `size` characters.

    A document is cut before a line that begins with a letter or a digit and follows a line that
    does not end in white space. No splitting pattern joins text across such a place, so the pieces
    have the same tokens as the document. A document has at least one piece, which may be empty.
    Each of its consecutive `parts` has at most `size` characters.
    """
    begins_document = True
    text = ""
    for part in parts:
        text += part
        cut = _find_cut(text, size)
        if cut:
            yield Piece(text[:cut], begins_document)
            begins_document = False
            text = text[cut:]
    if text or begins_document:
        yield Piece(text, begins_document)


def split_text(text: str, size: int) -> Iterator[Piece]:
    """Cut a document that is in memory into pieces, as `split_document` does."""
    parts = (text[start : start + size] for start in range(0, len(text), size))
    return split_document(parts, size)


def split_records(
    file: TextIO, path: Path, field: str, size: int, on_skip: Callable[[], None]
) -> Iterator[Piece]:
    """Read a .jsonl file, each line of which is a document, in pieces.

    Args:
        file: The open file.
        path: Its path, for error messages.
        field: Field that holds the text; dots that are not part of its name lead into objects, as
            in "messages.content".
        size: Desired length of a piece, in characters.
        on_skip: Called for each object whose field is null or holds nothing but null; it is no
            document.

    Raises:
        UserError: A line is not a JSON object with the field, or has something else there.
    """
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_int=float)  # a number may be of any length
            names = [field] if field in record else field.split(".")
            texts = _texts_of_field(record, names)
            has_field = isinstance(record, dict) and names[0] in record
        except (ValueError, TypeError, RecursionError):
            has_field = False
        if has_field and not texts:
            on_skip()
            continue
        if not has_field:
            raise UserError(
                f"line {number} of {path} is not a JSON object with text in data.field={field}; "
                f"name another field or correct the line: {line[:MAX_SHOWN_RECORD_CHARS].strip()}"
            )
        text = "\n\n".join(texts)
        if "\\u" in line:  # the only way to write half a surrogate pair, which becomes U+FFFD
            text = replace_surrogates(text)
        del line, record, texts  # they may be large
        yield from split_text(text, size)


def _texts_of_field(value: Any, names: list[str]) -> list[str]:
    """Return the texts in a field. Names lead into objects; a list gives the texts of its items."""
    if value is None:
        return []
    if isinstance(value, list):
        return [text for item in value for text in _texts_of_field(item, names)]
    if isinstance(value, dict) and names:
        return _texts_of_field(value.get(names[0]), names[1:])
    if isinstance(value, str) and not names:
        return [value]
    raise TypeError(value)


def _find_cut(text: str, size: int) -> int:
    """Return where to cut a text that goes on, or 0 to read more first."""
    line_break = REVERSED_LINE_BREAK.search(text[::-1])
    if line_break:
        return len(text) - line_break.start()
    if len(text) < 2 * size:
        return 0
    search_start = len(text) - CLAUSE_BREAK_SEARCH_CHARS
    breaks = [match.start() for match in CLAUSE_BREAK.finditer(text, search_start)]
    return breaks[-1] if breaks else len(text)
