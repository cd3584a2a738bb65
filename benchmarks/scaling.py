"""Training speed and memory of several processes, beside torch's DistributedDataParallel.

    python -m benchmarks.scaling [sizes=4x128,6x256] [processes=1,2,4] [optim=adamw,muon]
                                 [steps=20] [rounds=3] [device=auto] [precision=fp32]
                                 [json=FILE]

Every row is one start of torchrun's processes on this machine. GlassGPT takes whole steps with the
model whole in each process (shard=1) and divided among all (shard=all); DDP takes the same steps
with the bare model, the same optimizers, and clipping. In turns; of each start the median step
counts, of the rounds the median, of their ratios the mean and its error, and the most memory of a
process since before it made the model (Linux).
"""

import ctypes
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median, stdev

from rich.console import Console
from rich.table import Table

import cli
from benchmarks import ROOT, chosen, options, write_json

# Layers, heads, width, context, sequences a step, vocabulary.
SIZES = {
    "4x128": (4, 4, 128, 64, 16, 65),
    "6x256": (6, 4, 256, 128, 16, 512),
    "6x384": (6, 6, 384, 256, 16, 65),
    "12x768": (12, 12, 768, 1024, 8, 50257),
}
KINDS = {"DDP": 1, "shard=1": 1, "shard=all": 0}  # 0: all
NAMES = {"DDP": "bare model", "shard=1": "ours"}  # of one process


def make_config(size: str, optim: str, precision: str, shard: int, device: str):
    from config import Config, GPTConfig, OptimConfig
    from training.device import pick_precision

    n_layer, n_head, n_embd, block_size, batch_size, vocab_size = SIZES[size]
    return Config(
        device=device,
        precision=pick_precision(precision, device),
        compile=False,
        batch_size=batch_size,
        shard=shard,
        model=GPTConfig(
            vocab_size, block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd
        ),
        optim=OptimConfig(name=optim, schedule="constant", warmup_steps=0),
    )


def make_step(kind: str, config, world, x, y):
    """What takes a step: the loop of train.py, with DDP the bare model and torch's clipping."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    from model import GPT, autocast
    from training.optimizers import build_optimizers, clip_gradients
    from training.processes import average_gradients, shard_model

    model, mesh = GPT(config.model).to(config.device), None
    if kind == "DDP":
        forward = DistributedDataParallel(model) if world.size > 1 else model
    else:
        forward, mesh = shard_model(model, config, world.size)
    optimizers = build_optimizers(model, config.optim, config.precision, mesh)

    def step() -> None:
        with autocast(config.device, config.precision):
            loss = forward(x.to(config.device), y.to(config.device))[1]
        loss.backward()
        if kind == "DDP":
            clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        else:
            if config.shard == 1:
                average_gradients(model, world)
            clip_gradients(model, config.optim.grad_clip, world, config.shard)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure(
    size: str, optim: str, precision: str, kind: str, device: str, steps: str, out: str
) -> None:
    """In each process: take steps, and leave their median and the memory in a file of its rank."""
    import torch

    from training.device import pick_device, synchronize
    from training.processes import join

    torch.set_num_threads(1)
    with join(alone=False) as world:
        device = pick_device(device, world.size)
        config = make_config(size, optim, precision, KINDS[kind] or world.size, device)
        torch.manual_seed(0)
        shape = config.batch_size // world.size, config.model.block_size + 1
        tokens, before = torch.randint(config.model.vocab_size, shape), from_now_on()
        step = make_step(kind, config, world, tokens[:, :-1], tokens[:, 1:])
        times = []
        for _ in range(int(steps) + 2):  # the first ones warm up
            synchronize(device)
            began = time.perf_counter()
            step()
            synchronize(device)
            times.append(time.perf_counter() - began)
        if device == "cuda":
            memory = torch.cuda.max_memory_allocated()
        else:
            memory = status("VmHWM") - before
        figures = {"seconds": median(times[2:]), "memory": memory}
        Path(out, str(world.rank)).write_text(json.dumps(figures))


def status(key: str) -> int:
    """Bytes of memory of this process: VmRSS now, VmHWM at most."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def from_now_on() -> int:
    """Bytes that this process has, with what the steps import; VmHWM counts anew, and without what
    is freed."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: larger pieces are given back
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def started(processes: int, *argv: str) -> dict:
    """The figures of so many processes: the slowest one's time, the largest one's memory."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={processes}",
                "-m",
                "benchmarks.scaling",
                "measure",
                *argv,
                out,
            ],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        ranks = [json.loads(path.read_text()) for path in Path(out).iterdir()]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def main(argv: list[str]) -> dict:
    if argv[:1] == ["measure"]:
        return measure(*argv[1:])
    given = options(
        argv,
        __doc__,
        sizes="4x128,6x256",
        processes="1,2,4",
        optim="adamw,muon",
        steps=20,
        rounds=3,
        device="auto",
        precision="fp32",
    )
    console, result = Console(), {}
    for size in chosen(given["sizes"], SIZES):
        _, _, _, block_size, batch_size, _ = SIZES[size]
        for optim in given["optim"].split(","):
            table = Table(
                title=f"{size}, {optim}, {given['precision']}, "
                f"{batch_size} × {block_size} tokens a step"
            )
            for column in ("processes", "", "tok/s", "of DDP", "memory"):
                table.add_column(column, justify="right")
            for processes in map(int, given["processes"].split(",")):
                kinds = KINDS if processes > 1 else ("DDP", "shard=1")
                rounds = [
                    {
                        kind: started(
                            processes,
                            size,
                            optim,
                            given["precision"],
                            kind,
                            given["device"],
                            str(given["steps"]),
                        )
                        for kind in kinds
                    }
                    for _ in range(given["rounds"])
                ]
                for kind in kinds:
                    seconds = median(of[kind]["seconds"] for of in rounds)
                    ratios = [of["DDP"]["seconds"] / of[kind]["seconds"] for of in rounds]
                    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
                    memory = max(of[kind]["memory"] for of in rounds)
                    result[f"{size} {optim} {processes} {kind}"] = {
                        "seconds": seconds,
                        "of_ddp": mean(ratios),
                        "error": error,
                        "memory": memory,
                    }
                    table.add_row(
                        str(processes),
                        kind if processes > 1 else NAMES[kind],
                        f"{batch_size * block_size / seconds:,.0f}",
                        f"{mean(ratios):.2f} ± {error:.2f}",
                        f"{memory / 2**20:,.0f} MB",
                    )
            console.print(table)
    write_json(given["json"], result)
    return result


if __name__ == "__main__":
    cli.start(lambda: main(sys.argv[1:]), lambda: __doc__)
