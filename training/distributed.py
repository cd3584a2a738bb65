"""Several processes that train one run, as torchrun started them.

The first decides, records and gives the orders; the others follow. Each holds the whole model and
takes its slice of every batch. Each parameter has one process that sums its gradients, keeps its
optimizer's state, updates it and broadcasts it (ZeRO-1, Rajbhandari et al. 2020, by whole
parameters), so that Muon orthogonalises each matrix once. An order is one small sum over the
processes, which also brings the first the signals that came to others.
"""

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from config import Config, UserError
from training.runtime import StopSignal, resolve_device

ORDERS = ("end", "start", "load", "compile", "step", "evaluate", "total", "gather")
# The first may draw or save for long. A process that died is noticed at once all the same, by its
# closed connection.
TIMEOUT = timedelta(days=1)
ROLL_CALL = 2.0  # seconds in which the processes that are left report


class Lost(UserError):
    """Another process of the run has ended, and the run with it."""

    already_printed = False  # by another process


def join(config: Config | None = None) -> "Team":
    """The processes that torchrun started; this one alone where it did not, or `config` says so.

    Raises:
        UserError: the configuration does not go with so many processes.
    """
    size = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if size == 1 or (config and config.distributed == "none"):
        return Team()
    if config:
        check(config, size)
    # The first step of an optimizer would import this, and it would hold the process group of that
    # moment: the group's threads would outlive `destroy_process_group`, and now and then crash the
    # process as it ends (torch 2.13).
    import torch._dynamo

    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store = meeting(store, rank, size)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return Team(rank, size, store)


def check(config: Config, size: int) -> None:
    """Raise `UserError` where the configuration does not go with so many processes."""
    if config.batch_size % (config.accumulate * size):
        raise UserError(f"batch_size={config.batch_size} cannot be divided among {size} processes "
                        f"with accumulate={config.accumulate}: "
                        f"make it a multiple of {config.accumulate * size}")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and not (config.run_dir and config.resume == "auto"):
        raise UserError(f"torchrun's --max-restarts={restarts} goes on from a checkpoint "
                        "with run_dir=PATH resume=auto only: add them")


