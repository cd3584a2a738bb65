"""Where text comes from: Python's standard library, tiny Shakespeare, the Hugging Face hub, or your own files, plain, .gz or .jsonl."""

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from config import DataConfig, UserError
from files import sha256_of

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STALLED, PATIENCE = 20, 300  # seconds that a server may say nothing, and may take in all
PIECE = 1 << 20  # characters read at a time; a piece has fewer than three times as many
# Where no splitting pattern joins, if no line begins: before the one space between two words, and
# between a letter and the sign that ends a clause.
BREAK = re.compile(r"(?<=\S) (?=\S)|(?<=[^\W\d_])[.,;:!?。，、；：！？]")
LINE_BACKWARDS = re.compile(r"(?<=[^\W_])\n(?=\S)")  # where a line may be cut off, in reversed text
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Files of text, one document each, in a fixed order. Nothing is read before it is asked for."""

    name: str
    files: tuple[Path, ...]
    encoding: str = "utf-8"
    field: str = "text"  # of a .jsonl

    def size(self) -> int | None:
        """Bytes of the text, about; None where files have to be read to know."""
        return None if any(path.suffix == ".gz" or is_jsonl(path) for path in self.files) else sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The text in pieces of bounded size, and whether each begins a document; every document has at least one.

        A file is a document, or each line of a .jsonl; those that end in .gz are unpacked. Line ends are as they are; a
        byte-order mark is dropped. A file is cut before a line that begins with a letter or a digit and follows one that ends
        with neither white space nor nothing: no splitting pattern joins across that, so that the pieces have the tokens of the whole.

        Raises:
            UserError: a file cannot be read, is not in the encoding, or lacks the field in a line.
        """
        for path in self.files:
            try:
                encoding = "utf-8-sig" if is_utf8(self.encoding) else self.encoding
                with unpacked(path) as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as file:
                    yield from _records(file, path, self.field) if is_jsonl(path) else _pieces(iter(partial(file.read, PIECE), ""), PIECE)
            except UnicodeError:
                offset, byte = first_bad_byte(path, self.encoding)
                raise UserError(f"{path} is not {'UTF-8' if is_utf8(self.encoding) else self.encoding} text: byte {byte:#04x} at offset {offset}; "
                                "name its encoding, as in data.encoding=cp1252, convert it to UTF-8, or leave it out") from None
            except (OSError, EOFError, zlib.error) as e:
                raise UserError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _pieces(parts: Iterable[str], size: int) -> Iterator[tuple[str, bool]]:
    begins, text = True, ""
    for part in parts:  # of at most `size` characters
        text += part
        if cut := _cut(text, size):
            yield text[:cut], begins
            begins, text = False, text[cut:]
    if text or begins:
        yield text, begins


