"""Find the files of a text: the standard library, tiny Shakespeare, a dataset, or your files."""

import glob
import hashlib
import json
import os
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from unicodedata import normalize

from common.errors import UserError
from common.files import ordinary_file, sha256_of_file, sync
from common.paths import expand_home, require_path
from common.text import pluralize, printable
from common.text_files import open_text
from data.cache import KEY_LENGTH, cache_root, locked_build_folder

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
MAX_SHAKESPEARE_BYTES = 4_000_000  # another page in its place may be endless
TIMEOUT_SECONDS = 20
TEXT_CHECK_CHARS = 1 << 20  # read from the start of a file to decide whether it is text
MAX_NAMED_FILES = 3  # in the message about skipped files
NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
EVERYTHING_BELOW = ("**", "*")


def find_stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's sources, sorted, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(sorted(_walk(root, ("**", "*.py"), NOT_LIBRARY), key=Path.as_posix))


def _walk(
    root: Path, pattern: Sequence[str] = EVERYTHING_BELOW, exclude: Sequence[str] = ()
) -> Iterator[Path]:
    """Yield the files below a folder that match a glob, given as its parts.

    Hidden files, linked folders, the cache, runs and sweeps are left out, and paths whose name, or
    path below `root`, matches one of the globs to exclude. A glob matches composed and decomposed
    names alike.
    """
    pattern = [normalize("NFC", part) for part in pattern]
    excluded = [".*", *(normalize("NFC", part) for part in exclude)]

    def is_wanted(path: Path, is_folder: bool) -> bool:
        relative = Path(normalize("NFC", str(path.relative_to(root))))
        names = (relative.name, relative.as_posix())
        if any(fnmatchcase(name, shape) for name in names for shape in excluded):
            return False
        return _matches(relative.parts, pattern, is_folder)

    for name, folders, files in os.walk(root, onerror=_raise_unless_removed):
        folder = Path(name)
        if folder != root and _is_own_folder(folder, {*folders, *files}):
            folders.clear()
            continue
        folders[:] = [name for name in folders if is_wanted(folder / name, is_folder=True)]
        yield from (folder / name for name in files if is_wanted(folder / name, is_folder=False))


def _raise_unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _matches(parts: Sequence[str], pattern: Sequence[str], is_folder: bool) -> bool:
    """Return whether a file matches the parts of a glob, or a file below a folder can."""
    if not parts or not pattern:
        return not parts and is_folder == bool(pattern)
    if pattern[0] == "**":
        return _matches(parts, pattern[1:], is_folder) or _matches(parts[1:], pattern, is_folder)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:], is_folder)


def _is_own_folder(folder: Path, entries: set[str]) -> bool:
    is_run = "config.yaml" in entries and not entries.isdisjoint(("metrics.jsonl", "checkpoints"))
    is_sweep = "multirun.yaml" in entries
    return is_run or is_sweep or folder.resolve() == cache_root().resolve()


def download_shakespeare(log: Callable[[str], None], sha256: str = SHAKESPEARE_SHA256) -> Path:
    """Return tiny Shakespeare's file in the cache, downloaded unless its hash is right."""
    file = cache_root() / "tinyshakespeare.txt"
    with locked_build_folder(sha256[:KEY_LENGTH], log) as build_folder:
        if file.exists() and sha256_of_file(file) == sha256:
            return file
        log(f"downloading tiny Shakespeare from {SHAKESPEARE_URL}")
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=TIMEOUT_SECONDS) as response:
                text = response.read(MAX_SHAKESPEARE_BYTES)
            digest = hashlib.sha256(text).hexdigest()
            if digest != sha256:
                raise ValueError(f"its sha256 is {digest} instead of {sha256}")
        except Exception as e:  # networks raise errors of many classes
            raise UserError(
                f"tiny Shakespeare could not be downloaded ({e}); download {SHAKESPEARE_URL} by "
                "hand and set data.path=FILE"
            ) from None
        part = build_folder / file.name
        part.write_bytes(text)
        return part.replace(file)


