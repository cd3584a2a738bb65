"""Time to a loss on tiny Shakespeare by characters: nanoGPT's setting against ours.

    python -m benchmarks.speedrun [runs=speedrun,speedrun_ngrams,…] [baseline=nanogpt_cpu]
                                  [pairs=1] [targets=1.5,1.4697] [json=FILE]
                                  [data.path=FILE] [max_steps=N …]

In turns, `pairs` times, each with a seed of its own, and with everything that is not training
switched off. Seconds are `train_seconds`: building batches, compiling, forward, backward, update.
`targets` are losses: with eval.every=N the first evaluation that reaches one says in how many
seconds. More settings go to all runs. On a GPU: runs=shakespeare_gpu baseline=nanogpt_gpu.

Below it stands what counting alone comes to on the same text, so that nobody takes what n-gram
tables give for understanding.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

import cli
from benchmarks import ROOT, options, write_json
from benchmarks.counting import kneser_ney
from data.tokens import prepare

# nanoGPT's losses at these settings, the first on the whole validation split
PUBLISHED = {"nanogpt_cpu": 1.886, "nanogpt_gpu": 1.4697}
RUNS = "speedrun,speedrun_ngrams,shakespeare_cpu_plain,shakespeare_cpu"
ORDERS = 7  # of the counting model, at most
QUIET = [
    "eval.every=0",
    "attention.every=0",
    "checkpoint.every=0",
    "log.every=50",
    "wandb.mode=disabled",
]


def measure(experiment: str, seed: int, settings: list[str]) -> list[dict]:
    """Train an experiment in a process of its own; its rows of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, experiment)
        subprocess.run(
            [
                sys.executable,
                str(ROOT / "train.py"),
                f"experiment={experiment}",
                f"seed={seed}",
                f"run_dir={run}",
                *QUIET,
                *settings,
            ],
            check=True,
        )
        return [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]


def seconds_to(loss: float, rows: list[dict]) -> float | None:
    """Seconds of training up to the first evaluation of at most this loss."""
    return next(
        (row["train_seconds"] for row in rows if row.get("val/loss", loss + 1) <= loss), None
    )


def counted(settings: list[str]) -> list[float]:
    """The losses of counting models of orders 1, 2, … on the text of a run with these settings."""
    config = cli.configure(cli.compose_job(settings))
    text = prepare(config.data, config.tokenizer)
    V = text.tokenizer.vocab_size
    return kneser_ney(text.train, text.val, V, min(ORDERS, int(math.log(2**63, V))))


def in_seconds(times) -> str:
    """The times of several runs in words, None where one never came there."""
    return ", ".join("never" if time is None else f"{time:.1f} s" for time in times)


def main(argv: list[str]) -> dict:
    given = options(argv, __doc__, runs=RUNS, baseline="nanogpt_cpu", pairs=1, targets="")
    names = [given["baseline"], *filter(None, given["runs"].split(","))]
    targets = list(filter(None, given["targets"].split(",")))
    result = {name: [] for name in names}
    for seed in range(1, given["pairs"] + 1):
        for name in names:
            rows = measure(name, seed, given["rest"])
            result[name].append(
                {
                    "seed": seed,
                    "loss": rows[-1]["val/loss"],
                    "steps": rows[-1]["step"],
                    "seconds": rows[-1]["train_seconds"],
                    "seconds_to": {target: seconds_to(float(target), rows) for target in targets},
                }
            )

    published = PUBLISHED.get(names[0])
    table = Table(
        title="tiny Shakespeare, characters"
        + (f" (nanoGPT, {names[0]}: {published})" if published else "")
    )
    for column in (
        "experiment",
        "loss, mean",
        "worst",
        "seconds, mean",
        "against the baseline",
        *(f"to {target}" for target in targets),
    ):
        table.add_column(column, justify="right" if column != "experiment" else "left")
    base = mean(run["seconds"] for run in result[names[0]])
    for name, runs in result.items():
        seconds = mean(run["seconds"] for run in runs)
        ratio = f"{seconds / base:.1f} times as long"
        if seconds < base:
            ratio = f"{base / seconds:.1f}x faster"
        table.add_row(
            name,
            f"{mean(run['loss'] for run in runs):.4f}",
            f"{max(run['loss'] for run in runs):.4f}",
            f"{seconds:.1f}",
            ratio if name != names[0] else "",
            *(in_seconds(run["seconds_to"][target] for run in runs) for target in targets),
        )
    Console().print(table)
    orders = counted([f"experiment={names[0]}", *given["rest"]])
    print(
        "counting alone, interpolated Kneser-Ney: "
        + ", ".join(f"{loss:.4f} of order {n}" for n, loss in enumerate(orders, 1))
    )
    write_json(given["json"], result)
    return result


if __name__ == "__main__":
    cli.start(lambda: main(sys.argv[1:]), lambda: __doc__)
