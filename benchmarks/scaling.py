"""Training speed and memory of several processes, beside torch's DistributedDataParallel (DDP).

    python -m benchmarks.scaling [sizes=4x128,6x256] [processes=1,2,4] [optim=adamw,muon]
                                 [steps=20] [rounds=3] [device=auto] [precision=fp32]

Every row starts torchrun's processes on this machine. GlassGPT takes the steps of train.py with a
complete model in each process (shard=1) or with a model sharded over all (shard=all). DDP takes
the same steps with the bare model, the same optimizers and torch's clipping. They run in turns.

The median step of a start and the median of the rounds count. The ratio to DDP is the mean of the
rounds, with its standard error. Memory is the maximum over the processes of what a process
allocates from building the model on (Linux).
"""

import ctypes
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    BYTES_PER_MB,
    ROOT,
    WARM_UP_STEPS,
    TrainingShape,
    read_options,
    run_command,
    select,
)
from benchmarks.train_step import make_train_step
from config import OptimConfig, ResolvedConfig

if TYPE_CHECKING:
    import numpy as np

    from training.world import World


SCALING_SHAPES = {
    "4x128": TrainingShape(4, 4, 128, 64, 16, 65),
    "6x256": TrainingShape(6, 4, 256, 128, 16, 512),
    "6x384": TrainingShape(6, 6, 384, 256, 16, 65),
    "12x768": TrainingShape(12, 12, 768, 1024, 8, 50257),
}
DDP = "DDP"
METHODS = (DDP, "shard=1", "shard=all")
SINGLE_PROCESS_NAMES = {DDP: "bare model", "shard=1": "GlassGPT"}
M_MMAP_THRESHOLD = -3  # parameter of mallopt
RETURNED_BYTES = 1 << 16  # allocations from this size on are returned to the system when freed
RESET_PEAK_MEMORY = "5"  # written to /proc/self/clear_refs


@dataclass
class ScalingOptions:
    """Options of this benchmark."""

    sizes: str = "4x128,6x256"
    processes: str = "1,2,4"
    optim: str = "adamw,muon"
    steps: int = 20
    rounds: int = 3
    device: str = "auto"
    precision: str = "fp32"


class Case(NamedTuple):
    """One configuration to measure, for which the processes are started once."""

    size: str
    optim: str
    precision: str
    method: str
    device: str
    steps: int


class ProcessMeasurement(NamedTuple):
    """The median step of one process, or of the slowest one, and the memory."""

    seconds: float
    memory: int  # bytes


class ScalingRow(NamedTuple):
    """The rounds of one method."""

    seconds: float
    of_ddp: float  # speed as a share of DDP's
    error: float | None  # standard error of that; None for one round
    memory: int  # bytes


def make_config(case: Case, device: str, processes: int) -> ResolvedConfig:
    """Return the configuration of a case, resolved for this machine."""
    from training.device import pick_precision

    shape = SCALING_SHAPES[case.size]
    return ResolvedConfig(
        device=device,
        precision=pick_precision(case.precision, device),
        compile=False,
        batch_size=shape.batch_size,
        shard=processes if case.method == "shard=all" else 1,
        model=shape.model_config(),
        optim=OptimConfig(name=case.optim, schedule="constant", warmup_share=0),
    )


def make_step(
    method: str, config: ResolvedConfig, world: "World", inputs: "np.ndarray", targets: "np.ndarray"
) -> Callable[[], object]:
    """Return a function that takes a training step of GlassGPT or of DDP.

    `inputs` are token ids of this process, (batch_size / processes, T), `targets` the next ones.
    """
    if method == DDP:
        return make_ddp_step(config, world, inputs, targets)
    _, take_step = make_train_step(config, world)
    return lambda: take_step(0, (inputs, targets))


