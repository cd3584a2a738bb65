"""The processes of a run: one, or several that torchrun started.

Every rank runs the same train.py on its slice of each batch. Rank 0 writes and prints.
"""

import os
import platform
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cli import explain_error, first_line, print_stderr
from common.errors import SharedError
from common.signals import STOP_SIGNALS, set_handlers
from common.torchrun import count_processes

# All ranks do the same amount of work in a training step, so one that is late by minutes hangs.
STEP_TIMEOUT = timedelta(minutes=10)
# Other ranks wait this long for rank 0, which may draw or save for hours. A process that dies is
# noticed at once nevertheless, because its connection closes.
RANK_0_TIMEOUT = timedelta(days=1)
SECONDS_BETWEEN_CHECKS = 1.0  # of stop signals; torchrun waits 30 s after it has sent one
# Messages of gloo, which raises no error types of its own
TIMED_OUT = re.compile("timed out|pair closure", re.IGNORECASE)
CONNECTION_LOST = re.compile(
    "connection (closed|reset|refused)|broken pipe|connectFullMesh", re.IGNORECASE
)


class Stopped(BaseException):
    """A signal asked the run to stop. Like `KeyboardInterrupt`, it is not an `Exception`.

    Attributes:
        exit_status: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self, exit_status: int) -> None:
        self.exit_status = exit_status


class World:
    """The ranks of a run and the stop signals that they received.

    As a context manager it notes SIGINT and SIGTERM for `check_stop`. A second Ctrl-C ends the
    process at once. After the last check, a signal ends a single process when the block is left;
    several processes ignore it.

    Args:
        rank: Number of this process.
        size: Number of processes.
        waiting_group: Process group on the CPU, with a long timeout, in which ranks wait for rank 0
            while it works alone; None for one process.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, waiting_group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._waiting_group = waiting_group
        self._exit_status = 0
        self._is_interruptible = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._steps_between_checks = 1  # equal on all ranks
        self._steps_since_check = 0
        self._last_check = time.monotonic()

    def __enter__(self) -> "World":
        self._handlers = set_handlers(dict.fromkeys(STOP_SIGNALS, self._note_signal))
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        # torchrun sends signals to processes that are still ending.
        is_ignored = self._exit_status and self.size > 1
        set_handlers(dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN) if is_ignored else self._handlers)
        if self._exit_status and exception_type is None and self.size == 1:
            raise SystemExit(self._exit_status)  # so that a sweep starts no more jobs

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._exit_status = 128 + number
        set_handlers({signal.SIGINT: self._handlers[signal.SIGINT]})
        if self._is_interruptible:
            raise Stopped(self._exit_status)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal end the block early; call `check_stop` after it.

        The block must contain nothing that other ranks wait for, and only work that can be redone.
        """
        self._is_interruptible = True
        try:
            yield
        except Stopped:
            pass  # `check_stop` raises it on all ranks together
        finally:
            self._is_interruptible = False

    def check_stop(self) -> None:
        """Raise `Stopped` on all ranks if any of them got a signal; all ranks call this.

        They wait here for rank 0, however long it has worked alone.
        """
        if self.size > 1:
            # The largest exit status, and the fewest steps per second
            message = torch.tensor([self._exit_status, -self._steps_until_next_check()])
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self._waiting_group)
            self._exit_status, self._steps_between_checks = int(message[0]), -int(message[1])
            self._steps_since_check, self._last_check = 0, time.monotonic()
        if self._exit_status:
            raise Stopped(self._exit_status)

    def check_stop_after_step(self) -> None:
        """Call `check_stop` after every step; several ranks do so about once a second.

        All ranks call it together, after steps in which rank 0 did nothing long alone.
        """
        self._steps_since_check += 1
        if self.size == 1 or self._steps_since_check >= self._steps_between_checks:
            self.check_stop()

    def _steps_until_next_check(self) -> int:
        """Return how many steps this rank takes in the time between two checks."""
        seconds = time.monotonic() - self._last_check
        return max(1, int(SECONDS_BETWEEN_CHECKS * self._steps_since_check / seconds))

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self._waiting_group, device=torch.device("cpu"))
        return box[0]

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """Raise an error of any rank on all ranks, with the name of its machine.

        All ranks enter the block together and wait for each other at its end. It must contain
        nothing else that other ranks wait for.

        Raises:
            SharedError: If a rank met an error that the user can fix.
        """
        if self.size == 1:
            yield
            return
        sentence = None
        try:
            yield
        except Exception as e:
            sentence = explain_error(e)
            if sentence is None:  # a bug, whose traceback this rank prints
                raise
            if self.rank > 0:
                sentence = f"{_rank_name(self.rank)}: {sentence}"
        sentences: list[str | None] = [None] * self.size
        dist.all_gather_object(sentences, sentence, group=self._waiting_group)
        for first_sentence in filter(None, sentences):
            raise SharedError(first_sentence)

    def wait(self) -> None:
        """Wait until all ranks are here, however long rank 0 has worked alone."""
        if self.size > 1:
            dist.barrier(group=self._waiting_group)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


@contextmanager
def join(alone: bool) -> Iterator[World]:
    """Join the ranks that torchrun started, unless the run is to have one process.

    An error that only this rank has met is printed, because only rank 0 prints at the end.

    Raises:
        SharedError: If the connection to another rank is lost.
    """
    if count_processes(alone) == 1:
        yield World()
        return
    store, rank, size = next(dist.rendezvous("env://", timeout=RANK_0_TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The store outlives a restart, and would return addresses of processes that are gone.
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    if rank == 0:  # which has read the configuration, and perhaps downloaded a model
        store.set("rank_0_is_ready", "")
    store.wait(["rank_0_is_ready"], RANK_0_TIMEOUT)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT)
    try:
        world = World(rank, size, dist.new_group(backend="gloo", timeout=RANK_0_TIMEOUT))
        yield world
        world.wait()
    except Exception as e:
        problem = _explain_lost_connection(e)
        if problem is None:
            _print_own_error(e, rank)
            raise
        raise SharedError(
            f"{problem}, so this process of the run ends too ({first_line(e)[:200]}); see "
            "torchrun's report for the reason, then continue from the last checkpoint with "
            "resume=true."
        ) from e
    finally:
        dist.destroy_process_group()


def _explain_lost_connection(error: Exception) -> str | None:
    """Return what an error says of another process of the run; None for an error of this one."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return None
    if TIMED_OUT.search(str(error)):
        return "another process of the run does not answer"
    if isinstance(error, dist.DistError) or CONNECTION_LOST.search(str(error)):
        return "another process of the run has ended"
    return None


def _print_own_error(error: Exception, rank: int) -> None:
    """Print an error of another rank than rank 0, which prints its own at the end."""
    sentence = explain_error(error)
    if rank > 0 and sentence and not isinstance(error, SharedError):
        print_stderr(f"error: {_rank_name(rank)}: {sentence}")


def _rank_name(rank: int) -> str:
    return f"process {rank} on {platform.node()}"
