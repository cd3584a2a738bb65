"""Several ranks of one run, as any launcher starts them, each a fork of this process, over gloo."""

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch.distributed.fsdp  # noqa: F401  each rank would import it
from omegaconf import OmegaConf
from processes import Process, rows
from safetensors.numpy import load_file

import cli
import training.wandb_record  # noqa: F401  too
from common.terminal import exit_on_error
from config import Config
from distributed.world import join
from interop import read_starting_model
from train import run
from training.world import World


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def train_in_fork(argv: Sequence[str]) -> None:
    """Be train.py with these settings, by their full names, without Hydra, which takes as long as
    such a run."""
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    given = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist(list(argv)))
    job = cli.Job(OmegaConf.to_object(given), list(argv))
    with exit_on_error():
        run(cli.configure(job, read_starting_model))


class Ranks:
    """Training with these settings on so many ranks in a folder, by `train_in_fork`, or by
    train.py itself; fault(rank) is called in each at first."""

    def __init__(
        self,
        folder: Path,
        size: int,
        *argv: str,
        script: bool = False,
        fault: Callable[[int], None] = lambda rank: None,
    ):
        port, self.processes = free_port(), []

        for rank in range(size):
            own = folder / f"rank{rank}"
            own.mkdir(exist_ok=True)

            def begin(rank=rank):
                os.chdir(folder)
                os.environ.update(environment(rank, size, port) if size > 1 else {})
                fault(rank)
                if not script:
                    train_in_fork(argv)
                    sys.exit()

            self.processes.append(Process(own, *argv, fault=begin))

    def wait(self, timeout: float = 120) -> list[int]:
        """The exit status of each."""
        return [process.wait(timeout) for process in self.processes]

    def output(self) -> str:
        return "\n".join(process.output() for process in self.processes)


def trained(folder: Path, size: int, *argv: str, **more) -> str:
    """Train to the end, and give what was said."""
    ranks = Ranks(folder, size, *argv, **more)
    assert ranks.wait() == [0] * size, ranks.output()
    return ranks.output()


def in_ranks(folder: Path, size: int, work: Callable[[World], object]) -> list:
    """What work(world), which JSON can hold, returns in each of so many ranks."""
    port, pids = free_port(), []
    for rank in range(size):
        pids.append(os.fork())
        if pids[-1] == 0:
            status = 1
            try:
                os.environ.update(environment(rank, size, port))
                with join(alone=False) as world:
                    (folder / f"result{rank}").write_text(json.dumps(work(world)))
                status = 0
            finally:
                os._exit(status)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert statuses == [0] * size
    return [json.loads((folder / f"result{rank}").read_text()) for rank in range(size)]


def odd(text_file: Path, *more: str) -> list[str]:
    """A run of 20 steps, without dropout, of a model whose sizes no number of ranks divides."""
    return [
        "run_dir=run",
        "data.source=text",
        f"data.path={text_file}",
        "tokenizer.name=char",
        "device=cpu",
        "precision=fp32",
        "compile=false",
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_kv_head=1",
        "model.n_embd=35",
        "model.head_dim=10",
        "model.mlp_hidden=51",
        "model.block_size=32",
        "batch_size=16",
        "max_steps=20",
        "optim.warmup_share=0",
        "log.every=1",
        "eval.every=5",
        "checkpoint.every=5",
        "attention.every=0",
        "attention.tokens=16",
        *more,
    ]


def assert_same_steps(one: Path, other: Path, steps: int = 20):
    """The losses of every step are within 1e-5, the checkpoints' tensors equal but for rounding."""
    a, b = rows(one), rows(other)
    assert [row["step"] for row in a] == [row["step"] for row in b] == list(range(steps + 1))
    for key, near in (("train/loss", 1e-5), ("val/loss", 1e-5), ("train/grad_norm", 1e-4)):
        mine, its = ({row["step"]: row[key] for row in run if key in row} for run in (a, b))
        assert mine.keys() == its.keys()
        assert max(abs(mine[step] - its[step]) for step in mine) < near
    heads = [key for key in a[-1] if key.startswith("heads/")]
    assert {key[6:16] for key in heads} > {"importance", "induction/"}
    assert np.allclose(*([row[key] for key in heads] for row in (a[-1], b[-1])), atol=2e-3)
    folders = [run / "checkpoints" / f"step_{steps:08d}" for run in (one, other)]
    assert len({tuple(sorted(path.name for path in folder.iterdir())) for folder in folders}) == 1
    for name in ("model.safetensors", "optimizer.safetensors"):
        x, y = (load_file(folder / name) for folder in folders)
        assert list(x) == list(y) and all(x[k].dtype == y[k].dtype for k in x)
        assert all(np.allclose(x[k], y[k], rtol=1e-3, atol=1e-4) for k in x)
