"""The queue of jobs: the main thread computes what the threads of the server ask for."""

import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from typing import Any, NamedTuple

from glass.live.frames import encode_error, encode_frame

MAX_WAITING_JOBS = 32
MAX_WAITING_FRAMES = 8  # of a job; it pauses until the client has read some
MAX_WAIT_SECONDS = 1  # on Windows, Ctrl-C does not interrupt a wait

# A job's parts are what it yields, its answer is what it returns.
Compute = Callable[[], Generator[Any, None, Any]]


class Requests(NamedTuple):
    """The functions that answer requests, by the name of the request they answer.

    The immediate ones return the answer, and are called in threads of the server. The others yield
    parts and return the answer, and are run as jobs.
    """

    immediate: Mapping[str, Callable[[dict[str, Any]], object]]
    handlers: Mapping[str, Callable[[dict[str, Any]], Generator[Any, None, Any]]]


class Canceled(Exception):
    """The client has stopped waiting for the current job."""


class TooManyJobs(Exception):
    """`MAX_WAITING_JOBS` jobs are waiting already."""


class Job:
    """One computation, and the queue of its frames; None follows the last one."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.frames: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_FRAMES)
        self.is_canceled = False

    def cancel(self) -> None:
        """Make the job stop at its next check or frame; called by the thread that reads frames."""
        self.is_canceled = True
        while not self.frames.empty():  # `send` may be waiting for a place
            self.frames.get()

    def send(self, frame: bytes | None) -> None:
        """Add a frame to the queue, waiting until there is room; raise `Canceled` if canceled."""
        self.frames.put(frame)
        if self.is_canceled:
            raise Canceled


class Jobs:
    """Jobs that any thread submits and the main thread runs, one at a time, in order."""

    def __init__(self) -> None:
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._current: Job | None = None

    def submit(self, compute: Compute) -> Job:
        """Add a job; raise `TooManyJobs` if too many are waiting."""
        job = Job(compute)
        with self._changed:
            self._waiting = [other for other in self._waiting if not other.is_canceled]
            if len(self._waiting) >= MAX_WAITING_JOBS:
                raise TooManyJobs
            self._waiting.append(job)
            self._changed.notify()
        return job

    def run(self, seconds: float | None = None) -> None:
        """Run jobs until none has been submitted for some seconds, or forever if None."""
        while (job := self._next_job(seconds)) is not None:
            self._current = job
            _run_job(job)
            self._current = None

    def _next_job(self, seconds: float | None) -> Job | None:
        end = math.inf if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not self._waiting:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    return None
                self._changed.wait(min(remaining, MAX_WAIT_SECONDS))
            return self._waiting.pop(0)

    def check_canceled(self) -> None:
        """Raise `Canceled` if the current job is canceled; called in the main thread."""
        if self._current is not None and self._current.is_canceled:
            raise Canceled


def _run_job(job: Job) -> None:
    with suppress(Canceled):
        try:
            _send_results(job)
        except Canceled:
            raise
        except Exception as e:
            job.send(encode_error(e))
        job.send(None)


def _send_results(job: Job) -> None:
    with closing(job.compute()) as results:
        while not job.is_canceled:
            try:
                part = next(results)
            except StopIteration as end:
                job.send(encode_frame("answer", end.value))
                return
            job.send(encode_frame("part", part))
    raise Canceled
