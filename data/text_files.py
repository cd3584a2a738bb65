"""Read text: training data, prompts and texts to score are all read in this one way."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from common.errors import UserError
from common.terminal import error_sentence

MAX_CHARS = 1 << 25  # of a line, or of a text, that is read at once
HEAD_BYTES = 1 << 12  # show what kind of file it is
ADVICE = "convert text of another encoding, for example with iconv"
GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_text(source: Path | bytes, name: str) -> Iterator[TextIO]:
    r"""Open UTF-8 text (a path, or bytes), compressed by gzip or not; `name` is for messages.

    A byte-order mark is dropped, and every line ends with \n. Text that cannot be read, is not
    UTF-8 or begins with binary data raises `UserError` where it is read, inside the `with` block.
    """
    try:
        with _open_bytes(source) as file:
            is_compressed = file.peek(2)[:2] == GZIP_MAGIC
            content = gzip.GzipFile(fileobj=file) if is_compressed else file
            if b"\0" in content.peek(HEAD_BYTES):
                raise UserError(f"{name} is binary or not UTF-8: {ADVICE}")
            yield io.TextIOWrapper(content, encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        before = e.object[max(0, e.start - 20) : e.start].decode("utf-8", "replace")
        raise UserError(
            f"{name} is not UTF-8 text: it has the byte {e.object[e.start]:#04x} after {before!r}: "
            f"{ADVICE}"
        ) from None
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{name} cannot be read ({error_sentence(e)}): give a text file") from None


def read_at_once(read: Callable[[int], str], name: str) -> str:
    """Return what a file's `read` or `readline` returns; a few bytes of .gz may hold gigabytes."""
    text = read(MAX_CHARS + 1)
    if len(text) > MAX_CHARS:
        raise UserError(
            f"{name} is longer than {MAX_CHARS:,} characters: split it into smaller parts"
        )
    return text


def has_records(path: Path) -> bool:
    """Return whether each line or row of a file is a document, by the file's name."""
    name = path.name.lower().removesuffix(".gz")
    return name.endswith((".jsonl", ".ndjson")) or is_parquet(path)


def is_parquet(path: Path) -> bool:
    """Return whether a file is a table of Apache Parquet, by its name."""
    return path.name.lower().endswith(".parquet")


def normalize_text(text: str) -> str:
    r"""Drop a byte-order mark from a text that was typed, and end its lines with \n."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _open_bytes(source: Path | bytes) -> io.BufferedReader:
    if isinstance(source, bytes):
        return io.BufferedReader(cast(io.RawIOBase, io.BytesIO(source)))
    return source.open("rb")