def meeting(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of torchrun's store that only this start uses.

    After a restart the store still holds the addresses of processes that are gone. So each process
    asks under a name never used before, and the first answers all until everyone has come.
    """
    name = uuid4().hex
    if rank:
        store.set(f"glassgpt/ask/{rank}", name)
        own = dist.PrefixStore(store.get(f"glassgpt/answer/{name}").decode(), store)
        own.set(f"here/{rank}", "")
        return own
    own = dist.PrefixStore(f"glassgpt/{name}", store)
    for other in range(1, size):
        while not own.check([f"here/{other}"]):
            if store.check([f"glassgpt/ask/{other}"]):
                asked = store.get(f"glassgpt/ask/{other}").decode()
                store.set(f"glassgpt/answer/{asked}", f"glassgpt/{name}")
            time.sleep(0.01)
    return own


class Team:
    """The processes of a run, of which this is number `rank` of `size`.

    For one alone every method returns what it got. Used as a context manager. `stop` notes signals,
    those to other processes too.

    Raises:
        Lost: by whatever needs the others, when one of them has ended.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None):
        self.rank, self.size, self.stop = rank, size, StopSignal()
        self._store, self._parts = store, []

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if self.size == 1 or kind is Lost:
            return
        if kind in (None, SystemExit):
            if self.rank == 0:
                self.order("end", error.code if error else 0)
            dist.destroy_process_group()
        else:  # the connections close with this process, by which the others notice
            why = str(error).splitlines()[0] if str(error) else kind.__name__
            self._store.set(f"ended/{self.rank}", why)

    # Orders.

    def order(self, name: str, number: int = 0) -> None:
        """Have the other processes do something, with a number if need be; learn their signals."""
        if self.size > 1:
            self._exchange(ORDERS.index(name), number)

    def next_order(self, nats: float, predicted: int) -> tuple[str, int]:
        """Wait for the first process's order; send it the sums of an evaluation, and signals."""
        order, number, *_ = self._exchange(0, 0, nats, predicted)
        return ORDERS[int(order)], int(number)

    def total(self, nats: float, predicted: int) -> tuple[float, int]:
        """The sums of an evaluation over all processes."""
        if self.size == 1:
            return nats, predicted
        *_, nats, predicted = self._exchange(ORDERS.index("total"), 0, nats, predicted)
        return nats, int(predicted)

    def _exchange(self, order: int, number: int, nats: float = 0.0,
                  predicted: int = 0) -> list[float]:
        asked, self.stop.save_asked = self.stop.save_asked, False
        noted = [self.stop.exit_status == 130, self.stop.exit_status == 143, asked]
        sums = torch.tensor([order, number, *noted, nats, predicted], dtype=torch.float64)
        with self._notice_loss():
            dist.all_reduce(sums)
        _, _, interrupted, terminated, asked, *_ = sums.tolist()
        if self.rank == 0:
            self.stop.save_asked |= asked > 0
            if (interrupted or terminated) and self.stop.exit_status is None:
                self.stop.exit_status = 130 if interrupted else 143
        return sums.tolist()

    # What a step needs.

    def divide(self, parts: list[list[nn.Parameter]]) -> list[nn.Parameter]:
        """Keep which parameters each process updates; return this one's."""
        self._parts = parts
        return parts[self.rank]

    def reduce_gradients(self) -> None:
        """Sum each gradient over all processes, at the one that updates the parameter.

        The others drop theirs.
        """
        if self.size == 1:
            return
        flat = [torch.cat([p.grad.flatten() for p in part]) if part else None
                for part in self._parts]
        with self._notice_loss():
            for work in [dist.reduce(grads, owner, async_op=True)
                         for owner, grads in enumerate(flat) if grads is not None]:
                work.wait()
        for p in chain(*self._parts):
            p.grad = None
        mine = self._parts[self.rank]
        for p, grad in zip(mine, flat[self.rank].split([p.numel() for p in mine]) if mine else ()):
            p.grad = grad.view_as(p)

    def sum(self, values: Tensor) -> Tensor:
        """The values summed over all processes."""
        if self.size > 1:
            with self._notice_loss():
                dist.all_reduce(values)
        return values

    @torch.no_grad()
    def broadcast_weights(self, of_first: bool = False) -> None:
        """Broadcast each parameter from the process that updates it, or all from the first."""
        if self.size == 1:
            return
        flat = [torch.cat([p.flatten() for p in part]) if part else None for part in self._parts]
        with self._notice_loss():
            for work in [dist.broadcast(weights, 0 if of_first else owner, async_op=True)
                         for owner, weights in enumerate(flat) if weights is not None]:
                work.wait()
        for part, weights in zip(self._parts, flat):
            for p, weight in zip(part, weights.split([p.numel() for p in part]) if part else ()):
                p.copy_(weight.view_as(p))

    # What begins a run and what a checkpoint holds, through host memory.

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """The first process's data, in every process."""
        if self.size == 1:
            return data
        with self._notice_loss():
            length = torch.tensor([len(data)])
            dist.broadcast(length, 0)
            buffer = torch.empty(int(length), dtype=torch.uint8) if self.rank else _tensor(data)
            dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def broadcast_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The first process's tensors, in every process."""
        if self.size == 1:
            return tensors
        return tensors_from(self.broadcast_bytes(b"" if self.rank else bytes_of(tensors)))

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all processes, in the first."""
        if self.size == 1:
            return tensors
        with self._notice_loss():
            if self.rank:
                data = _tensor(bytes_of({k: t.cpu().contiguous() for k, t in tensors.items()}))
                dist.send(torch.tensor([len(data)]), 0)
                dist.send(data, 0)
                return tensors
            for source in range(1, self.size):
                length = torch.empty(1, dtype=torch.int64)
                dist.recv(length, source)
                data = torch.empty(int(length), dtype=torch.uint8)
                dist.recv(data, source)
                tensors = tensors | tensors_from(data.numpy().tobytes())
        return tensors

    # The device, and the loss of a process.

    def resolve_device(self, config: Config) -> Config:
        """As `runtime.resolve_device`, with a GPU of its machine for each process.

        Raises:
            UserError: the device asked for is not to be had here, or not by several processes.
        """
        if self.size > 1 and config.device == "auto":
            config = replace(config, device="cuda" if torch.cuda.is_available() else "cpu")
        config = resolve_device(config)
        if self.size == 1 or config.device == "cpu":
            return config
        if config.device != "cuda":
            raise UserError(f"device={config.device} is for one process, and there are "
                            f"{self.size}: use device=cuda, which gives each a GPU, or device=cpu")
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise UserError("torchrun started more processes than this machine has GPUs "
                            f"({torch.cuda.device_count()}): lower --nproc-per-node")
        torch.cuda.set_device(local)  # which "cuda" then means
        return config

    @contextmanager
    def _notice_loss(self):
        """Turn what torch raises where another process does not answer into `Lost`."""
        try:
            yield
        except RuntimeError as e:
            raise self._lost(str(e)) from None

    def _lost(self, error: str) -> Lost:
        """Find which process has ended, and why if it wrote that: those left report."""
        left, why = {self.rank}, ""
        try:
            self._store.set(f"left/{self.rank}", "")
            time.sleep(ROLL_CALL)
            left = {rank for rank in range(self.size) if self._store.check([f"left/{rank}"])}
            why = "; ".join(self._store.get(f"ended/{rank}").decode() for rank in range(self.size)
                            if self._store.check([f"ended/{rank}"]))
            gone = " or ".join(str(rank) for rank in range(self.size) if rank not in left)
        except RuntimeError:  # what kept the store has ended
            gone = "0"
        who = (f"process {gone} of {self.size}" if gone
               else f"the connection to another process ({error.splitlines()[0]})")
        reason = f" ({why})" if why else ""
        lost = Lost(f"{who} has ended{reason}, and the run with it; the checkpoints are as they "
                    "were: go on from the last one with resume=true; torchrun's report says more")
        # One process prints it: the first, or where that was killed the first of those left.
        lost.already_printed = self.rank != (0 if 0 in left or why else min(left))
        return lost


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
