"""Handle panics of the tokenizer libraries, which are written in Rust."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STDERR = 2  # file descriptor to which panics are reported


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic, which is not an `Exception`."""
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise panics as ValueError, and hide the report that they print to stderr.

    Only for short calls, because everything else that is written to stderr is hidden too.
    """
    stderr = None
    with suppress(OSError):  # it may be closed
        stderr = os.dup(STDERR)
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), STDERR)
    try:
        yield
    except BaseException as e:
        if not is_panic(e):
            raise
        raise ValueError(f"its library fails with: {e}") from None
    finally:
        if stderr is not None:
            os.dup2(stderr, STDERR)
            os.close(stderr)
