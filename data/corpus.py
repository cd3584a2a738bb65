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
import sysconfig
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import ordinary_file, sha256_of_file, sync
from common.paths import expand_home, require_path
from common.text import printable
from config import DataConfig
from data.cache import cache_root, making

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PIECE = 1 << 20  # characters read at a time; a piece has fewer than three times as many
# Where no splitting pattern joins, if no line begins: before the one space between two words, and
# between a letter and the sign that ends a clause.
BREAK = re.compile(r"(?<=\S) (?=\S)|(?<=[^\W\d_])[.,;:!?。，、；：！？]")
LINE_BACKWARDS = re.compile(r"(?<=[^\W_])\n(?=\S)")  # where a line may be cut off, in reversed text
CHECKED = 1 << 20  # bytes of a file that are looked at before it is taken for text
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
UNREADABLE = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class Corpus:
    """Files of text, one document each, in a fixed order; read when they are asked for."""

    name: str
    files: tuple[Path, ...]
    field: str = "text"  # of a .jsonl
    lines: str = "kept"  # what becomes of them, see `rearranged`

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The text as `_as_it_is` gives it, with its lines rearranged."""
        known, random = set(), np.random.default_rng(0)
        for text, begins in self._as_it_is():
            yield rearranged(text, self.lines, known, random), begins

    def _as_it_is(self) -> Iterator[tuple[str, bool]]:
        """The text in pieces of bounded size, and whether each begins a document.

        A file is a document, or each line of a .jsonl; every document has at least one piece. Line
        ends are as they are; a byte-order mark is dropped. A document is cut before a line that
        begins with a letter or a digit and follows one that ends with no white space: no splitting
        pattern joins across that, so that the pieces have the tokens of the whole."""
        for path in self.files:
            try:
                with unpacked(path) as raw:
                    file = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
                    try:
                        if is_jsonl(path):
                            yield from _records(file, path, self.field)
                        else:
                            yield from _pieces(iter(partial(file.read, PIECE), ""), PIECE)
                    except UnicodeDecodeError as e:
                        offset = raw.tell() - len(e.object) + e.start
                        raise UserError(
                            f"{path} is not utf-8 text: byte {e.object[e.start]:#04x} at offset "
                            f"{offset}; convert it, as by iconv -f cp1252 -t utf-8, or leave it "
                            "out (data.exclude)"
                        ) from None
            except UNREADABLE as e:
                why = getattr(e, "strerror", None) or e
                raise UserError(f"{path} cannot be read: {why}") from None


def rearranged(text: str, how: str, known: set[bytes], random: np.random.Generator) -> str:
    """A piece of a text with its lines `kept`; `once`, without those in `known`, where they are
    noted; `shuffled`; or `doubled`, each right after itself."""
    if how == "kept":
        return text
    lines = text.splitlines(keepends=True)
    if how == "shuffled":
        lines = [lines[k] for k in random.permutation(len(lines))]
    elif how == "doubled":
        lines = [line for line in lines for _ in range(2)]
    else:
        keys = [hashlib.md5(line.strip().encode("utf-8", "replace")).digest() for line in lines]
        lines = [known.add(key) or line for key, line in zip(keys, lines) if key not in known]
    return "".join(lines)


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
            texts = _texts(json.loads(line), field.split("."))
        except (ValueError, TypeError, RecursionError):
            texts = []
        if not texts:
            raise UserError(
                f"line {number} of {path} is no JSON object with text in data.field="
                f"{field}: {line[:80].strip()}"
            )
        text = "\n\n".join(texts)
        if "\\u" in line:  # the only way for half a surrogate pair to get in, which becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        del line, texts  # which may be large
        yield from cut_up(text, PIECE)


def _texts(value, names: list[str]) -> list[str]:
    """The texts in a field of a value: in objects within objects, of all items of a list."""
    if value is None:
        return []
    if isinstance(value, list):
        return [text for item in value for text in _texts(item, names)]
    if isinstance(value, dict) and names:
        return _texts(value.get(names[0]), names[1:])
    if isinstance(value, str) and not names:
        return [value]
    raise TypeError(value)


def cut_up(text: str, size: int) -> Iterator[tuple[str, bool]]:
    """A document in pieces of less than three times `size` characters, as of `Corpus.pieces`."""
    return _pieces((text[at : at + size] for at in range(0, len(text), size)), size)


def _cut(text: str, size: int) -> int:
    """Where to cut a text that goes on; 0: read more first. Unbroken text is cut anywhere."""
    if line := LINE_BACKWARDS.search(text[::-1]):
        return len(text) - line.start()
    if len(text) < 2 * size:
        return 0
    breaks = [found.start() for found in BREAK.finditer(text, len(text) - 4096)]
    return breaks[-1] if breaks else len(text)


def is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


def unpacked(path: Path) -> io.BufferedIOBase:
    """The bytes of a file, or of what a .gz holds."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def open_corpus(config: DataConfig, log: Callable[[str], None] = print) -> Corpus:
    """The corpus that the configuration names."""
    make = partial(Corpus, field=config.field, lines=config.lines)
    if config.source == "stdlib":
        return make(f"Python {platform.python_version()} standard library", stdlib_files())
    if config.source == "shakespeare":
        file = shakespeare_file(log) if config.path is None else _given(config.path)
        return make("tiny Shakespeare", (file,))
    if config.source == "hf":
        return make(config.name, (dataset_file(config, log),))
    return make(config.path, text_files(config.path, log, config.exclude))


