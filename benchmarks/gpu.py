"""Measure everything on one GPU in at most 40 minutes: one JSON file, one table.

    python -m benchmarks.gpu [json=gpu.json] [parts=tests,training,quality,decoding]
                             [device=cuda] [sizes=10M,124M,350M] [peers=compiled] [seconds=15]
                             [models=10.65M,124M] [batches=1,64] [tokens=256] [seeds=3]
                             [experiment=shakespeare_gpu] [data.path=FILE] [max_steps=N …]

The parts are:
  tests     the tests that are marked gpu
  training  speed, share of the matrix rate and memory, measured and planned, of training steps
            beside nanoGPT's model and transformers (benchmarks.throughput)
  quality   time to nanoGPT's published loss and to 1.44 (benchmarks.speedrun); other settings are
            passed to these runs
  decoding  benchmarks.sampling

Each part runs in processes of its own and within its time limit. A part that fails is reported, and
the next one starts. The file is written after each part. To try it on a CPU: device=cpu with sizes
as small as 4x128 and peers=eager.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    BYTES_PER_MB,
    ROOT,
    PassThroughOptions,
    read_options,
    run_command,
    select,
    write_json,
)
from benchmarks.speedrun import format_times
from common.errors import UserError

TARGET_LOSSES = ("1.4697", "1.44")  # nanoGPT's published loss, and a lower one
TEST_FILE = "tests/test_on_gpu.py"  # has all tests that are marked gpu
MAX_FAILURE_CHARS = 500  # of a failed test's message
# Time limit of each part in seconds, together below 40 minutes; of training for each size.
TIME_LIMITS = {"tests": 420, "training": 360, "quality": 480, "decoding": 360}


@dataclass
class GPUOptions(PassThroughOptions):
    """Options of this benchmark."""

    parts: str = ",".join(TIME_LIMITS)
    device: str = "cuda"
    sizes: str = "10M,124M,350M"
    peers: str = "compiled"
    seconds: float = 15.0
    models: str = "10.65M,124M"
    batches: str = "1,64"
    tokens: int = 256
    seeds: int = 3
    experiment: str = "shakespeare_gpu"


class Part(NamedTuple):
    """A command that measures one thing.

    Attributes:
        name: What it is called in the table.
        time_limit: Seconds after which it is stopped.
        arguments: Arguments of Python. The last one ends with "=", and the path of the file of
            results is appended to it.
    """

    name: str
    time_limit: float
    arguments: list[str]


class TableRow(NamedTuple):
    """One line of the table."""

    label: str
    text: str


def make_parts(options: GPUOptions) -> list[Part]:
    """Return the parts that the options name, with training split by size."""
    make_arguments: dict[str, Callable[[GPUOptions], dict[str, list[str]]]] = {
        "tests": lambda options: {"tests": _test_arguments()},
        "training": _training_arguments,
        "quality": lambda options: {"quality": _quality_arguments(options)},
        "decoding": lambda options: {"decoding": _decoding_arguments(options)},
    }
    parts = []
    for kind, time_limit in select("parts", options.parts, TIME_LIMITS).items():
        for name, arguments in make_arguments[kind](options).items():
            parts.append(Part(name, time_limit, arguments))
    return parts


def _test_arguments() -> list[str]:
    options = ["-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider"]
    return ["-m", "pytest", *options, TEST_FILE, "--junitxml="]


def _training_arguments(options: GPUOptions) -> dict[str, list[str]]:
    shared = [
        f"device={options.device}",
        "rounds=1",
        f"peers={options.peers}",
        f"seconds={options.seconds}",
        "json=",
    ]
    return {
        f"training {size}": ["-m", "benchmarks.throughput", f"sizes={size}", *shared]
        for size in options.sizes.split(",")
    }


def _quality_arguments(options: GPUOptions) -> list[str]:
    return [
        "-m",
        "benchmarks.speedrun",
        f"baseline={options.experiment}",
        "runs=",
        f"pairs={options.seeds}",
        f"targets={','.join(TARGET_LOSSES)}",
        f"device={options.device}",
        "eval.every=25",
        *options.settings,
        "json=",
    ]


def _decoding_arguments(options: GPUOptions) -> list[str]:
    return [
        "-m",
        "benchmarks.sampling",
        f"device={options.device}",
        f"sizes={options.models}",
        "rounds=2",
        f"batches={options.batches}",
        f"tokens={options.tokens}",
        "json=",
    ]


def run_part(part: Part, device: str) -> dict[str, Any]:
    """Run a part, and end all of its processes at its time limit.

    Returns:
        "seconds" it took, and either its "result" or an "error".
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result")
        process = subprocess.Popen(
            [sys.executable, *part.arguments[:-1], f"{part.arguments[-1]}{path}"],
            cwd=ROOT,
            text=True,
            env={**os.environ, "GLASSGPT_TEST_DEVICE": device},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = process.communicate(timeout=part.time_limit)
            if path.exists():
                outcome = {"result": parse_result(path.read_text())}
            else:
                lines = output.strip().splitlines() or [f"exit status {process.returncode}"]
                outcome = {"error": lines[-1]}
        except subprocess.TimeoutExpired:
            outcome = {"error": f"not finished after {part.time_limit:,} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
                process.wait()
    return {"seconds": time.perf_counter() - start, **outcome}


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
    """Return planned and measured bytes of memory of GlassGPT's rows.

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
            planned = memory_needed(config, 1)
            comparison[name] = {
                "planned": planned,
                "measured": row["memory"],
                "ratio": row["memory"] / planned,
            }
    return comparison


def describe_result(part: str, result: Any) -> list[TableRow]:
    """Return a part's result as lines of the table."""
    if part == "tests":
        return _describe_tests(result)
    if part.startswith("training"):
        return _describe_training(result)
    if part == "quality":
        return _describe_quality(result)
    return _describe_decoding(result)


def _describe_tests(result: dict[str, Any]) -> list[TableRow]:
    failed = result["failed"]
    counts = f"{result['passed']} passed, {len(failed)} failed, {result['skipped']} skipped"
    return [
        TableRow("marked gpu", counts),
        *(TableRow(name, message) for name, message in failed.items()),
    ]


def _describe_training(result: dict[str, Any]) -> list[TableRow]:
    (rows,) = result["sizes"].values()
    table_rows = []
    for name, row in rows.items():
        speed = (
            f"{row['tokens_per_second']:,.0f} tok/s, {row['share_of_matmul']:.0%} of the matrix "
            f"rate, {row['ratio']:.2f}x"
        )
        table_rows.append(TableRow(name, speed))
    for name, row in result["memory"].items():
        measured, planned = row["measured"] / BYTES_PER_MB, row["planned"] / BYTES_PER_MB
        memory = f"{measured:,.0f} MB, planned {planned:,.0f} ({row['ratio']:.2f}x)"
        table_rows.append(TableRow(f"{name}, memory", memory))
    return table_rows


def _describe_quality(result: dict[str, list[dict]]) -> list[TableRow]:
    ((name, runs),) = result.items()
    table_rows = []
    for target in TARGET_LOSSES:
        times = format_times(run["seconds_to"][target] for run in runs)
        table_rows.append(TableRow(f"{name}, to {target}", times))
    losses = ", ".join(f"{run['loss']:.4f}" for run in runs)
    return [*table_rows, TableRow(f"{name}, final loss", losses)]


def _describe_decoding(result: dict[str, Any]) -> list[TableRow]:
    table_rows = []
    for row in result["decoding"]:
        speed = (
            f"{row['glassgpt']:,.0f} tok/s, {row['ratio']:.1f}x transformers, "
            f"{row['glassgpt'] / row['bound']:.0%} of the memory bound"
        )
        table_rows.append(TableRow(f"{row['size']}, batch {row['batch']}", speed))
    return table_rows


def main(argv: list[str]) -> dict[str, Any]:
    """Run all parts, print a table and return their results."""
    options = read_options(argv, GPUOptions)
    import torch

    from training.device import describe, pick_device

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU on this machine; run this on one with a GPU, or try it with "
            "device=cpu sizes=4x128 peers=eager"
        )
    device = pick_device(options.device)
    console = Console()
    table = Table(title=f"{describe(device)}, torch {torch.__version__}")
    for column in ("part", "what", ""):
        table.add_column(column)
    result: dict[str, Any] = {
        "machine": describe(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parts": {},
    }
    for part in make_parts(options):
        with console.status(f"{part.name}, at most {part.time_limit} s"):
            outcome = run_part(part, device)
        if part.name.startswith("training") and "result" in outcome:
            ((size, rows),) = outcome["result"]["sizes"].items()
            outcome["result"]["memory"] = compare_memory(size, rows, device)
        result["parts"][part.name] = outcome
        write_json(options.json or "gpu.json", result)
        add_rows(table, part.name, outcome)
    console.print(table)
    return result


def add_rows(table: Table, part: str, outcome: dict[str, Any]) -> None:
    """Show what `run_part` returned."""
    if "result" in outcome:
        rows = describe_result(part, outcome["result"])
    else:
        rows = [TableRow("FAILED", outcome["error"])]
    for number, row in enumerate(rows):
        label = f"{part} ({outcome['seconds']:.0f} s)" if number == 0 else ""
        table.add_row(label, row.label, row.text)


if __name__ == "__main__":
    run_command(main, __doc__)
