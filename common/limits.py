"""Read how much memory and how many processors Linux lets this process use, as in a container."""

from collections.abc import Iterator
from math import inf
from pathlib import Path

from common.wait_policy import processors

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> float:
    """Return the bytes of memory beyond which the process is killed; inf without a limit."""
    texts = (_read_if_there(folder / "memory.max") for folder in _control_groups(root))
    return min((int(text) for text in texts if text.isdecimal()), default=inf)


def processor_limit(root: Path = ROOT) -> float:
    """Return the seconds of processor time per second that a quota allows; inf without one."""
    limit = inf
    for folder in _control_groups(root):
        quota, _, period = _read_if_there(folder / "cpu.max").partition(" ")
        if quota.isdecimal():
            limit = min(limit, int(quota) / int(period))
    return limit


def count_processors() -> int:
    """Return the number of processors that this process may keep busy, at least 1."""
    return max(1, int(min(len(processors()), processor_limit())))


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups (version 2) that can limit this process.

    A container may see its own group as the topmost one.
    """
    _, found, group = _read_if_there(root / "proc/self/cgroup").rpartition("0::")  # the last line
    folder = root / "sys/fs/cgroup"
    for part in Path(group).parts if found else ():  # the first one is "/"
        folder = folder / part.strip("/")
        yield folder


def _read_if_there(file: Path) -> str:
    """Return the content of a file, "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
