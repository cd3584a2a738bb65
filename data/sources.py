"""Find the files of a text: the standard library, a file, a folder, or a glob."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from unicodedata import normalize

from pathspec import GitIgnoreSpec

from common.errors import UserError
from common.files import ordinary_file
from common.paths import expand_home, require_path
from common.terminal import error_sentence
from common.text import pluralize, printable
from data.cache import cache_root
from data.text_files import is_parquet, open_text
from run.run_dir import SWEEP_FILE, RunDir

TEXT_CHECK_CHARS = 1 << 20  # read from the start of a file to decide whether it is text
MAX_NAMED_FILES = 3  # in the message about skipped files
NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
EVERYTHING_BELOW = ("**", "*")


def find_stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's sources, sorted, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return find_files(root, ("**", "*.py"), Exclusion(NOT_LIBRARY))


def find_text_files(
    path: str, log: Callable[[str], None], exclude: str | None = None
) -> tuple[Path, ...]:
    """Return the text files of a file, folder or glob, sorted by path.

    `exclude` has patterns of .gitignore for paths to skip, separated by commas. Files that are not
    UTF-8 text are skipped with a message; see `find_files` for what else is skipped.

    Raises:
        UserError: There is no text, or a pattern of `exclude` matches nothing.
    """
    path = str(expand_home("data.path", path))
    exclusion = Exclusion(filter(None, map(str.strip, (exclude or "").split(","))))
    if not os.path.isdir(path) and (os.path.exists(path) or not glob.has_magic(path)):
        exclusion.require_matches(path)
        return (require_text_file(path),)
    root, pattern = _split_glob(path)
    found = find_files(root, pattern, exclusion)
    exclusion.require_matches(path)
    texts: list[Path] = []
    problems: dict[str, str] = {}  # why a file is no text, by its name below the root
    for file in found:
        name = printable(file.relative_to(root).as_posix(), one_line=True)
        try:
            if not is_parquet(ordinary_file(file)):
                with open_text(file, name) as content:
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
        raise UserError(f"data.path={path} is not a file: give the path of a text file")
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


class Exclusion:
    """Patterns of .gitignore for paths below a folder, and which of them have matched none yet."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        lines = [*map(_compose, patterns)]
        try:
            self._spec = GitIgnoreSpec.from_lines(lines)
        except ValueError as e:
            raise UserError(f"data.exclude cannot be read ({e}): correct the pattern") from None
        self._unmatched = {line: GitIgnoreSpec.from_lines([line]) for line in lines}

    def excludes(self, path: str) -> bool:
        """Return whether a path is left out; that of a folder ends with a slash."""
        for line, spec in [*self._unmatched.items()]:
            if spec.check_file(path).include is not None:
                del self._unmatched[line]
        return self._spec.match_file(path)

    def require_matches(self, root: str) -> None:
        """Raise `UserError` if a pattern has matched nothing below data.path."""
        if self._unmatched:
            raise UserError(
                f"data.exclude={min(self._unmatched)} matches nothing in data.path={root}: correct "
                "it as a pattern of .gitignore for paths below that, or leave it out"
            )


def find_files(
    root: Path, pattern: Sequence[str] = EVERYTHING_BELOW, exclusion: Exclusion | None = None
) -> tuple[Path, ...]:
    """Return the files below a folder that match the parts of a glob, sorted by path.

    Hidden files, linked folders, the cache, runs and sweeps are left out, and what `exclusion`
    excludes. Globs match composed and decomposed names alike.
    """
    pattern = [*map(_compose, pattern)]
    exclusion = exclusion or Exclusion()

    def is_selected(path: Path, is_folder: bool = False) -> bool:
        name = _compose(path.as_posix())
        is_excluded = exclusion.excludes(f"{name}/" if is_folder else name)
        is_hidden = path.name.startswith(".")
        return not (is_excluded or is_hidden) and _matches(Path(name).parts, pattern, is_folder)

    found: list[Path] = []
    for name, folders, files in os.walk(root, onerror=_raise_unless_removed):
        folder = Path(name)
        if folder != root and _is_own_folder(folder, {*folders, *files}):
            folders.clear()
            continue
        relative = folder.relative_to(root)
        folders[:] = [each for each in folders if is_selected(relative / each, is_folder=True)]
        found += [folder / each for each in files if is_selected(relative / each)]
    return tuple(sorted(found, key=Path.as_posix))


def _compose(text: str) -> str:
    """Return a text with composed characters: é is one character, not an e and an accent."""
    return normalize("NFC", text)


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
    run_dir = RunDir(folder)
    written = (run_dir.metrics_file.name, run_dir.checkpoints.name)
    is_run = run_dir.config_file.name in entries and not entries.isdisjoint(written)
    is_sweep = SWEEP_FILE in entries
    return is_run or is_sweep or folder.resolve() == cache_root().resolve()
