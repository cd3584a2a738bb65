r"""Measure everything on the GPUs of one machine in at most 20 minutes.

    python -m benchmarks.gpu [json=gpu.json]
                             [parts=tests,training,variants,processes,quality,decoding]
                             [device=cuda] [sizes=10M,124M,350M] [peers=compiled] [seconds=5]
                             [variant_size=67M] [process_size=12x768] [models=10.65M,124M]
                             [batches=1,64] [tokens=128] [experiment=shakespeare_gpu] [seeds=1]
                             [data.path=FILE] [max_steps=N …]

The parts are:
  tests      the tests that are marked gpu
  training   speed, share of the matrix rate and memory, measured and estimated, of training steps
             compared with nanoGPT's model and transformers (benchmarks.throughput)
  variants   what single settings change: precision, torch.compile, checkpoint_activations,
             model.vocab_multiple, cross-entropy in chunks; a profile (benchmarks.variants)
  processes  torchrun with one process and with all GPUs, replicated and sharded, compared
             with torch's DDP (benchmarks.scaling)
  quality    time to nanoGPT's published loss and to 1.44 (benchmarks.speedrun); other settings are
             passed to these runs
  decoding   benchmarks.sampling

Each part runs in processes of its own. The next part can use the time that a part leaves of its
limit. What the machine cannot run is skipped with the reason, and a part that fails is reported.
The file is written after each part. The table is Markdown, for docs/benchmarks.md.

Texts are downloaded, unless data.path says where they are. To try it on a CPU:

    python -m benchmarks.gpu device=cpu sizes=4x128 peers=eager variant_size=4x128 \
        process_size=4x128 models=0.8M experiment=speedrun
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from rich.console import Console

from benchmarks.gpu_table import TARGET_LOSSES, markdown_table
from benchmarks.harness import (
    ROOT,
    PassThroughOptions,
    read_options,
    run_command,
    select,
    write_json,
)
from common.errors import UserError

TEST_FILE = "tests/test_on_gpu.py"  # has all tests that are marked gpu
MAX_FAILURE_CHARS = 500  # of a failed test's message
CPU_PROCESSES = 2  # of torchrun, where the benchmark is tried without a GPU
PROCESS_STEPS = 10
# Seconds that a part has to end after Ctrl-C, in which pytest writes its results.
SECONDS_TO_STOP = 5
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
    seconds: float = 5.0
    variant_size: str = "67M"
    process_size: str = "12x768"
    models: str = "10.65M,124M"
    batches: str = "1,64"
    tokens: int = 128
    seeds: int = 1
    experiment: str = "shakespeare_gpu"


class Part(NamedTuple):
    """A command that measures one thing.

    Attributes:
        name: What it is called in the table.
        time_limit: Seconds after which it is stopped.
        arguments: Arguments of Python. The last one ends with "=", and the path of the file of
            results is appended to it.
        obstacle: Why the machine cannot run it, or None if it can.
    """

    name: str
    time_limit: float
    arguments: list[str]
    obstacle: str | None = None


def make_parts(options: GPUOptions, device: str) -> list[Part]:
    """Return the parts that the options name, with training split by size."""
    parts = []
    for kind, time_limit in select("parts", options.parts, TIME_LIMITS).items():
        if kind == "training":
            for size in options.sizes.split(","):
                arguments = _training_arguments(size, options)
                obstacle = find_training_obstacle(size, options.peers, device)
                parts.append(Part(f"training {size}", time_limit, arguments, obstacle))
        else:
            parts.append(Part(kind, time_limit, ARGUMENTS[kind](options)))
    return parts


def find_training_obstacle(size: str, peers: str, device: str) -> str | None:
    """Return why a device cannot train a model of a size beside its peers, or None."""
    from benchmarks.throughput import PEERS, make_config
    from benchmarks.variants import find_obstacle

    (runners,) = select("peers", peers, PEERS).values()
    for runner in runners.values():
        obstacle = find_obstacle(make_config(size, runner.precision, runner.compile, device))
        if obstacle:
            return obstacle
    return None


def count_processes(device: str) -> int:
    """Return the number of processes that torchrun starts at most."""
    import torch

    return torch.cuda.device_count() if device.startswith("cuda") else CPU_PROCESSES


def _test_arguments(options: GPUOptions) -> list[str]:
    pytest_options = ["-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider"]
    return ["-m", "pytest", *pytest_options, TEST_FILE, "--junitxml="]


def _benchmark_arguments(name: str, options: GPUOptions, *more: str) -> list[str]:
    """Return the arguments that run another benchmark on the device and write its results."""
    return ["-m", f"benchmarks.{name}", f"device={options.device}", *more, "json="]


def _training_arguments(size: str, options: GPUOptions) -> list[str]:
    return _benchmark_arguments(
        "throughput",
        options,
        f"sizes={size}",
        "rounds=1",
        f"peers={options.peers}",
        f"seconds={options.seconds}",
    )


def _variant_arguments(options: GPUOptions) -> list[str]:
    return _benchmark_arguments(
        "variants",
        options,
        f"size={options.variant_size}",
        f"compile={int(options.peers == 'compiled')}",
        f"seconds={options.seconds}",
    )


def _process_arguments(options: GPUOptions) -> list[str]:
    numbers = sorted({1, count_processes(options.device)})
    return _benchmark_arguments(
        "scaling",
        options,
        f"sizes={options.process_size}",
        f"processes={','.join(map(str, numbers))}",
        f"steps={PROCESS_STEPS}",
        "rounds=1",
        "precision=auto",
    )


def _quality_arguments(options: GPUOptions) -> list[str]:
    return _benchmark_arguments(
        "speedrun",
        options,
        f"baseline={options.experiment}",
        "runs=",
        f"pairs={options.seeds}",
        f"targets={','.join(TARGET_LOSSES)}",
        "eval.every=25",
        *options.settings,
    )


def _decoding_arguments(options: GPUOptions) -> list[str]:
    return _benchmark_arguments(
        "sampling",
        options,
        f"sizes={options.models}",
        "rounds=1",
        f"batches={options.batches}",
        f"tokens={options.tokens}",
    )


ARGUMENTS: dict[str, Callable[[GPUOptions], list[str]]] = {
    "tests": _test_arguments,
    "variants": _variant_arguments,
    "processes": _process_arguments,
    "quality": _quality_arguments,
    "decoding": _decoding_arguments,
}


def run_part(part: Part, device: str, time_limit: float | None = None) -> dict[str, Any]:
    """Run a part, and end all of its processes at its time limit.

    Args:
        part: The part.
        device: Where its tests run.
        time_limit: Seconds; None: the part's own limit.

    Returns:
        The "seconds" it took, and its "result", an "error", or both if it reached its time limit;
        or "skipped", the reason why the machine cannot run it.
    """
    if part.obstacle:
        return {"seconds": 0.0, "skipped": part.obstacle}
    if time_limit is None:
        time_limit = part.time_limit
    start = time.perf_counter()
    outcome: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "result"), Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *part.arguments[:-1], f"{part.arguments[-1]}{path}"],
                cwd=ROOT,
                env={**os.environ, "GLASSGPT_TEST_DEVICE": device},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            process.wait(max(0.0, time_limit - SECONDS_TO_STOP))
        except subprocess.TimeoutExpired:
            outcome["error"] = f"not finished within {time_limit:,.0f} s"
        finally:
            stop_processes(process)
        if path.exists():
            outcome["result"] = parse_result(path.read_text())
        elif "error" not in outcome:
            lines = log.read_text(errors="replace").strip().splitlines()
            outcome["error"] = lines[-1] if lines else f"exit status {process.returncode}"
    return {"seconds": time.perf_counter() - start, **outcome}


def stop_processes(process: subprocess.Popen) -> None:
    """End a process and those that it started: by Ctrl-C, and after some seconds by force."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
    with suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def parse_result(text: str) -> Any:
    """Return a benchmark's JSON, or the numbers of tests and failures in pytest's XML."""
    if not text.startswith("<"):
        return json.loads(text)
    cases = list(ElementTree.fromstring(text).iter("testcase"))
    skipped = 0
    failed: dict[str, str] = {}
    for case in cases:
        if case.find("skipped") is not None:
            skipped += 1
        for failure in (*case.findall("failure"), *case.findall("error")):
            failed[case.get("name", "")] = failure.get("message", "")[:MAX_FAILURE_CHARS]
    return {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}


