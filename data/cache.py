"""The folder of downloads and prepared tokens, in which one process at a time builds each entry."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UserError
from common.paths import expand_home, writable_folder

KEY_LENGTH = 16  # hex digits that name an entry
SILENT_WAIT_SECONDS = 1  # a shorter wait for another process is not worth a message


def cache_root() -> Path:
    """Return the cache folder: the one that GLASSGPT_CACHE names, or data/cache.

    If data/cache cannot be written, it is a folder that exists as long as this process.
    """
    path = os.environ.get("GLASSGPT_CACHE")
    if path:
        return expand_home("GLASSGPT_CACHE", path)
    return writable_folder(Path(__file__).parent / "cache")


@contextmanager
def locked_build_folder(key: str, log: Callable[[str], None]) -> Iterator[Path]:
    """Give a temporary folder to build a cache entry in, while other processes wait.

    The entry is named by `key`. The caller moves it out of the folder; whatever is left there, also
    by a process that was killed, is removed.
    """
    root = cache_root()
    lock = FileLock(root / f"{key}.lock")
    folder = root / f"{key}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        try:
            acquired = lock.acquire(timeout=SILENT_WAIT_SECONDS)
        except Timeout:
            log("waiting for another process that is preparing the same text")
            acquired = lock.acquire()
        with acquired:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as e:
        raise UserError(
            f"the cache folder {root} cannot be written ({e.strerror or e}); "
            "free some space there, or set GLASSGPT_CACHE to another folder"
        ) from None
