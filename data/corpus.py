"""Where text comes from: Python's library, tiny Shakespeare, the Hugging Face hub, your files."""

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import re
import stat
import sysconfig
import time
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from http.client import HTTPException
from itertools import takewhile
from pathlib import Path

from config import DataConfig, UserError
from data.cache import cache_root, locked
from data.hub import hub_files, row_text, text_fields
from files import atomic_write, sha256_of

SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STALLED, PATIENCE = 20, 300  # seconds that a server may say nothing, and may take in all
PIECE = 1 << 20  # characters read at a time; a piece has fewer than three times as many
# Where no splitting pattern joins, if no line begins: before the one space between two words, and
# between a letter and the sign that ends a clause.
BREAK = re.compile(r"(?<=\S) (?=\S)|(?<=[^\W\d_])[.,;:!?。，、；：！？]")
LINE_BACKWARDS = re.compile(r"(?<=[^\W_])\n(?=\S)")  # where a line may be cut off, in reversed text
CHECKED = 1 << 20  # bytes of a file that are looked at before it is taken for text
NAMED = 10  # files left out for one reason, at most; of the rest the number is given
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# What all is in a folder that a program wrote: a run, a sweep, prepared tokens, or Python's own.
PROGRAMS = ({"config.yaml", "metrics.jsonl"}, {"config.yaml", "checkpoints"},
            {"config.yaml", "attention"}, {"multirun.yaml"}, {"meta.json", "train.bin"},
            {"pyvenv.cfg"})
# How a file begins → what it is.
ZIP, BINARY = "zip archive", "binary"
PACKED = {b"%PDF-": "PDF", b"PK\x03\x04": ZIP, b"PK\x05\x06": ZIP}
DOCUMENTS = {".docx", ".xlsx", ".pptx", ".odt", ".ods", ".odp", ".epub"}  # zip archives inside
EXCLUDED, UNREADABLE = "data.exclude", "unreadable"
UNREADABLE_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class Corpus:
    """Files of text, one document each, in a fixed order; read when they are asked for."""

    name: str
    files: tuple[Path, ...]
    encoding: str = "utf-8"
    field: str = "text"  # of a .jsonl

    def size(self) -> int | None:
        """Bytes of the text, about; None where files have to be read to know."""
        if any(path.suffix == ".gz" or is_jsonl(path) for path in self.files):
            return None
        return sum(path.stat().st_size for path in self.files)

    def hashes(self) -> list[str]:
        """The sha256 of each file, in hex."""
        try:
            return [sha256_of(path) for path in self.files]
        except OSError as e:
            raise unreadable(e.filename or self.name, e) from None

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The text in pieces of bounded size, and whether each begins a document.

        A file is a document, or each line of a .jsonl; every document has at least one piece. Files
        that end in .gz are unpacked. Line ends are as they are; a byte-order mark is dropped. A
        file is cut before a line that begins with a letter or a digit and follows one that ends
        with neither white space nor nothing: no splitting pattern joins across that, so that the
        pieces have the tokens of the whole.

        Raises:
            UserError: a file cannot be read, is not in the encoding, or lacks the field in a line.
        """
        encoding = "utf-8-sig" if is_utf8(self.encoding) else self.encoding
        for path in self.files:
            try:
                with unpacked(path) as raw:
                    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
                    try:
                        if is_jsonl(path):
                            yield from _records(file, path, self.field)
                        else:
                            yield from _pieces(iter(partial(file.read, PIECE), ""), PIECE)
                    except UnicodeError as e:
                        raise undecodable(path, self.encoding, e, raw.tell()) from None
            except UNREADABLE_ERRORS as e:
                raise unreadable(path, e) from None


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
            raise UserError(f"{path} is not JSON in line {number}: each line is to be an object "
                            "with the text in a field") from None
        text = row_text(record, field)
        if text is None:
            raise UserError(f"{path} has no text in the field {field} of line {number} "
                            f"(texts there: {text_fields(record)}): "
                            "name another with data.field=NAME")
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
    """A document in pieces of less than three times `size` characters, as of `Corpus.pieces`."""
    return _pieces((text[at:at + size] for at in range(0, len(text), size)), size)


def _cut(text: str, size: int) -> int:
    """Where to cut a text that goes on; 0: read more first. Unbroken text is cut anywhere."""
    if line := LINE_BACKWARDS.search(text[::-1]):
        return len(text) - line.start()
    if len(text) < 2 * size:
        return 0
    breaks = [found.start() for found in BREAK.finditer(text, len(text) - 4096)]
    return breaks[-1] if breaks else len(text)


def is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def encoding_name(encoding: str) -> str:
    return "UTF-8" if is_utf8(encoding) else encoding


def undecodable(path: Path, encoding: str, error: UnicodeError, read: int) -> UserError:
    """The error of a file that is not in the encoding, as `read` of its bytes show."""
    where = str(error)  # a codec may not say where: utf-16 without its mark
    if isinstance(error, UnicodeDecodeError):
        where = (f"byte {error.object[error.start]:#04x} at offset "
                 f"{read - len(error.object) + error.start}")
    return UserError(f"{path} is not {encoding_name(encoding)} text: {where}; name its encoding, "
                     "as in data.encoding=cp1252, convert it to UTF-8, or leave it out "
                     "(data.exclude)")


def unreadable(path: str | Path, error: Exception) -> UserError:
    """The error of a file that the system or gzip cannot read."""
    return UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")


def open_corpus(config: DataConfig, say=print) -> Corpus:
    """The corpus that the configuration names.

    `say` takes a line on what is fetched, was left out or looks wrong.

    Raises:
        UserError: there is no such text, or it cannot be fetched.
    """
    if config.source == "stdlib":
        return Corpus(f"Python {platform.python_version()} standard library", stdlib_files())
    if config.source == "shakespeare":
        return Corpus("tiny Shakespeare", (shakespeare_file(config.path, say),))
    if config.source == "hf":
        return Corpus(config.name, hub_files(config, cache_root(), say))
    files = text_files(config.path, say, config.encoding, config.exclude)
    return Corpus(config.path, files, config.encoding, config.field)


def stdlib_files() -> tuple[Path, ...]:
    """The standard library's Python sources, sorted by path, without tests and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]  # not walked either
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(f"no Python sources in {root}, where this Python keeps its library: "
                        "use data=text data.path=…")
    return tuple(sorted(files, key=lambda p: p.relative_to(root).as_posix()))


