"""The folder of downloads and prepared tokens, where one process at a time makes each of them."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock, Timeout

from common.errors import UserError


def cache_root() -> Path:
    """Where downloads and prepared tokens are kept: data/cache, or the folder of GLASSGPT_CACHE."""
    return Path(os.environ.get("GLASSGPT_CACHE") or Path(__file__).parent / "cache")


@contextmanager
def making(key: str, log: Callable[[str], None]) -> Iterator[Path]:
    """A folder to make something of the cache in, while other processes wait for it. `key`, of 16
    hex digits, names what is made. It is renamed to its place; the rest is removed."""
    root = cache_root()
    lock = FileLock(root / f"{key}.lock")
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob("[0-9a-f]" * 16 + ".*.part"):  # by killed processes
            with suppress(OSError), FileLock(root / f"{left.name[:16]}.lock", timeout=0):
                shutil.rmtree(left)
        try:
            held = lock.acquire(timeout=1)
        except Timeout:
            log("waiting for another process that prepares this text")
            held = lock.acquire()
        with held, TemporaryDirectory(".part", f"{key}.", root, True) as part:
            yield Path(part)
    except OSError as e:
        raise UserError(
            f"the cache folder {root} cannot be written ({e.strerror or e}): "
            "make room there, or set GLASSGPT_CACHE to another folder"
        ) from None
