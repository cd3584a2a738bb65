"""Choose how torch's threads wait for each other, before torch is imported.

OpenMP's threads spin while they wait, which is fast on a quiet machine. Beside other programs they
occupy the processors that the other threads of the same step need, and small steps take ten times
as long. Threads that sleep instead cost a quiet machine as much as the step itself. Neither choice
changes a bit of a result; docs/troubleshooting.md has the figures.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

# A user who has set one of these has chosen.
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
# Rounds that GNU's OpenMP spins before a thread sleeps, by default 300,000. Fewer than 1,500 cost a
# tenth of a step on a quiet machine, and more help less once other programs compute (LOG.md).
SPIN_COUNT = 1500
# Share of the processors in use by others from which on threads that sleep are faster (LOG.md).
BUSY_SHARE = 0.2
# Position of the idle and waiting times in a line of /proc/stat, after the processor's name.
IDLE, IO_WAIT = 3, 4


class Usage(NamedTuple):
    """Seconds until a moment: on the clock, of idle processors, and of this process's work."""

    clock: float
    idle: float
    own: float


def processors() -> Sequence[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def read_usage(stat: Path = Path("/proc/stat")) -> Usage | None:
    """Read how much of the processors was used since the machine started; None if unknown."""
    names = {f"cpu{number}" for number in processors()}
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:  # not Linux
        return None
    ticks = sum(int(line[1 + i]) for line in lines if line[0] in names for i in (IDLE, IO_WAIT))
    own = os.times()
    return Usage(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system)


_STARTED = read_usage()  # this module is imported first


def measure_others() -> float:
    """Return the share of the processors that other programs have used since this process began."""
    now = read_usage()
    number = len(processors())
    if now is None or _STARTED is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return min(1.0, load / number)
    available = number * (now.clock - _STARTED.clock)
    used_by_others = available - (now.idle - _STARTED.idle) - (now.own - _STARTED.own)
    return min(1.0, max(0.0, used_by_others / available)) if available else 0.0


def choose_wait_policy(log: Callable[[str], None]) -> None:
    """Let waiting threads sleep if other programs compute, and spin briefly otherwise.

    `log` gets a note if they sleep. This has no effect with one processor, after torch was
    imported, or if the user has set one of `VARIABLES`.
    """
    is_chosen = any(os.environ.get(name) for name in VARIABLES)
    if is_chosen or "torch" in sys.modules or len(processors()) == 1:
        return
    share = measure_others()
    if share < BUSY_SHARE:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    log(f"note: other programs use {share:.0%} of the processors: waiting threads sleep")