def stdlib_files() -> tuple[Path, ...]:
    """The standard library's Python sources, sorted by path, without tests and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]  # not walked either
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return tuple(sorted(files, key=lambda p: p.relative_to(root).as_posix()))


def shakespeare_file(log: Callable[[str], None]) -> Path:
    """tiny Shakespeare, fetched once and checked against its hash."""
    file = cache_root() / "tinyshakespeare.txt"
    with making(SHAKESPEARE_SHA256[:16], log) as part:
        if file.exists() and sha256_of_file(file) == SHAKESPEARE_SHA256:
            return file
        log(f"fetching tiny Shakespeare from {SHAKESPEARE_URL}")
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=20) as answer:
                text = answer.read(4_000_000)
            if (digest := hashlib.sha256(text).hexdigest()) != SHAKESPEARE_SHA256:
                raise ValueError(f"another text came, of sha256 {digest}")
        except Exception as e:  # of the network, of many kinds
            raise UserError(
                f"tiny Shakespeare could not be fetched ({e}): fetch {SHAKESPEARE_URL} "
                "by hand and give it as data.path=FILE"
            ) from None
        (part / file.name).write_bytes(text)
        return (part / file.name).replace(file)


def dataset_file(config: DataConfig, log: Callable[[str], None]) -> Path:
    """A dataset of the hub, or of a folder of its files, as a .jsonl: fetched once."""
    local = expand_home("data.name", config.name)
    paths = sorted(local.rglob("*")) if local.is_dir() else []
    sizes = [(p.as_posix(), p.stat().st_size, p.stat().st_mtime_ns) for p in paths if p.is_file()]
    asked = json.dumps([config.name, config.subset, config.split, sizes])
    key = hashlib.sha256(asked.encode()).hexdigest()[:16]
    with making(key, log) as part:
        for file in cache_root().glob(f"{key}_*.jsonl"):  # with its size, to see that it is whole
            if file.stem == f"{key}_{ordinary_file(file).stat().st_size}":
                return file
        log(f"fetching {config.name} (kept in {cache_root()})")
        try:
            from datasets import load_dataset
            from huggingface_hub.utils import logging
        except ImportError:
            raise UserError(
                "data=hf needs the library datasets, which is not installed: pip install datasets"
            ) from None

        logging.set_verbosity_error()  # it tries again by itself, and says so each time
        try:  # what it fetches stays in a cache of its own, where a download that broke off goes on
            rows = load_dataset(
                str(local) if paths else config.name,
                config.subset,
                split=config.split,
                cache_dir=str(part),
            )
        except Exception as e:  # the library and those below it raise errors of many kinds
            why = " ".join(str(e).split())[:300] or type(e).__name__
            raise UserError(
                f"data.name={config.name} cannot be read: {why}; without a network, "
                "fetch its files elsewhere and give their folder as data.name=FOLDER"
            ) from None
        made = part / "made.jsonl"
        rows.to_json(made, force_ascii=False)
        sync(made)
        return made.replace(cache_root() / f"{key}_{made.stat().st_size}.jsonl")


def text_files(
    path: str, log: Callable[[str], None], exclude: str | None = None
) -> tuple[Path, ...]:
    """The files of a path: a file, a folder with all below it, or a glob. What is no UTF-8 text is
    left out, with a line that says so."""
    path = str(expand_home("data.path", path))
    if os.path.isdir(path):
        root, found = Path(path), Path(path).rglob("*")
    elif os.path.exists(path) or not glob.has_magic(path):
        return (_given(path),)
    else:
        root = Path(*takewhile(lambda part: not glob.has_magic(part), Path(path).parts))
        found = map(Path, glob.iglob(path, recursive=True))
    globs = [typed.strip().removeprefix("**/").rstrip("/") for typed in (exclude or "").split(",")]
    is_passed_by, text, left = cache(partial(_is_passed_by, root, globs)), [], []
    for file in sorted(found, key=lambda p: p.as_posix()):
        parts = [file, *(folder for folder in file.parents if root in folder.parents)]
        if not os.path.isdir(file) and not any(map(is_passed_by, parts)):
            (text if _is_text(file) else left).append(file)
    names = [printable(file.relative_to(root).as_posix(), one_line=True) for file in left[:3]]
    listed = f"{len(left):,} not text in utf-8, as {', '.join(names)}"
    if not text:
        raise UserError(f"data.path={path} holds no text files; left out: {listed}")
    if left:
        log(f"left out of {path}: {listed}")
    return tuple(text)


def _is_passed_by(root: Path, globs: list[str], path: Path) -> bool:
    """Whether a path is hidden, excluded, or a folder that is a link, the cache, a sweep, a run."""
    name, below = path.name, path.relative_to(root).as_posix()
    if name.startswith(".") or any(fnmatchcase(name, g) or fnmatchcase(below, g) for g in globs):
        return True
    if not os.path.isdir(path):
        return False
    if path.is_symlink() or path.resolve() == cache_root().resolve():
        return True
    inside = set(os.listdir(path))
    is_run = "config.yaml" in inside and not inside.isdisjoint(("metrics.jsonl", "checkpoints"))
    return is_run or "multirun.yaml" in inside


def _is_text(path: Path) -> bool:
    """Whether an ordinary file is UTF-8 text, as far as its beginning shows."""
    try:
        with unpacked(ordinary_file(path)) as file:
            head = file.read(CHECKED)
        decoder = codecs.getincrementaldecoder("utf-8")()
        return "\0" not in decoder.decode(head, final=len(head) < CHECKED)
    except (*UNREADABLE, UnicodeError):
        return False


def _given(path: str) -> Path:
    """The one file that a path names."""
    require_path(path)
    file = expand_home("data.path", path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "is a pipe, a socket or a device"
        raise UserError(f"data.path={path} {what}: give the path of a text file")
    return file