def _records(file: io.TextIOBase, path: Path, field: str) -> Iterator[tuple[str, bool]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            raise UserError(f"{path} is not JSON in line {number}: each line is to be an object with the text in a field") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            there = ", ".join(key for key, value in record.items() if isinstance(value, str)) if isinstance(record, dict) else "no object"
            raise UserError(f"{path} has no text in the field {field} of line {number} (texts there: {there or 'none'}): "
                            "name another with data.field=NAME")
        text = record[field]
        if "\\u" in line:  # the only way for half a surrogate pair to get in, which becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        del line, record  # which may be large
        yield from cut_up(text, PIECE)


def is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


def unpacked(path: Path) -> io.BufferedIOBase:
    """The bytes of a file, or of what a .gz holds."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def cut_up(text: str, size: int) -> Iterator[tuple[str, bool]]:
    """A document in pieces of less than three times `size` characters, cut and marked as `Corpus.pieces` does."""
    return _pieces((text[at:at + size] for at in range(0, len(text), size)), size)


def _cut(text: str, size: int) -> int:
    """Where to cut a text of which more follows; 0: read more first. Unbroken text is cut anywhere."""
    line = _line_begin(text)
    if line or len(text) < 2 * size:
        return line
    breaks = [found.start() for found in BREAK.finditer(text, len(text) - 4096)]
    return breaks[-1] if breaks else len(text)


def _line_begin(text: str) -> int:
    """Where the last line begins that a text may be cut before, as `Corpus.pieces` does; 0 where there is none but the first."""
    found = LINE_BACKWARDS.search(text[::-1])
    return len(text) - found.start() if found else 0


def is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def first_bad_byte(path: Path, encoding: str = "utf-8") -> tuple[int, int]:
    """Offset and value of the first byte of a file that is not in the encoding."""
    decoder, offset = codecs.getincrementaldecoder(encoding)(), 0
    with unpacked(path) as file:
        while True:
            part, kept = file.read(1 << 20), len(decoder.getstate()[0])
            try:
                decoder.decode(part, final=not part)
            except UnicodeDecodeError as e:
                return offset - kept + e.start, e.object[e.start]
            except UnicodeError:  # a codec that does not say where: utf-16 without the mark it begins with
                return offset, part[0] if part else 0
            offset += len(part)


def cache_root() -> Path:
    """Where downloads and prepared tokens are kept: data/cache, or the folder that GLASSGPT_CACHE names.

    Raises:
        UserError: it cannot be made or written.
    """
    root = Path(os.environ.get("GLASSGPT_CACHE") or Path(__file__).parent / "cache")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as e:
        raise UserError(f"the cache folder {root} cannot be written ({e.strerror}): "
                        "set GLASSGPT_CACHE to a folder that can") from None


def open_corpus(config: DataConfig, say=print) -> Corpus:
    """The corpus that the configuration names; `say` takes a line on what was left out or looks wrong.

    Raises:
        UserError: there is no such text, or it cannot be fetched.
    """
    if config.source == "stdlib":
        return Corpus(f"Python {platform.python_version()} standard library", stdlib_files())
    if config.source == "shakespeare":
        return Corpus("tiny Shakespeare", (shakespeare_file(config.path, say),))
    if config.source == "hf":
        from data.hub import hub_files

        return Corpus(config.name, hub_files(config, cache_root(), say))
    return Corpus(config.path, text_files(config.path, say, config.encoding), config.encoding, config.field)


def stdlib_files() -> tuple[Path, ...]:
    """The standard library's Python sources, sorted by path; tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in root.rglob("*.py") if not NOT_LIBRARY & set(p.relative_to(root).parts)]
    if not files:
        raise UserError(f"no Python sources in {root}, where this Python keeps its library: use data=text data.path=…")
    return tuple(sorted(files, key=lambda p: p.relative_to(root).as_posix()))


def shakespeare_file(path: str | None, say) -> Path:
    """tiny Shakespeare: the local copy at `path`, or fetched once and checked against its hash."""
    if path is not None:
        file = _existing(path)
        if sha256_of(file) != SHAKESPEARE_SHA256:
            say(f"note: {file} is not the usual tiny Shakespeare (another sha256): losses do not compare with published ones")
        return file
    file = cache_root() / "tinyshakespeare.txt"
    if file.exists() and sha256_of(file) == SHAKESPEARE_SHA256:
        return file
    by_hand = f"fetch {SHAKESPEARE_URL} by hand and give it as data.path=FILE"
    try:
        text, ends = b"", time.monotonic() + PATIENCE
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=STALLED) as answer:
            while len(text) < 4_000_000 and (part := answer.read1(1 << 16)):
                text += part
                if time.monotonic() > ends:
                    raise TimeoutError(f"{len(text):,} bytes came in {PATIENCE} s")
    except (OSError, HTTPException) as e:
        raise UserError(f"tiny Shakespeare could not be fetched ({str(getattr(e, 'reason', e)).strip()}): {by_hand}") from None
    digest = hashlib.sha256(text).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise UserError(f"what came for tiny Shakespeare has another sha256, {digest}: {by_hand}")
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(text)
    part.replace(file)
    return file


def text_files(path: str, say, encoding: str = "utf-8") -> tuple[Path, ...]:
    """The files of a path: a file, a folder with all below it, or a glob; hidden and binary files left out.

    What holds a NUL is binary, unless the encoding is one of several bytes a character, where it is nothing unusual.
    """
    has_nul = b"\0" in "a".encode(encoding)
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        found = (p for p in Path(path).rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    elif os.path.exists(path) or not glob.has_magic(path):
        file = _existing(path)
        if not has_nul and _is_binary(file):
            say(f"note: {file} holds NUL bytes, as text seldom does; if its encoding is UTF-16, say data.encoding=utf-16")
        return (file,)
    else:
        found = (Path(p) for p in glob.iglob(path, recursive=True))
    files = sorted((p for p in found if p.is_file()), key=lambda p: p.as_posix())
    text = tuple(p for p in files if has_nul or not _is_binary(p))
    if len(text) < len(files):
        say(f"left out of {path}, as binary: {', '.join(p.name for p in files if p not in set(text))}")
    if not text:
        raise UserError(f"data.path={path} holds no text files")
    return text


def _existing(path: str) -> Path:
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        what = ("is a folder" if file.is_dir() else "does not exist" if not file.exists()
                else "is a pipe or a device, and text is read more than once")
        raise UserError(f"data.path={path} {what}: give the path of a text file")
    return file


def _is_binary(path: Path) -> bool:
    try:
        with unpacked(path) as f:
            return b"\0" in f.read(8192)
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
