"""The folder that downloads and prepared tokens are kept in, and its locks."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from config import UserError


def cache_root() -> Path:
    """Where downloads and prepared tokens are kept: data/cache, or the folder of GLASSGPT_CACHE.

    Raises:
        UserError: it cannot be made or written.
    """
    root = Path(os.environ.get("GLASSGPT_CACHE") or Path(__file__).parent / "cache")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as e:
        raise UserError(f"the cache folder {root} cannot be written ({e.strerror}): "
                        "set GLASSGPT_CACHE to a folder that can") from None


@contextmanager
def locked(path: Path, say: Callable[[str], None], waiting: str) -> Iterator[None]:
    """Hold the lock at `path`; while another process has it, wait, after saying `waiting`.

    Raises:
        UserError: the lock cannot be taken: it is a link, or belongs to someone else.
    """
    lock = FileLock(path)
    try:
        try:
            held = lock.acquire(timeout=1)
        except Timeout:
            say(waiting)
            held = lock.acquire()
    except OSError as e:
        raise UserError(f"the lock {path} cannot be taken ({e.strerror}): remove it, or set "
                        "GLASSGPT_CACHE to a folder of your own") from None
    with held:
        yield
