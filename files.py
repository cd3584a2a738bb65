"""Files written whole or not at all, their hashes; the rows of a run's record, read back."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import floor, inf, isfinite, log10
from pathlib import Path

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # in a run's folder
LARGEST_JSON = 100_000_000  # bytes of a JSON file that is read
TOO_LARGE = 1e300  # of a number in a row: what is reckoned from larger ones is no float any more
# What ends the names of metrics that stand beside a score of heads.
ASIDE = ("_se", "_without_first")
# Control characters → signs that show them.
SIGNS = {c: 0x2400 + c for c in range(32)} | {0x7F: 0x2421}
SIGNS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


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


def ordinary(path: Path, most: int | None = None) -> Path:
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


def read_object(path: Path) -> dict:
    """The object in a JSON file; a ValueError where there is none."""
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        value = json.loads(ordinary(path, LARGEST_JSON).read_text(encoding="utf-8"))
    except (OSError, RecursionError) as e:
        raise ValueError(getattr(e, "strerror", None) or e) from None
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    return value


def sha256_of(path: Path) -> str:
    """Hex digest of a file of any size."""
    digest = hashlib.sha256()
    with ordinary(path).open("rb") as f:
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


def read_rows(path: Path, log: Callable[[str], None] | None = None) -> list[dict]:
    """The rows of a metrics or samples file, in order; `log` is told of lines that are none."""
    lines = ordinary(path).read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = [row for line in lines if (row := parse_row(line)) is not None]
    if log and len(rows) < len(lines):
        log(f"note: {path} has {len(lines) - len(rows)} lines that are no rows, and are left out")
    return rows


def parse_row(line: bytes) -> dict | None:
    """The row in a line: an object with a step, whose values are numbers, or a text."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    numbers = [value for key, value in row.items() if key != "text" or not isinstance(value, str)]
    fine = all(
        type(value) in (int, float) and not TOO_LARGE <= abs(value) < inf for value in numbers
    )
    return row if fine else None


def best_row(rows: list[dict]) -> dict | None:
    """The row with the lowest validation loss of a trained model, the first of equals."""
    measured = [
        row
        for row in rows
        if row["step"] and isfinite(row.get("val/loss", inf)) and "val/bits_per_byte" in row
    ]
    return min(measured, key=lambda row: row["val/loss"], default=None)


def is_scored(row: dict) -> bool:
    """Whether a row is of a snapshot, with scores of heads."""
    return any(key.startswith("heads/") for key in row)


def snapshot_steps(rows: list[dict]) -> list[int]:
    """The steps of the snapshots."""
    return [row["step"] for row in rows if is_scored(row)]


def born_when(step: int, snapshots: list[int]) -> str:
    """When a head was born of which the snapshot of `step` is the first to tell, in words."""
    before = max((s for s in snapshots if s < step), default=step)
    return f"between steps {before:,} and {step:,}" if step - before > 1 else f"at step {step:,}"


def as_known(value: float, error: float | None) -> str:
    """A value and its standard error, to the digit that the error leaves: 1.39 ± 0.06."""
    digits = max(0, -floor(log10(float(f"{error:.0e}")))) if error else 2
    shown = f"{round(value, digits) + 0.0:.{digits}f}"  # no -0.00
    return f"{shown} ± {error:.{digits}f}" if error else shown


def printable(text: str, one_line: bool = False) -> str:
    """The text with signs for control characters, which a terminal would obey; tabs and line ends
    stay, except in one line, where all that has no shape is replaced."""
    if not one_line:
        return text.translate({c: sign for c, sign in SIGNS.items() if chr(c) not in "\t\n"})
    return "".join(c if c.isprintable() else "\ufffd" for c in text.translate(SIGNS))
