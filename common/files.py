"""Write files atomically, list folders, refuse special and oversized files, and compute hashes."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

MAX_JSON_BYTES = 100_000_000
# Start of the last entry of a sealed JSON object, the hash of the object without that entry.
SEAL = ',\n "sha256": "'
HASH_CHUNK_BYTES = 1 << 20
START_BYTES = 64  # that tell what a file contains
# Errors of a file that is missing, or is not what it was. Others, such as a missing permission, can
# pass, and say nothing about the content.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG)
LFS_START = b"version https://git-lfs"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` when it is on the disk.

    A reader sees either the old file or the complete new one.
    """
    part = part_path(path)
    try:
        yield part
        sync(part)
        part.replace(path)
    except OSError as e:
        e.filename = e.filename or str(path)  # errors of writing and syncing have none
        raise
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def part_path(path: Path) -> Path:
    """Return where a file is written before it gets its name."""
    return path.with_name(f".{path.name}.part")


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the sorted matches in a folder, [] if it does not exist.

    Raises `OSError` if the folder cannot be listed, which `Path.glob` takes for an empty one.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, ValueError):  # no path contains a null character
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def exists(path: Path) -> bool:
    """Return whether a path exists; raise `OSError` if that is unknown, unlike `Path.exists`."""
    return bool(_mode(path))


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; raise `OSError` if that is unknown."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (FileNotFoundError, ValueError):  # no path contains a null character
        return 0


def ordinary_file(path: Path, max_bytes: int | None = None) -> Path:
    """Return the path of a regular file of at most `max_bytes`; raise `OSError` for any other.

    Reading a pipe could block forever.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        message = f"its {status.st_size:,} bytes exceed the limit of {max_bytes:,}"
        raise OSError(errno.EFBIG, message, str(path))
    return path


def read_start(path: Path) -> bytes:
    """Return the first bytes of a file; raise `OSError` for a pointer of Git LFS."""
    with ordinary_file(path).open("rb") as file:
        start = file.read(START_BYTES)
    if start.startswith(LFS_START):
        raise OSError(errno.EINVAL, "it is a pointer of Git LFS; run git lfs pull", str(path))
    return start


def seal(json_text: str) -> str:
    """Append the hash of an indented JSON object's text to that object, as its last entry."""
    digest = hashlib.sha256(json_text.encode()).hexdigest()
    entries = json_text.removesuffix("\n}")
    return f'{entries}{SEAL}{digest}"\n}}'


@contextmanager
def damage_as_value_error() -> Iterator[None]:
    """Raise `ValueError` for an `OSError` that is `DAMAGE`."""
    try:
        yield
    except OSError as e:
        if e.errno in DAMAGE:
            raise ValueError(e.strerror) from None
        raise


def read_json_object(path: Path, must_be_sealed: bool = False) -> dict:
    """Read a file of one JSON object, sealed if it must be; raise `ValueError` for any other."""
    with damage_as_value_error():
        read_start(path)  # whose errors are clearer
        text = ordinary_file(path, MAX_JSON_BYTES).read_text(encoding="utf-8-sig")
    try:
        value = json.loads(text)
    except RecursionError as e:
        raise ValueError(e) from None
    if not isinstance(value, dict):
        raise ValueError("it does not contain a JSON object")
    if must_be_sealed and text != seal(text[: text.rfind(SEAL)] + "\n}"):
        raise ValueError("it was changed: its sha256 differs")
    return value


def sha256_of_file(path: Path) -> str:
    """Return the hex SHA-256 digest of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of entries, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot sync folders, and need not
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
