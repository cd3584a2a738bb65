"""Find the files of a text: the standard library, a file, a folder, or a glob."""

import glob
import os
import sysconfig
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from unicodedata import normalize

from common.errors import UserError
from common.files import ordinary_file
from common.paths import expand_home, require_path
from common.terminal import error_sentence
from common.text import pluralize, printable
from data.cache import cache_root
from data.text_files import open_text
from run.run_dir import SWEEP_FILE, RunDir

TEXT_CHECK_CHARS = 1 << 20  # read from the start of a file to decide whether it is text
MAX_NAMED_FILES = 3  # in the message about skipped files
NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
EVERYTHING_BELOW = ("**", "*")


def find_stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's sources, sorted, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return find_files(root, ("**", "*.py"), NOT_LIBRARY)


def find_text_files(
    path: str, log: Callable[[str], None], exclude: str | None = None
) -> tuple[Path, ...]:
    """Return the text files of a file, folder or glob, sorted by path.

    `exclude` has globs of paths to skip, separated by commas. Files that are not UTF-8 text are
    skipped with a message; see `find_files` for what else is skipped.
    """
    path = str(expand_home("data.path", path))
    if not os.path.isdir(path) and (os.path.exists(path) or not glob.has_magic(path)):
        return (require_text_file(path),)
    root, pattern = _split_glob(path)
    excluded = [part.strip().removeprefix("**/").rstrip("/") for part in (exclude or "").split(",")]
    texts: list[Path] = []
    problems: dict[str, str] = {}  # why a file is no text, by its name below the root
    for file in find_files(root, pattern, excluded):
        name = printable(file.relative_to(root).as_posix(), one_line=True)
        try:
            with open_text(ordinary_file(file), name) as content:
                content.read(TEXT_CHECK_CHARS)
            texts.append(file)
        except (OSError, UserError) as e:
            problems[name] = error_sentence(e)

    if not texts:
        problem = next(iter(problems.values()), "name a folder or a glob with text")
        raise UserError(f"data.path={path} holds no text files: {problem}")
    if problems:
        files = pluralize(len(problems), "file")
        names = ", ".join([*problems][:MAX_NAMED_FILES])
        log(f"{path}: skipped {files} without UTF-8 text (such as {names})")
    return tuple(texts)


def require_text_file(path: str) -> Path:
    """Return the one file that data.path names."""
    require_path("data.path", path)
    file = expand_home("data.path", path)
    if not file.is_file():
        raise UserError(f"data.path={path} is not a file; give the path of a text file")
    return file


def _split_glob(path: str) -> tuple[Path, Sequence[str]]:
    """Split a folder or a glob into the folder to search and the parts of a glob in it."""
    if os.path.isdir(path):
        return Path(path), EVERYTHING_BELOW
    parts = Path(path).parts
    fixed = [*takewhile(lambda part: not glob.has_magic(part), parts)]
    pattern = parts[len(fixed) :]
    if pattern[-1] == "**":  # it stands for folders
        pattern = (*pattern, "*")
    return Path(*fixed), pattern


# --- files below a folder -------------------------------------------------------------------------


def find_files(
    root: Path, pattern: Sequence[str] = EVERYTHING_BELOW, excluded: Sequence[str] = ()
) -> tuple[Path, ...]:
    """Return the files below a folder that match the parts of a glob, sorted by path.

    `excluded` has globs of names, or of paths relative to the folder. Hidden files, linked folders,
    the cache, runs and sweeps are left out. Globs match composed and decomposed names alike.
    """
    pattern, excluded = _compose(pattern), _compose(excluded)
    found: list[Path] = []
    for name, folders, files in os.walk(root, onerror=_raise_unless_removed):
        folder = Path(name)
        if folder != root and _is_own_folder(folder, {*folders, *files}):
            folders.clear()
            continue
        relative = folder.relative_to(root)
        folders[:] = [n for n in folders if _is_selected(relative / n, pattern, excluded, True)]
        found += [folder / n for n in files if _is_selected(relative / n, pattern, excluded)]
    return tuple(sorted(found, key=Path.as_posix))


def _compose(texts: Sequence[str]) -> list[str]:
    """Return texts with composed characters: é is one character, not an e and an accent."""
    return [normalize("NFC", text) for text in texts]


def _is_selected(
    path: Path, pattern: Sequence[str], excluded: Sequence[str], is_folder: bool = False
) -> bool:
    path = Path(*_compose(path.parts))
    for name in (path.name, path.as_posix()):
        if any(fnmatchcase(name, excluded_name) for excluded_name in (".*", *excluded)):
            return False
    return _matches(path.parts, pattern, is_folder)


def _matches(parts: Sequence[str], pattern: Sequence[str], is_folder: bool) -> bool:
    """Return whether a file matches a glob, or one in a folder can; ** is any number of parts."""
    if not parts:
        return is_folder == bool(pattern)
    if not pattern:
        return False
    if pattern[0] == "**":
        is_longer = _matches(parts[1:], pattern, is_folder)
        return is_longer or _matches(parts, pattern[1:], is_folder)
    matches_first = fnmatchcase(parts[0], pattern[0])
    return matches_first and _matches(parts[1:], pattern[1:], is_folder)


def _raise_unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_own_folder(folder: Path, entries: set[str]) -> bool:
    """Return whether a folder with these entries is a run, a sweep or the cache."""
    run = RunDir(folder)
    written = (run.metrics_file.name, run.checkpoints.name)
    is_run = run.config_file.name in entries and not entries.isdisjoint(written)
    is_sweep = SWEEP_FILE in entries
    return is_run or is_sweep or folder.resolve() == cache_root().resolve()
