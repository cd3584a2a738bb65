"""Write files atomically, read only ordinary files, and compute their hashes."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LARGEST_JSON = 100_000_000  # bytes of a JSON file that is read


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to, which gets its name at the end, when it is on the
    disk: the file is there whole or not at all. A link at `path` is replaced, not followed."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        yield part
        sync(part)
        part.replace(path)
    except OSError as e:
        e.filename = e.filename or str(path)  # which writing and syncing leave out
        raise
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def ordinary_file(path: Path, most: int | None = None) -> Path:
    """The path, if it is an ordinary file of at most so many bytes, else an OSError: a pipe can
    keep its reader waiting for ever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
    if most is not None and found.st_size > most:
        raise OSError(
            errno.EFBIG, f"it has {found.st_size:,} bytes, and at most {most:,} are read", str(path)
        )
    return path


def read_json_object(path: Path) -> dict:
    """The object in a JSON file; a ValueError where there is none."""
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        value = json.loads(ordinary_file(path, LARGEST_JSON).read_text(encoding="utf-8"))
    except (OSError, RecursionError) as e:
        raise ValueError(getattr(e, "strerror", None) or e) from None
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    return value


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file of any size."""
    digest = hashlib.sha256()
    with ordinary_file(path).open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of entries, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot, and need not
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None
    finally:
        os.close(handle)
