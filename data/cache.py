"""The folder of downloads and prepared tokens, in which one process at a time builds each entry."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from common.errors import UserError
from common.files import list_folder
from common.paths import expand_home

KEY_LENGTH = 16  # hex digits that name an entry
SILENT_WAIT_SECONDS = 1  # a shorter wait for another process is not worth a message


def cache_root() -> Path:
    """Return the cache folder: the one that GLASSGPT_CACHE names, or data/cache."""
    path = os.environ.get("GLASSGPT_CACHE")
    return expand_home("GLASSGPT_CACHE", path) if path else Path(__file__).parent / "cache"


@contextmanager
def locked_build_folder(key: str, log: Callable[[str], None]) -> Iterator[Path]:
    """Give a temporary folder to build a cache entry in, while other processes wait.

    The entry is named by `key`, of `KEY_LENGTH` hex digits. The caller moves it out of the folder;
    whatever is left there is removed.
    """
    root = cache_root()
    lock = FileLock(root / f"{key}.lock")
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_folders(root)
        try:
            acquired = lock.acquire(timeout=SILENT_WAIT_SECONDS)
        except Timeout:
            log("waiting for another process that is preparing the same text")
            acquired = lock.acquire()
        with acquired, TemporaryDirectory(".part", f"{key}.", root, True) as folder:
            yield Path(folder)
    except OSError as e:
        raise UserError(
            f"the cache folder {root} cannot be written ({e.strerror or e}); "
            "free some space there, or set GLASSGPT_CACHE to another folder"
        ) from None


def _remove_abandoned_folders(root: Path) -> None:
    """Remove the build folders of killed processes: those whose lock is free."""
    for folder in list_folder(root, "[0-9a-f]" * KEY_LENGTH + ".*.part"):
        lock = FileLock(root / f"{folder.name[:KEY_LENGTH]}.lock", timeout=0)
        with suppress(OSError), lock:
            shutil.rmtree(folder)
