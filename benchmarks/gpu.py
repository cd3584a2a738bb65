r"""Measure everything on the GPUs of one machine in at most 20 minutes, and print what is measured.

    python -m benchmarks.gpu [parts=tests,training,variants,processes,quality,decoding]
                             [device=cuda] [sizes=10M,124M,350M] [peers=compiled]
                             [variant_size=67M] [process_size=12x768] [models=10.65M,124M]
                             [experiment=shakespeare_gpu] [data.path=FILE] [max_steps=N …]

The parts are:
  tests      the tests that are marked gpu
  training   speed, share of the matrix rate and memory of training steps compared with nanoGPT's
             model and transformers (benchmarks.throughput)
  variants   what single settings change: precision, torch.compile, checkpoint_activations,
             model.vocab_multiple, cross-entropy in chunks; a profile (benchmarks.variants)
  processes  torchrun with one process and with all GPUs, replicated and sharded, compared
             with torch's DDP (benchmarks.scaling)
  quality    time to nanoGPT's published loss and to 1.44 (benchmarks.speedrun); other settings are
             passed to these runs
  decoding   benchmarks.sampling

A part that fails, or that reaches its time limit, is reported, and the others continue. Texts are
downloaded, unless data.path says where they are. To try it on a CPU:

    python -m benchmarks.gpu device=cpu sizes=4x128 peers=eager variant_size=4x128 \
        process_size=4x128 models=0.8M experiment=speedrun
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.harness import ROOT, PassThroughOptions, read_options, run_command, select
from common.errors import UserError

TEST_FILE = "tests/test_on_gpu.py"  # has all tests that are marked gpu
TARGET_LOSSES = "1.4697,1.44"  # nanoGPT's published loss, and a lower one
CPU_PROCESSES = 2  # of torchrun, where the benchmark is tried without a GPU
# Time limit of each part in seconds, of training for each size. With three sizes they add up to 20
# minutes. They are estimates: nothing has been measured on a GPU yet.
TIME_LIMITS = {
    "tests": 220,
    "training": 175,
    "variants": 230,
    "processes": 60,
    "quality": 90,
    "decoding": 75,
}


@dataclass
class GPUOptions(PassThroughOptions):
    """Options of this benchmark."""

    parts: str = ",".join(TIME_LIMITS)
    device: str = "cuda"
    sizes: str = "10M,124M,350M"
    peers: str = "compiled"
    variant_size: str = "67M"
    process_size: str = "12x768"
    models: str = "10.65M,124M"
    experiment: str = "shakespeare_gpu"


class Part(NamedTuple):
    """A command that measures one thing."""

    name: str
    time_limit: float  # seconds after which it is stopped
    arguments: list[str]  # of Python


def make_parts(options: GPUOptions, processes: int) -> list[Part]:
    """Return the parts that the options name, with training split by size."""
    numbers = ",".join(map(str, sorted({1, processes})))
    is_compiled = int(options.peers == "compiled")
    commands = {
        "tests": [f"pytest -q -n 0 -m gpu -p no:cacheprovider {TEST_FILE}"],
        "training": [
            f"benchmarks.throughput sizes={size} rounds=1 peers={options.peers} seconds=5"
            for size in options.sizes.split(",")
        ],
        "variants": [f"benchmarks.variants size={options.variant_size} compile={is_compiled}"],
        "processes": [
            f"benchmarks.scaling sizes={options.process_size} processes={numbers} steps=10 "
            "rounds=1 precision=auto"
        ],
        "quality": [
            f"benchmarks.speedrun baseline={options.experiment} runs= pairs=1 "
            f"targets={TARGET_LOSSES} eval.every=25"
        ],
        "decoding": [
            f"benchmarks.sampling sizes={options.models} rounds=1 batches=1,64 tokens=128"
        ],
    }
    parts = []
    for name, time_limit in select("parts", options.parts, TIME_LIMITS).items():
        for command in commands[name]:
            arguments = ["-m", *command.split()]
            if name != "tests":
                arguments.append(f"device={options.device}")
            if name == "quality":
                arguments += options.settings
            parts.append(Part(name, time_limit, arguments))
    return parts


def run_part(part: Part, device: str) -> str:
    """Run a part, end all of its processes at its time limit, and return what it printed."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env={**os.environ, "GLASSGPT_TEST_DEVICE": device},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(part.time_limit)
            outcome = f"FAILED with exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            outcome = f"FAILED: not finished within {part.time_limit:,.0f} s"
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return log.read() + outcome


def main(argv: list[str]) -> None:
    """Run all parts and print their output."""
    options = read_options(argv, GPUOptions)
    import torch

    from training.device import describe, pick_device

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU on this machine; run this on one with a GPU, or try it on a CPU "
            "with the options that `python -m benchmarks.gpu help` ends with"
        )
    device = pick_device(options.device)
    processes = torch.cuda.device_count() if device.startswith("cuda") else CPU_PROCESSES
    print(f"{describe(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    for part in make_parts(options, processes):
        start = time.perf_counter()
        output = run_part(part, device)
        print(f"\n## {part.name} ({time.perf_counter() - start:.0f} s)\n\n{output}", flush=True)


if __name__ == "__main__":
    run_command(main, __doc__)
