"""Read text: training data, prompts and texts to score are all read in this one way."""

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from common.errors import UserError

READ_ERRORS = (OSError, EOFError, zlib.error)
CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16  # show what kind of file it is
GZIP_MAGIC = b"\x1f\x8b"
# UTF-32's little-endian mark begins with that of UTF-16.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
WIDE_ENCODINGS = ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")
# Half of the bytes of ASCII text in UTF-16 are null; text with fewer is damaged.
MIN_NULL_SHARE = 1 / 4
# No text in a legacy encoding has them.
CONTROL_BYTES = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")


@contextmanager
def open_text(source: Path | bytes, name: str, alternative: str = "") -> Iterator[TextIO]:
    r"""Open UTF-8 text, compressed by gzip or not.

    A byte-order mark is dropped, and every line ends with \n, as in Python's `open`.

    Args:
        source: Path of the text, or its bytes.
        name: What the text is called in messages.
        alternative: What else the user can do if it cannot be read, such as ", or leave it out".

    Raises:
        UserError: The text cannot be read, is not UTF-8 or contains a null byte. It is raised where
            the text is read, inside the `with` block.
    """
    checked = None
    try:
        with _open_bytes(source) as file:
            checked = _CheckedBytes(_decompress(file))
            yield io.TextIOWrapper(cast(BinaryIO, checked), encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        assert checked is not None  # it was read
        offset = checked.position - len(e.object) + e.start
        bad_byte = e.object[e.start : e.start + 1]
        advice = _how_to_convert(checked.head, offset, bad_byte)
        raise UserError(
            f"{name} is not UTF-8 text: byte {bad_byte[0]:#04x} at offset {offset}; "
            f"{advice}{alternative}"
        ) from None
    except READ_ERRORS as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(
            f"{name} cannot be read ({reason}); give a text file{alternative}"
        ) from None


def is_jsonl(path: Path) -> bool:
    """Return whether each line of a file is a document, by the file's name."""
    return path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def normalize_text(text: str) -> str:
    r"""Drop a byte-order mark from a text that was typed, and end its lines with \n."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def contains_byte(path: Path, byte: bytes) -> bool:
    """Return whether a file, decompressed, contains a byte; a damaged file does not."""
    with suppress(EOFError, zlib.error, gzip.BadGzipFile), path.open("rb") as file:
        chunks = iter(partial(_decompress(file).read, CHUNK_BYTES), b"")
        return any(byte in chunk for chunk in chunks)
    return False


def _open_bytes(source: Path | bytes) -> io.BufferedReader:
    if isinstance(source, bytes):
        return io.BufferedReader(cast(io.RawIOBase, io.BytesIO(source)))
    return source.open("rb")


def _decompress(file: io.BufferedReader) -> gzip.GzipFile | io.BufferedReader:
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == GZIP_MAGIC else file


class _CheckedBytes(io.BufferedIOBase):
    """The bytes of a text; reading a null byte is a decoding error.

    Attributes:
        head: The bytes that were read first.
        position: Number of bytes read.
    """

    def __init__(self, raw: gzip.GzipFile | io.BufferedReader) -> None:
        self._raw = raw
        self.head = b""
        self.position = 0

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        return self.read(size)

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:  # check each part, because a device may not end
            return b"".join(iter(partial(self.read, CHUNK_BYTES), b""))
        data = self._raw.read(size)
        self.head = self.head or data[:HEAD_BYTES]
        self.position += len(data)
        null = data.find(b"\0")
        if null >= 0:
            raise UnicodeDecodeError("utf-8", data, null, null + 1, "null byte")
        return data


def _how_to_convert(head: bytes, offset: int, bad_byte: bytes) -> str:
    """Return advice for a file that is not UTF-8 text, from its start and its first wrong byte."""
    encoding = _find_wide_encoding(head)
    if encoding:
        return f"it seems to be {encoding}: convert it with iconv -f {encoding} -t utf-8"
    if CONTROL_BYTES.search(head + bad_byte):
        return "it seems to be binary or damaged: give a text file"
    if not head[:offset].isascii():
        return "it seems to be damaged UTF-8: drop such bytes with iconv -c -f utf-8 -t utf-8"
    return "convert it, for example from Western European text with iconv -f cp1252 -t utf-8"


def _find_wide_encoding(head: bytes) -> str | None:
    """Return the encoding with two or four bytes per character that a file has, or None."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding
    if b"\0" not in head:
        return None
    is_ascii = head.isascii() and not CONTROL_BYTES.search(head.replace(b"\0", b""))
    if is_ascii and head.count(0) < MIN_NULL_SHARE * len(head):
        return None
    ascii_counts: dict[str, int] = {}  # of the encodings that give text
    for encoding in WIDE_ENCODINGS:
        with suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(encoding)().decode(head)
            if text and all(char.isprintable() or char in "\t\n\f\r" for char in text):
                ascii_counts[encoding] = sum(map(str.isascii, text))
    return max(ascii_counts, key=ascii_counts.__getitem__, default=None)
