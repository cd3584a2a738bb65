"""Read how much memory and how many processors Linux lets this process use, as in a container."""

from collections.abc import Iterator
from math import inf
from pathlib import Path

from common.wait_policy import processors

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> float:
    """Return the bytes of memory beyond which the process is killed; inf without a limit."""
    limits = [
        int(text)
        for folder in _control_groups(root)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read_if_there(folder / name)).isdecimal()
    ]
    return min(limits, default=inf)


def processor_limit(root: Path = ROOT) -> float:
    """Return the seconds of processor time per second that a quota allows; inf without one."""
    limit = inf
    for folder in _control_groups(root):
        quota, _, period = _read_if_there(folder / "cpu.max").partition(" ")
        if not quota:  # of version 1
            quota = _read_if_there(folder / "cpu.cfs_quota_us")
            period = _read_if_there(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            limit = min(limit, int(quota) / int(period))
    return limit


def count_processors() -> int:
    """Return the number of processors that this process may keep busy, at least 1."""
    return max(1, int(min(len(processors()), processor_limit())))


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups of this process, each of which can limit it.

    In version 1 each kind of resource has groups of its own, in version 2 all share them. A
    container may see its own group as the topmost one.
    """
    for line in _read_if_there(root / "proc/self/cgroup").splitlines():
        _, resources, group = line.split(":", 2)
        for resource in resources.split(","):  # "" in version 2
            folder = root / "sys/fs/cgroup" / resource
            for part in Path(group).parts:  # the first one is "/"
                folder = folder / part.strip("/")
                yield folder


def _read_if_there(file: Path) -> str:
    """Return the content of a file, "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
