"""The folder of downloads and prepared tokens, in which one process at a time writes each entry."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from common.errors import UserError
from common.files import sync
from common.paths import expand_home, writable_folder

KEY_LENGTH = 16  # hex digits that name an entry
SILENT_WAIT_SECONDS = 1  # a shorter wait for another process is not worth a message
# What opening an entry raises if it is absent or damaged.
ENTRY_ERRORS = (OSError, ValueError, KeyError, TypeError, UserError)
Entry = TypeVar("Entry")


def cache_root() -> Path:
    """Return the cache folder, which may be read-only: that of GLASSGPT_CACHE, or data/cache."""
    path = os.environ.get("GLASSGPT_CACHE")
    return expand_home("GLASSGPT_CACHE", path) if path else Path(__file__).parent / "cache"


def open_or_write(
    name: str,
    open_entry: Callable[[Path], Entry],
    write_entry: Callable[[Path], None],
    action: str,
    log: Callable[[str], None],
) -> Entry:
    """Open an entry of the cache, or write it first, while other processes wait.

    Nothing is written if `open_entry` finds it intact; otherwise it raises one of `ENTRY_ERRORS`.
    What cannot be written into the cache exists as long as this process. `action` tells in `log`
    that the entry is written.
    """
    with suppress(*ENTRY_ERRORS):
        return open_entry(cache_root() / name)
    with _locked_build_folder(name, log) as build_folder:
        entry = build_folder.with_name(name)
        try:
            return open_entry(entry)  # which another process has written meanwhile
        except ENTRY_ERRORS as e:
            damage = f"; the one there is damaged: {e}" if entry.exists() else ""
        log(f"{action} (kept in {entry}{damage})")
        part = build_folder / name
        write_entry(part)
        shutil.rmtree(entry, ignore_errors=True)  # a damaged one
        part.replace(entry)
        sync(entry.parent)
        return open_entry(entry)


@contextmanager
def _locked_build_folder(name: str, log: Callable[[str], None]) -> Iterator[Path]:
    """Give a temporary folder to build an entry in, while other processes wait.

    The caller moves the entry out of the folder; whatever is left there, also by a process that was
    killed, is removed.
    """
    root = writable_folder(cache_root())
    lock = FileLock(root / f"{name}.lock")
    folder = root / f"{name}.part"
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
            f"the cache folder {root} cannot be written ({e.strerror or e}): "
            "free some space there, or set GLASSGPT_CACHE to another folder"
        ) from None
