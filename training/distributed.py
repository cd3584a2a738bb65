"""Several processes that train one run, as torchrun started them.

Every rank runs the same train.py, with its slice of each batch and its rows of every tensor
(sharding.py). Rank 0 writes and prints, and tells the others what it read or decided.
"""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cli.command import explained
from config import Config, UserError
from training.runtime import Stopped, StopSignal

# Rank 0 may draw or save for long. A process that died is noticed at once all the same, by its
# closed connection.
TIMEOUT = timedelta(days=1)
ROLL_CALL = 1.0  # seconds in which the ranks that are left report
CONNECTION_LOST = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


def join(alone: bool) -> "World":
    """The ranks that torchrun started; this process by itself where it did not, or if `alone`."""
    if alone or "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return World()
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # It outlives a restart, and with it the addresses of processes that are gone.
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, store)


def check(config: Config, size: int) -> None:
    """Raise `UserError` where the configuration does not go with so many processes."""
    parts = config.accumulate * size
    if config.batch_size % parts:
        raise UserError(f"batch_size={config.batch_size} cannot be divided among {size} processes "
                        f"with accumulate={config.accumulate}: make it a multiple of {parts}")
    if config.shard != "auto" and size % config.shard:
        raise UserError(f"shard={config.shard} does not divide the {size} processes: "
                        "take a divisor, or shard=auto")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if size > 1 and restarts != "0" and not (config.run_dir and config.resume == "auto"):
        raise UserError(f"torchrun's --max-restarts={restarts} goes on from a checkpoint "
                        "with run_dir=PATH resume=auto only: add them")


class World:
    """The ranks of a run, of which this is `rank` of `size`; alone, every method is at once done.

    Used as a context manager. A process of several ends with it, whatever comes after it in the
    program: threads of the group that outlive it can crash Python as it ends.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None):
        self.rank, self.size, self.stop, self.save_asked = rank, size, StopSignal(), False
        self._store, self._noted = store, None

    def __enter__(self):
        if self.size > 1:
            self.stop.__enter__()  # torchrun signals the ranks left, which first say who is gone
        return self

    def __exit__(self, kind, error, _):
        if self.size == 1:
            return
        if kind is None or kind is SystemExit:
            dist.barrier()
            leave(error.code or 0 if error else 0)
        if isinstance(error, RuntimeError) and CONNECTION_LOST.search(str(error)):
            self._say_who_is_gone(str(error))
        else:
            why = explained(error)
            reason = why or str(error) or kind.__name__
            self._store.set(f"ended/{self.rank}", reason.split("\n")[0])
            if why is None:
                traceback.print_exception(error)
            elif self.rank == 0:
                print(f"error: {why}", file=sys.stderr)
        leave(1)

    def _say_who_is_gone(self, error: str) -> None:
        """Print which ranks have ended, and why if they wrote that: those left report here."""
        left, reasons = {self.rank}, {}
        try:
            self._store.set(f"left/{self.rank}", "")
            time.sleep(ROLL_CALL)
            ranks = range(self.size)
            left = {rank for rank in ranks if self._store.check([f"left/{rank}"])}
            reasons = {rank: self._store.get(f"ended/{rank}").decode() for rank in ranks
                       if self._store.check([f"ended/{rank}"])}
            gone = reasons.keys() or set(ranks) - left
        except RuntimeError:  # what kept the store has ended
            gone = {0}
        if 0 in reasons or self.rank != min(left):  # it has said so, or another one says it
            return
        who = " or ".join(map(str, sorted(gone)))
        who = f"process {who} of {self.size}" if who else f"the connection to another ({error})"
        why = f" ({'; '.join(reasons.values())})" if reasons else ""
        print(f"error: {who} has ended{why}, and the run with it; the checkpoints are as they were:"
              " go on from the last one with resume=true; torchrun's report says more",
              file=sys.stderr)

    # What rank 0 knows, and what all agree on.

    def tell(self, value=None):
        """Rank 0's value, which JSON can hold, on every rank."""
        if self.size == 1:
            return value
        data = json.dumps(value if self.rank == 0 else None).encode()
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0)
        if self.rank:
            data = bytes(int(length))
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        return json.loads(buffer.numpy().tobytes())

    def first(self, work: Callable, *args):
        """What work(*args) returns, on rank 0; the others wait for it, and get None.

        Raises:
            Stopped: on every rank, where it did on rank 0.
        """
        result, status = None, 0
        if self.rank == 0:
            try:
                result = work(*args)
            except Stopped as stopped:
                status = stopped.exit_status
        if status := self.tell(status):
            raise Stopped(status)
        return result

    def sum(self, values: Tensor) -> Tensor:
        """The values summed over the ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def check(self) -> None:
        """Raise `Stopped` where a signal asked any rank to end; note where one asked to save.

        Of several ranks all do so in the same call: the one after that in which they tell each
        other, so that nobody waits for the answer.
        """
        status, save = self.stop.exit_status or 0, self.stop.save_asked
        self.stop.save_asked = False
        if self.size > 1:
            now = torch.tensor([status, save])
            work = dist.all_reduce(now, dist.ReduceOp.MAX, async_op=True)
            before, self._noted = self._noted, (work, now)
            status = save = 0
            if before:
                before[0].wait()
                status, save = before[1].tolist()
        self.save_asked |= bool(save)
        if status:
            raise Stopped(status)


def leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
