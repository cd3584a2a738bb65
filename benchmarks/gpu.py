"""All that must be known on one GPU, in at most 40 minutes: one JSON, one table.

    python -m benchmarks.gpu [json=gpu.json] [parts=tests,training,quality,decoding]
                             [device=cuda] [sizes=10M,124M,350M] [peers=compiled] [seconds=15]
                             [models=10.65M,124M] [batches=1,64] [tokens=256] [seeds=3]
                             [experiment=shakespeare_gpu] [data.path=FILE] [max_steps=N …]

The tests marked gpu; tokens per second of whole training steps and their share of the matrix rate,
against nanoGPT's model and transformers', with the memory that they take beside what is planned
(benchmarks.throughput); time to nanoGPT's published loss and to 1.44
(benchmarks.speedrun), to whose runs more settings go; decoding (benchmarks.sampling). Each in
processes of its own and within its time: one that fails is named, and the rest goes on. The file is
written after each. On a CPU, for a look: device=cpu, with sizes as small as 4x128 and peers=eager.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

import cli
from benchmarks import ROOT, chosen, options, write_json
from benchmarks.speedrun import in_seconds
from common.errors import UserError

TARGETS = "1.4697,1.44"
ON_GPU = "tests/test_on_gpu.py"  # has all tests that are marked gpu
# Seconds that each part may take, in all less than 40 minutes; training for each size.
BUDGET = {"tests": 420, "training": 360, "quality": 480, "decoding": 360}


def commands(given: dict) -> dict[str, tuple[int, list[str]]]:
    """The parts by name: seconds that each may take, and the arguments to Python, to which the file
    of its results is added."""
    device, found = f"device={given['device']}", {}
    for part, budget in chosen(given["parts"], BUDGET).items():
        if part == "tests":
            found[part] = (
                budget,
                [
                    "-m",
                    "pytest",
                    "-q",
                    "-n",
                    "0",
                    "-m",
                    "gpu",
                    ON_GPU,
                    "-p",
                    "no:cacheprovider",
                    "--junitxml=",
                ],
            )
        elif part == "training":
            for size in given["sizes"].split(","):
                found[f"training {size}"] = (
                    budget,
                    [
                        "-m",
                        "benchmarks.throughput",
                        device,
                        f"sizes={size}",
                        "rounds=1",
                        f"peers={given['peers']}",
                        f"seconds={given['seconds']}",
                        "json=",
                    ],
                )
        elif part == "quality":
            found[part] = (
                budget,
                [
                    "-m",
                    "benchmarks.speedrun",
                    f"baseline={given['experiment']}",
                    "runs=",
                    f"pairs={given['seeds']}",
                    f"targets={TARGETS}",
                    device,
                    "eval.every=25",
                    *given["rest"],
                    "json=",
                ],
            )
        else:
            found[part] = (
                budget,
                [
                    "-m",
                    "benchmarks.sampling",
                    device,
                    f"sizes={given['models']}",
                    "rounds=2",
                    f"batches={given['batches']}",
                    f"tokens={given['tokens']}",
                    "json=",
                ],
            )
    return found


def run_part(budget: float, argv: list[str], device: str) -> dict:
    """What a command has written to the file that is its last argument, as "result", or what went
    wrong, as "error"; and the "seconds" that it took, at most its budget."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result")
        process = subprocess.Popen(
            [sys.executable, *argv[:-1], f"{argv[-1]}{path}"],
            cwd=ROOT,
            text=True,
            env={**os.environ, "GLASSGPT_TEST_DEVICE": device},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            said = process.communicate(timeout=budget)[0].strip().splitlines()
            done = {"error": (said or [f"status {process.returncode}"])[-1]}
            if path.exists():
                done = {"result": read(path.read_text())}
        except subprocess.TimeoutExpired:
            done = {"error": f"not done within {budget:,} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
                process.wait()
    return {"seconds": time.perf_counter() - began, **done}


def read(text: str) -> dict:
    """A benchmark's JSON, or pytest's XML as numbers of tests and the messages of failed ones."""
    if not text.startswith("<"):
        return json.loads(text)
    cases, skipped, failed = list(ElementTree.fromstring(text).iter("testcase")), 0, {}
    for case in cases:
        skipped += case.find("skipped") is not None
        for fault in (*case.findall("failure"), *case.findall("error")):
            failed[case.get("name")] = fault.get("message", "")[:500]
    return {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}


def planned(size: str, rows: dict, device: str) -> dict:
    """Of the rows that are ours, bytes of memory as planned and as they were."""
    from benchmarks import throughput
    from training.plan import memory_needed

    found = {}
    for name, row in rows.items():
        if "GlassGPT" in name:
            config = throughput.make_config(size, row["precision"], row["compiled"], device)
            bytes = memory_needed(config, 1)
            found[name] = {
                "planned": bytes,
                "measured": row["memory"],
                "ratio": row["memory"] / bytes,
            }
    return found


def lines(part: str, result: dict) -> list[tuple[str, str]]:
    """A part's results in words: what, and how much."""
    if part == "tests":
        counts = [
            f"{result['passed']} passed",
            f"{len(result['failed'])} failed",
            f"{result['skipped']} skipped",
        ]
        return [("marked gpu", ", ".join(counts)), *result["failed"].items()]
    if part.startswith("training"):
        (rows,) = result["sizes"].values()
        speeds = [
            (
                name,
                f"{row['tokens_per_second']:,.0f} tok/s, {row['share_of_matmul']:.0%} of "
                f"the matrix rate, {row['ratio']:.2f}x",
            )
            for name, row in rows.items()
        ]
        return speeds + [
            (
                f"{name}, memory",
                f"{row['measured'] / 2**20:,.0f} MB, planned "
                f"{row['planned'] / 2**20:,.0f} ({row['ratio']:.2f}x)",
            )
            for name, row in result["memory"].items()
        ]
    if part == "quality":
        ((name, runs),) = result.items()
        return [
            (f"{name}, to {target}", in_seconds(run["seconds_to"][target] for run in runs))
            for target in TARGETS.split(",")
        ] + [(f"{name}, at the end", ", ".join(f"{run['loss']:.4f}" for run in runs))]
    return [
        (
            f"{row['size']}, batch {row['batch']}",
            f"{row['glassgpt']:,.0f} tok/s, {row['ratio']:.1f}x transformers, "
            f"{row['glassgpt'] / row['bound']:.0%} of the memory's rate",
        )
        for row in result["decoding"]
    ]


def main(argv: list[str]) -> dict:
    given = options(
        argv,
        __doc__,
        parts=",".join(BUDGET),
        device="cuda",
        sizes="10M,124M,350M",
        peers="compiled",
        seconds=15.0,
        models="10.65M,124M",
        batches="1,64",
        tokens=256,
        seeds=3,
        experiment="shakespeare_gpu",
    )
    import torch

    from training.device import describe, pick_device

    if given["device"] == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "there is no GPU here that torch can use: run this where there is one, "
            "or with device=cpu sizes=4x128 peers=eager for a look"
        )
    device, console = pick_device(given["device"]), Console()
    table = Table(title=f"{describe(device)}, torch {torch.__version__}")
    for column in ("part", "what", ""):
        table.add_column(column)
    result = {
        "machine": describe(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parts": {},
    }
    for part, (budget, command) in commands(given).items():
        with console.status(f"{part}, at most {budget} s"):
            done = result["parts"][part] = run_part(budget, command, device)
            if part.startswith("training") and "result" in done:
                ((size, rows),) = done["result"]["sizes"].items()
                done["result"]["memory"] = planned(size, rows, device)
        write_json(given["json"] or "gpu.json", result)
        shown = lines(part, done["result"]) if "result" in done else [("FAILED", done["error"])]
        for n, (what, how_much) in enumerate(shown):
            table.add_row(f"{part} ({done['seconds']:.0f} s)" if n == 0 else "", what, how_much)
    console.print(table)
    return result


if __name__ == "__main__":
    cli.start(lambda: main(sys.argv[1:]), lambda: __doc__)