def download_dataset(name: str, subset: str | None, split: str, log: Callable[[str], None]) -> Path:
    """Convert a dataset of the hub, or of a local folder, to a .jsonl file in the cache, once."""
    # A changed folder is another dataset
    folder = expand_home("data.name", name)
    files = sorted(filter(Path.is_file, _walk(folder))) if folder.is_dir() else []
    stamps = [(path.as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    identity = json.dumps([name, subset, split, stamps])
    key = hashlib.sha256(identity.encode()).hexdigest()[:KEY_LENGTH]

    file = cache_root() / f"{key}.jsonl"
    with locked_build_folder(key, log) as build_folder:
        if file.exists():
            return file
        log(f"downloading {name} (kept in {cache_root()})")
        path = str(folder) if folder.is_dir() else name
        try:  # downloads are kept in the library's own cache, where an interrupted one continues
            from datasets import load_dataset

            rows = load_dataset(path, subset, split=split, cache_dir=str(build_folder))
        except ImportError:
            raise UserError(
                "data=hf needs the library datasets, which is not installed; run "
                "pip install datasets"
            ) from None
        except Exception as e:  # the library and those below it raise errors of many classes
            reason = " ".join(str(e.__cause__ or e).split())
            raise UserError(
                f"data.name={name} cannot be read ({reason}); correct data.name, data.subset or "
                "data.split, or without a network set data.name=FOLDER"
            ) from None
        part = build_folder / "part.jsonl"
        rows.to_json(part, force_ascii=False)
        sync(part)
        return part.replace(file)


def find_text_files(
    path: str, log: Callable[[str], None], exclude: str | None = None
) -> tuple[Path, ...]:
    """Return the text files of a file, folder or glob, sorted by path.

    `exclude` has globs of paths to skip, separated by commas. Files that are not UTF-8 text are
    skipped with a message; see `_walk` for what else is skipped.
    """
    path = str(expand_home("data.path", path))
    if not os.path.isdir(path) and (os.path.exists(path) or not glob.has_magic(path)):
        return (require_text_file(path),)
    root, pattern = _split_glob(path)
    excluded = [part.strip().removeprefix("**/").rstrip("/") for part in (exclude or "").split(",")]
    texts: list[Path] = []
    problems: dict[str, str] = {}  # why a file is no text, by its name below the root
    for file in sorted(_walk(root, pattern, excluded), key=Path.as_posix):
        name = printable(file.relative_to(root).as_posix(), one_line=True)
        try:
            with open_text(ordinary_file(file), name) as content:
                content.read(TEXT_CHECK_CHARS)
            texts.append(file)
        except (OSError, UserError) as e:
            problems[name] = str(e)

    names = list(problems)[:MAX_NAMED_FILES]
    if not texts:
        problem = problems[names[0]] if names else "name a folder or a glob with text"
        raise UserError(f"data.path={path} holds no text files: {problem}")
    if problems:
        files = pluralize(len(problems), "file")
        log(f"{path}: skipped {files} without UTF-8 text (such as {', '.join(names)})")
    return tuple(texts)


def require_text_file(path: str) -> Path:
    """Return the one file that data.path names."""
    require_path(path)
    file = expand_home("data.path", path)
    if not file.is_file():
        raise UserError(f"data.path={path} is not a file; give the path of a text file")
    return file


def _split_glob(path: str) -> tuple[Path, tuple[str, ...]]:
    """Split a folder or a glob into the folder to search and the parts of a pattern in it."""
    if os.path.isdir(path):
        return Path(path), EVERYTHING_BELOW
    parts = Path(path).parts
    fixed = tuple(takewhile(lambda part: not glob.has_magic(part), parts))
    pattern = parts[len(fixed) :]
    return Path(*fixed), (*pattern, "*") if pattern[-1] == "**" else pattern