def shakespeare_file(path: str | None, say) -> Path:
    """tiny Shakespeare: the local copy at `path`, or fetched once and checked against its hash."""
    if path is not None:
        file = _given(path, say)
        if sha256_of(file) != SHAKESPEARE_SHA256:
            say(f"note: {file} is not the usual tiny Shakespeare (another sha256): "
                "losses do not compare with published ones")
        return file
    file = cache_root() / "tinyshakespeare.txt"
    waiting = "waiting for another process to fetch tiny Shakespeare"
    with locked(file.with_suffix(".lock"), say, waiting):
        if not (file.exists() and sha256_of(file) == SHAKESPEARE_SHA256):
            say(f"fetching tiny Shakespeare from {SHAKESPEARE_URL}")
            with atomic_write(file) as part:
                part.write_bytes(_fetched_shakespeare())
    return file


def _fetched_shakespeare() -> bytes:
    by_hand = f"fetch {SHAKESPEARE_URL} by hand and give it as data.path=FILE"
    text, ends = b"", time.monotonic() + PATIENCE
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=STALLED) as answer:
            while len(text) < 4_000_000 and (part := answer.read1(1 << 16)):
                text += part
                if time.monotonic() > ends:
                    raise TimeoutError(f"{len(text):,} bytes came in {PATIENCE} s")
    except (OSError, HTTPException) as e:
        why = str(getattr(e, "reason", e)).strip()
        raise UserError(f"tiny Shakespeare could not be fetched ({why}): {by_hand}") from None
    digest = hashlib.sha256(text).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise UserError(f"what came for tiny Shakespeare has another sha256, {digest}: {by_hand}")
    return text


def text_files(path: str, say, encoding: str = "utf-8",
               exclude: str | None = None) -> tuple[Path, ...]:
    """The files of a path: a file, a folder with all below it, or a glob.

    Left out of a folder are files that cannot be read or are no text in the encoding, what is
    hidden, what `exclude` names, what GlassGPT and other programs wrote (`PROGRAMS`), and folders
    that are links; `say` takes a line with their names. A linked file is read.

    Raises:
        UserError: there is no such path, or no text in it.
    """
    path = os.path.expanduser(path)
    is_folder = os.path.isdir(path)
    if not is_folder and (os.path.exists(path) or not glob.has_magic(path)):
        return (_given(path, say, encoding),)
    globs = [g for typed in (exclude or "").split(",")
             if (g := typed.strip().removeprefix("**/").rstrip("/"))]
    root = Path(*takewhile(lambda part: is_folder or not glob.has_magic(part), Path(path).parts))
    text, left = [], {}  # left: reason → files
    for file, why in _below(root, globs) if is_folder else _matching(path, root, globs):
        why = why or _why_not_text(file, encoding)
        (left.setdefault(why, []) if why else text).append(file)
    if not text:
        for file in sorted(left.get(_not_in(encoding), ()))[:1]:
            list(Corpus(path, (file,), encoding).pieces())  # which raises what byte is wrong
        reasons = f"; left out: {_listing(left, root)}" if left else ""
        raise UserError(f"data.path={path} holds no text files{reasons}")
    if left:
        say(f"left out of {path}: {_listing(left, root)}")
    for g in globs:
        if not any(_excluded(file.relative_to(root), [g]) for file in left.get(EXCLUDED, ())):
            say(f"note: data.exclude={g} matches nothing in {path}")
    return tuple(sorted(text, key=lambda p: p.as_posix()))


