"""Files written whole or not at all, and their hashes."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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


def ordinary(path: Path, most: int | None = None) -> Path:
    """The path, where it is an ordinary file of at most so many bytes: a pipe can keep its reader
    waiting for ever.

    Raises:
        OSError: it is none.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, and at most {most:,} are read",
                      str(path))
    return path


def sha256_of(path: Path) -> str:
    """Hex digest of a file of any size."""
    digest = hashlib.sha256()
    with ordinary(path).open("rb") as f:
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
