"""Several ranks of one run as torchrun starts them, each a fork of this process, over gloo."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor._utils
import torch.optim._muon  # noqa: F401
from processes import Process

from training.distributed import World, join


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0", "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class Ranks:
    """`train.py ARGV` on so many ranks in a folder; fault(rank) is called in each at first."""

    def __init__(self, folder: Path, size: int, *argv: str,
                 fault: Callable[[int], None] = lambda rank: None):
        port, self.processes = free_port(), []

        for rank in range(size):
            own = folder / f"rank{rank}"
            own.mkdir(exist_ok=True)

            def begin(rank=rank):
                os.chdir(folder)
                os.environ.update(environment(rank, size, port))
                fault(rank)

            self.processes.append(Process(own, *argv, fault=begin))

    def wait(self, timeout: float = 120) -> list[int]:
        """The exit status of each."""
        return [process.wait(timeout) for process in self.processes]

    def said(self) -> str:
        return "\n".join(process.said() for process in self.processes)


def trained(folder: Path, size: int, *argv: str, **more) -> str:
    """Train to the end, and give what was said."""
    ranks = Ranks(folder, size, *argv, **more)
    assert ranks.wait() == [0] * size, ranks.said()
    return ranks.said()


def in_ranks(folder: Path, size: int, work: Callable[[World], object]) -> list:
    """What work(world), which JSON can hold, returns in each of so many ranks."""
    port, pids = free_port(), []
    for rank in range(size):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                os.environ.update(environment(rank, size, port))
                with join(alone=False) as world:
                    result = json.dumps(work(world))
                    (folder / f"result{rank}").write_text(result)
            finally:
                os._exit(1)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert statuses == [0] * size
    return [json.loads((folder / f"result{rank}").read_text()) for rank in range(size)]
