"""Files written whole or not at all, their locks and their hashes."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from config import UserError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Where to write a file that is to be at `path` whole or not at all: beside it; at the end it is given its name.

    A link at `path` is replaced, not followed.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, say: Callable[[str], None], waiting: str) -> Iterator[None]:
    """Hold the lock at `path`; while another process has it, wait, after saying `waiting`.

    Raises:
        UserError: the lock cannot be taken: it is a link, or belongs to someone else.
    """
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(waiting)
            lock.acquire()
    except OSError as e:
        raise UserError(f"the lock {path} cannot be taken ({e.strerror}): remove it, or set "
                        "GLASSGPT_CACHE to a folder of your own") from None
    try:
        yield
    finally:
        lock.release()


def sha256_of(path: Path) -> str:
    """Hex digest of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk. Windows cannot sync a folder and needs not."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