def compare_memory(size: str, rows: dict[str, dict], device: str) -> dict[str, dict[str, float]]:
    """Return estimated and measured bytes of memory of GlassGPT's rows.

    Args:
        size: Size of the model, as in benchmarks.throughput.
        rows: Rows of benchmarks.throughput by name.
        device: Where they were measured.
    """
    from benchmarks.throughput import make_config
    from training.memory import memory_needed

    comparison = {}
    for name, row in rows.items():
        if "GlassGPT" in name:
            config = make_config(size, row["precision"], row["compiled"], device)
            estimated = memory_needed(config, 1)
            comparison[name] = {
                "estimated": estimated,
                "measured": row["memory"],
                "ratio": row["memory"] / estimated,
            }
    return comparison


def main(argv: list[str]) -> dict[str, Any]:
    """Run all parts, print a table and return their results."""
    options = read_options(argv, GPUOptions)
    import torch

    from training.device import describe, pick_device

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU on this machine; run this on one with a GPU, or try it on a CPU "
            "with the options that `python -m benchmarks.gpu help` ends with"
        )
    device = pick_device(options.device)
    result: dict[str, Any] = {
        "machine": describe(device),
        "processes": count_processes(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parts": {},
    }
    parts = make_parts(options, device)
    deadline = time.perf_counter() + sum(part.time_limit for part in parts)
    for number, part in enumerate(parts, 1):
        seconds_of_later_parts = sum(later.time_limit for later in parts[number:])
        time_limit = deadline - seconds_of_later_parts - time.perf_counter()
        with Console().status(f"{part.name}, at most {time_limit:.0f} s"):
            outcome = run_part(part, device, time_limit)
        if part.name.startswith("training") and "result" in outcome:
            for size, rows in outcome["result"]["sizes"].items():
                outcome["result"]["memory"] = compare_memory(size, rows, device)
        result["parts"][part.name] = outcome
        write_json(options.json or "gpu.json", result)
    print(markdown_table(result))
    return result


if __name__ == "__main__":
    run_command(main, __doc__)
