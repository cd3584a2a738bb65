"""Find the files of a text: the standard library, tiny Shakespeare, a dataset, or your files."""

import glob
import hashlib
import json
import os
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from itertools import takewhile
from pathlib import Path

from common.errors import UserError
from common.files import exists, is_folder, list_folder, ordinary_file, sha256_of_file, sync
from common.paths import expand_home, require_path
from common.text import pluralize, printable
from common.text_files import open_text
from data.cache import KEY_LENGTH, cache_root, locked_build_folder

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
MAX_SHAKESPEARE_BYTES = 4_000_000  # another page in its place may be endless
DOWNLOAD_TIMEOUT_SECONDS = 20
TEXT_CHECK_CHARS = 1 << 20  # read from the start of a file to decide whether it is text
MAX_NAMED_FILES = 3  # in the message about skipped files
MAX_DATASET_ERROR_CHARS = 300  # of a library's error message
NOT_LIBRARY_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def find_stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's Python sources, sorted by path.

    Its tests and installed packages are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = walk_folder(root, lambda path: path.name in NOT_LIBRARY_FOLDERS)
    sources = [path for path in files if path.name.endswith(".py")]
    return tuple(sorted(sources, key=lambda path: path.relative_to(root).as_posix()))


def walk_folder(folder: Path, is_skipped: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the files below a folder, without what is skipped and without following links.

    Raises:
        OSError: If a folder cannot be listed.
    """
    for path in list_folder(folder):
        if is_skipped(path):
            continue
        if is_folder(path, follow_links=False):
            yield from walk_folder(path, is_skipped)
        else:
            yield path


def download_shakespeare(
    log: Callable[[str], None], url: str = SHAKESPEARE_URL, sha256: str = SHAKESPEARE_SHA256
) -> Path:
    """Return tiny Shakespeare's file in the cache, downloaded unless its hash is right.

    Raises:
        UserError: The text cannot be downloaded, or another text came.
    """
    file = cache_root() / "tinyshakespeare.txt"
    with locked_build_folder(sha256[:KEY_LENGTH], log) as build_folder:
        if file.exists() and sha256_of_file(file) == sha256:
            return file
        log(f"downloading tiny Shakespeare from {url}")
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
                text = response.read(MAX_SHAKESPEARE_BYTES)
            digest = hashlib.sha256(text).hexdigest()
            if digest != sha256:
                raise ValueError(f"its sha256 is {digest} instead of {sha256}")
        except Exception as e:  # networks raise errors of many classes
            raise UserError(
                f"tiny Shakespeare could not be downloaded ({e}); download {url} by hand and "
                "set data.path=FILE"
            ) from None
        part = build_folder / file.name
        part.write_bytes(text)
        return part.replace(file)


def download_dataset(name: str, subset: str | None, split: str, log: Callable[[str], None]) -> Path:
    """Convert a dataset of the hub, or of a local folder, to a .jsonl file in the cache, once.

    Raises:
        UserError: The dataset cannot be read, or the library `datasets` is not installed.
    """
    # A changed folder is another dataset
    folder = expand_home("data.name", name)
    is_local = folder.is_dir()
    if folder.is_file():
        raise UserError(f"data.name={name} is a file: give its folder, or data=text data.path=FILE")
    paths = sorted(walk_folder(folder, lambda path: False)) if is_local else []
    stamps = [(p.as_posix(), p.stat().st_size, p.stat().st_mtime_ns) for p in paths if p.is_file()]
    identity = json.dumps([name, subset, split, stamps])
    key = hashlib.sha256(identity.encode()).hexdigest()[:KEY_LENGTH]

    with locked_build_folder(key, log) as build_folder:
        # The name of a finished file includes its size, which shows whether it is complete
        for file in list_folder(cache_root(), f"{key}_*.jsonl"):
            if file.stem == f"{key}_{ordinary_file(file).stat().st_size}":
                return file
        log(f"downloading {name} (kept in {cache_root()})")
        try:
            from datasets import load_dataset
            from huggingface_hub.utils import logging
        except ImportError:
            raise UserError(
                "data=hf needs the library datasets, which is not installed; run "
                "pip install datasets"
            ) from None

        logging.set_verbosity_error()  # else it reports each of its own attempts
        try:  # downloads are kept in the library's own cache, where an interrupted one continues
            rows = load_dataset(
                str(folder) if is_local else name,
                subset,
                split=split,
                cache_dir=str(build_folder),
            )
        except Exception as e:  # the library and those below it raise errors of many classes
            cause = e.__cause__ or e
            reason = " ".join(str(cause).split())[:MAX_DATASET_ERROR_CHARS] or type(e).__name__
            advice = "without a network, download its files elsewhere and set data.name=FOLDER"
            if is_local:
                advice = "correct data.subset, data.split or its files, whose text must be UTF-8"
            raise UserError(f"data.name={name} cannot be read ({reason}); {advice}") from None
        part = build_folder / "part.jsonl"
        rows.to_json(part, force_ascii=False)
        sync(part)
        return part.replace(cache_root() / f"{key}_{part.stat().st_size}.jsonl")


def find_text_files(
    path: str, log: Callable[[str], None], exclude: str | None = None
) -> tuple[Path, ...]:
    """Return the text files that a path names, sorted by path.

    Files that are not UTF-8 text are skipped with a message. Hidden files, linked folders and what
    GlassGPT itself wrote are skipped silently.

    Args:
        path: A file, a folder with everything below it, or a glob.
        log: Called with one line about the skipped files, if there are any.
        exclude: Globs of further paths to skip, separated by commas.

    Raises:
        UserError: The path does not exist or holds no text.
    """
    path = str(expand_home("data.path", path))
    if not os.path.isdir(path) and (os.path.exists(path) or not glob.has_magic(path)):
        return (require_text_file(path),)

    # Sort the candidates into text files and others
    root, pattern = _split_glob(path)
    is_skipped = partial(_is_skipped, root, _parse_globs(exclude))
    candidates = set(_find_matches(root, pattern, is_skipped))
    text_files: list[Path] = []
    problems: dict[str, str] = {}  # why a file is no text, by its name below the root
    for file in sorted(candidates, key=lambda candidate: candidate.as_posix()):
        name = printable(file.relative_to(root).as_posix(), one_line=True)
        problem = _find_problem(file, name)
        if problem is None:
            text_files.append(file)
        else:
            problems[name] = problem

    # Report the others
    if not text_files and not problems:
        raise UserError(f"data.path={path} holds no files; name a folder or a glob with text")
    names = list(problems)[:MAX_NAMED_FILES]
    if not text_files:
        raise UserError(f"data.path={path} holds no text files: {problems[names[0]]}")
    if problems:
        files = pluralize(len(problems), "file")
        skipped = f"skipped {files} without UTF-8 text (such as {', '.join(names)})"
        log(f"{path}: {skipped}")
    return tuple(text_files)


def require_text_file(path: str) -> Path:
    """Return the one file that data.path names.

    Raises:
        UserError: It does not exist or is not an ordinary file.
    """
    require_path(path)
    file = expand_home("data.path", path)
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "is a pipe, a socket or a device"
        raise UserError(f"data.path={path} {problem}; give the path of a text file")
    return file


def _split_glob(path: str) -> tuple[Path, list[str]]:
    """Split a folder or a glob into the folder to search and the parts of a pattern in it."""
    parts = Path(path).parts
    fixed = parts if os.path.isdir(path) else tuple(takewhile(_is_plain, parts))
    return Path(*fixed), list(parts[len(fixed) :]) or ["**"]


def _is_plain(part: str) -> bool:
    return not glob.has_magic(part)


def _find_matches(
    folder: Path, pattern: list[str], is_skipped: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yield the files in a folder that match the parts of a glob, some of them repeatedly.

    Raises:
        OSError: If a folder cannot be listed, which `glob.glob` takes for an empty folder.
    """
    part, *rest = pattern
    if part == "**" and not rest:
        yield from walk_folder(folder, is_skipped)
        return
    if part == "**":
        yield from _find_matches(folder, rest, is_skipped)
        part, rest = "*", pattern
    for path in [folder / part] if _is_plain(part) else list_folder(folder, part):
        if is_skipped(path):
            continue
        if is_folder(path):
            yield from _find_matches(path, rest, is_skipped) if rest else ()
        elif not rest and exists(path, follow_links=False):
            yield path


def _parse_globs(exclude: str | None) -> list[str]:
    return [
        pattern.strip().removeprefix("**/").rstrip("/") for pattern in (exclude or "").split(",")
    ]


def _is_skipped(root: Path, globs: list[str], path: Path) -> bool:
    """Return whether to skip a path: hidden, excluded, or a folder that is a link, cache or run."""
    relative = path.relative_to(root).as_posix()
    if path.name.startswith("."):
        return True
    if any(fnmatchcase(path.name, pattern) or fnmatchcase(relative, pattern) for pattern in globs):
        return True
    if not os.path.isdir(path):
        return False
    if path.is_symlink() or path.resolve() == cache_root().resolve():
        return True
    entries = {entry.name for entry in list_folder(path)}
    is_run = "config.yaml" in entries and not entries.isdisjoint(("metrics.jsonl", "checkpoints"))
    is_sweep = "multirun.yaml" in entries
    return is_run or is_sweep


def _find_problem(path: Path, name: str) -> str | None:
    """Return why a file does not begin as text, or None if it does."""
    try:
        with open_text(ordinary_file(path), name) as file:
            file.read(TEXT_CHECK_CHARS)
            return None
    except OSError as e:
        return f"{name} cannot be read ({e.strerror})"
    except UserError as e:
        return str(e)