def _below(root: Path, globs: list[str]) -> Iterator[tuple[Path, str | None]]:
    """Each file below a folder, and each file or folder there that is left out, with the reason."""
    folders, cache = [root], cache_root()
    while folders:
        folder = folders.pop()
        try:
            inside = list(folder.iterdir())
            names = {path.name for path in inside}
            if folder != root and (folder.name in ("__pycache__", "wandb")
                                   or any(marks <= names for marks in PROGRAMS)
                                   or folder.samefile(cache)):
                yield folder, "written by a program"
                continue
        except OSError:
            yield folder, UNREADABLE
            continue
        for path in inside:
            is_folder = os.path.isdir(path)
            if _excluded(path.relative_to(root), globs):
                yield path, EXCLUDED
            elif path.name.startswith("."):
                yield path, "hidden"
            elif is_folder and path.is_symlink():  # it may lead around in a circle
                yield path, "linked folder"
            elif is_folder:
                folders.append(path)
            else:
                yield path, None


def _matching(path: str, root: Path, globs: list[str]) -> Iterator[tuple[Path, str | None]]:
    """The files that a glob matches, and what is left out, as `_below` gives them."""
    matches = {Path(match) for match in glob.iglob(path, recursive=True)}
    if "**" in Path(path).parts:
        yield from ((p, why) for p, why in _below(root, globs) if p in matches or os.path.isdir(p))
        return
    for file in matches:
        if not os.path.isdir(file):
            yield file, EXCLUDED if _excluded(file.relative_to(root), globs) else None


def _excluded(path: Path, globs: list[str]) -> bool:
    """Whether a glob matches the path, a folder that it is in, or the name of one of them."""
    return any(fnmatchcase(part.as_posix(), g) or fnmatchcase(part.name, g)
               for g in globs for part in (path, *path.parents)[:-1])


def _why_not_text(path: Path, encoding: str) -> str | None:
    """Why a file holds no text, as far as its beginning shows; None where it does."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "not a file"
        with unpacked(path) as file:
            head = file.read(CHECKED)
        codecs.getincrementaldecoder(encoding)().decode(head, final=len(head) < CHECKED)
        return _kind(head, encoding)
    except UNREADABLE_ERRORS:
        return UNREADABLE
    except UnicodeError:
        return _kind(head, encoding) or _not_in(encoding)


def _not_in(encoding: str) -> str:
    return f"not {encoding_name(encoding)}: see data.encoding"


def _kind(head: bytes, encoding: str) -> str | None:
    """What a file is that begins so, where that is no text."""
    for mark, kind in PACKED.items():
        if head.startswith(mark):
            return kind
    # A NUL is none of text, but in encodings that take several bytes for an "a".
    return BINARY if b"\0" in head[:8192] and b"\0" not in "a".encode(encoding) else None


def _listing(left: dict[str, list[Path]], root: Path) -> str:
    """What was left out, by reason: a.bin, sub/b.bin (binary); notes (linked folder)."""
    groups = []
    for why, files in sorted(left.items()):
        names = sorted(file.relative_to(root).as_posix() for file in files)
        shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:NAMED])
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        groups.append(f"{shown}{more} ({why})")
    return "; ".join(groups)


def require_path(path: str) -> None:
    """Raise `UserError` where a path is of nothing, as is known before any text is read."""
    whole = os.path.expanduser(path)
    if not os.path.exists(whole) and not glob.has_magic(whole):
        raise UserError(f"data.path={path} does not exist: give the path of a text file, of a "
                        "folder, or a glob")


def _given(path: str, say, encoding: str = "utf-8") -> Path:
    """The one file that a path names."""
    file = Path(os.path.expanduser(path))
    require_path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "is a pipe, a socket or a device"
        raise UserError(f"data.path={path} {what}: give the path of a text file")
    try:
        with unpacked(file) as f:
            kind = _kind(f.read(8192), encoding)
    except UNREADABLE_ERRORS as e:
        raise unreadable(file, e) from None
    if kind == BINARY:
        say(f"note: {file} holds NUL bytes, as text seldom does; "
            "if its encoding is UTF-16, say data.encoding=utf-16")
    elif kind:
        is_archive = kind == ZIP and file.suffix.lower() not in DOCUMENTS
        advice = "unpack it and give the folder" if is_archive else "save it as plain text"
        raise UserError(f"{file} is a {kind}: {advice}")
    return file