def make_ddp_step(
    config: ResolvedConfig, world: "World", inputs: "np.ndarray", targets: "np.ndarray"
) -> Callable[[], object]:
    """Return a function that takes a training step with DDP; see `make_step`."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    from kernels import autocast
    from model import GPT
    from train import micro_batches
    from training.optimizers import build_optimizers

    model = GPT(config.model).to(config.device)
    forward = DistributedDataParallel(model) if world.size > 1 else model
    optimizers = build_optimizers(model, config.optim, config.precision)

    def step() -> None:
        for x, y in micro_batches((inputs, targets), config, world):
            with autocast(config.device, config.precision):
                _, loss = forward(x, y)
            loss.backward()
        clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure_in_process(case: Case, folder: Path) -> None:
    """Take steps in one of torchrun's processes, and write the measurement to a folder."""
    import torch

    from distributed.world import join
    from training.device import pick_device, synchronize

    torch.set_num_threads(1)
    with join(alone=False) as world:
        device = pick_device(case.device, world.size)
        config = make_config(case, device, world.size)
        torch.manual_seed(0)
        shape = config.batch_size // world.size, config.model.block_size + 1
        tokens = torch.randint(config.model.vocab_size, shape).numpy()
        memory_before = reset_peak_memory()
        step = make_step(case.method, config, world, tokens[:, :-1], tokens[:, 1:])
        times = []
        for _ in range(WARM_UP_STEPS + case.steps):
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            times.append(time.perf_counter() - start)
        if device == "cuda":
            memory = torch.cuda.max_memory_allocated()
        else:
            memory = read_memory_status("VmHWM") - memory_before
        measurement = ProcessMeasurement(median(times[WARM_UP_STEPS:]), memory)
        (folder / str(world.rank)).write_text(json.dumps(measurement))


def read_memory_status(key: str) -> int:
    """Return bytes of memory of this process: VmRSS now, or VmHWM at most."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{key}:\s+(\d+)", text)
    assert match, f"{key} is not in /proc/self/status"
    return 1024 * int(match[1])


def reset_peak_memory() -> int:
    """Start counting VmHWM anew, and return the bytes of memory that this process has now.

    What the steps import is imported before.
    """
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    import train  # noqa: F401

    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)
    Path("/proc/self/clear_refs").write_text(RESET_PEAK_MEMORY)
    return read_memory_status("VmRSS")


def start_processes(processes: int, case: Case) -> ProcessMeasurement:
    """Measure a case with several processes: the slowest time and the largest memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            "-m",
            "benchmarks.scaling",
            "measure",
            json.dumps(case),
            folder,
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        measurements = [
            ProcessMeasurement(*json.loads(path.read_text())) for path in Path(folder).iterdir()
        ]
    slowest = max(measurement.seconds for measurement in measurements)
    return ProcessMeasurement(slowest, max(measurement.memory for measurement in measurements))


def main(argv: list[str]) -> None:
    """Measure all methods and print tables."""
    options = read_options(argv, ScalingOptions)
    console = Console()
    for size in select("sizes", options.sizes, SCALING_SHAPES):
        for optim in options.optim.split(","):
            table = make_table(size, optim, options.precision)
            for processes in map(int, options.processes.split(",")):
                add_rows(table, size, processes, compare_methods(size, optim, processes, options))
            console.print(table)


def compare_methods(
    size: str, optim: str, processes: int, options: ScalingOptions
) -> dict[str, ScalingRow]:
    """Run all methods in turns, and reduce the rounds of each to a row."""
    methods = METHODS if processes > 1 else tuple(SINGLE_PROCESS_NAMES)
    rounds = []
    for _ in range(options.rounds):
        measurements = {}
        for method in methods:
            case = Case(size, optim, options.precision, method, options.device, options.steps)
            measurements[method] = start_processes(processes, case)
        rounds.append(measurements)
    return {method: summarize(method, rounds) for method in methods}


def summarize(method: str, rounds: list[dict[str, ProcessMeasurement]]) -> ScalingRow:
    """Reduce the rounds of a method to one row."""
    ratios = [round[DDP].seconds / round[method].seconds for round in rounds]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return ScalingRow(
        seconds=median(round[method].seconds for round in rounds),
        of_ddp=mean(ratios),
        error=error,
        memory=max(round[method].memory for round in rounds),
    )


def make_table(size: str, optim: str, precision: str) -> Table:
    """Return an empty table for one size and optimizer."""
    shape = SCALING_SHAPES[size]
    table = Table(
        title=f"{size}, {optim}, {precision}, {shape.batch_size} × {shape.block_size} tokens per "
        "step"
    )
    for column in ("processes", "", "tok/s", "of DDP", "memory"):
        table.add_column(column, justify="right")
    return table


def add_rows(table: Table, size: str, processes: int, rows: dict[str, ScalingRow]) -> None:
    """Show the methods at one number of processes."""
    shape = SCALING_SHAPES[size]
    for method, row in rows.items():
        table.add_row(
            str(processes),
            method if processes > 1 else SINGLE_PROCESS_NAMES[method],
            f"{shape.tokens_per_step / row.seconds:,.0f}",
            f"{row.of_ddp:.2f}" if row.error is None else f"{row.of_ddp:.2f} ± {row.error:.2f}",
            f"{row.memory / BYTES_PER_MB:,.0f} MB",
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:  # one of the processes that `start_processes` starts
        measure_in_process(Case(*json.loads(sys.argv[2])), Path(sys.argv[3]))
    else:
        run_command(main, __doc__)
