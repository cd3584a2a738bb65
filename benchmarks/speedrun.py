"""Time to a loss on tiny Shakespeare by characters: nanoGPT's recipe and ours.

    python -m benchmarks.speedrun [runs=speedrun,speedrun_ngrams,…] [baseline=nanogpt_cpu]
                                  [pairs=1] [targets=1.5,1.4697]
                                  [data.path=FILE] [max_steps=N …]

The experiments run in turns, `pairs` times, each time with another seed and with everything that is
not training switched off. Seconds are `train_seconds`: building batches, compiling, forward,
backward, update. `targets` are losses: with eval.every=N, the time of the first evaluation that
reaches one is shown. Other settings are passed to all runs. On a GPU use runs=shakespeare_gpu
baseline=nanogpt_gpu.

The last line is what counting n-grams alone reaches on the same text, as a baseline for n-gram
tables.
"""

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import cli
from benchmarks.counting import kneser_ney
from benchmarks.harness import (
    ROOT,
    PassThroughOptions,
    read_options,
    run_command,
)
from data.tokens import prepare
from interop import read_starting_model
from run.row import Row
from run.run_dir import RunDir

# nanoGPT's published losses with these recipes; the first on the whole validation split.
PUBLISHED_LOSSES = {"nanogpt_cpu": 1.886, "nanogpt_gpu": 1.4697}
MAX_ORDER = 7  # of the counting models
TRAINING_ONLY = [
    "eval.every=0",
    "attention.every=0",
    "checkpoint.every=0",
    "log.every=50",
    "wandb.mode=disabled",
]


@dataclass
class SpeedrunOptions(PassThroughOptions):
    """Options of this benchmark."""

    runs: str = "speedrun,speedrun_ngrams,shakespeare_cpu_plain,shakespeare_cpu"
    baseline: str = "nanogpt_cpu"
    pairs: int = 1
    targets: str = ""


class TrainedRun(NamedTuple):
    """Losses and times of one training run."""

    loss: float  # the last validation loss, in nats per token
    seconds: float
    seconds_to: dict[str, float | None]  # until each target loss was reached


def train(experiment: str, seed: int, settings: list[str], targets: list[str]) -> TrainedRun:
    """Train an experiment in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, experiment)
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            f"experiment={experiment}",
            f"seed={seed}",
            f"run_dir={run_dir}",
            *TRAINING_ONLY,
            *settings,
        ]
        subprocess.run(command, check=True)
        rows = RunDir(run_dir).rows()
    last = rows[-1]
    seconds_to = {target: seconds_to_loss(float(target), rows) for target in targets}
    return TrainedRun(last["val/loss"], last["train_seconds"], seconds_to)


def seconds_to_loss(loss: float, rows: list[Row]) -> float | None:
    """Return the training time until the first evaluation of at most this loss."""
    for row in rows:
        if row.get("val/loss", math.inf) <= loss:
            return row["train_seconds"]
    return None


def count_ngram_losses(settings: list[str]) -> list[float]:
    """Return the losses of counting models of orders 1, 2, … on the text of these settings."""
    config = cli.read_job(settings, read_starting_model).config
    text = prepare(config.data, config.tokenizer)
    vocab_size = text.tokenizer.vocab_size
    max_order = min(MAX_ORDER, int(math.log(2**63, vocab_size)))
    return kneser_ney(text.train, text.val, vocab_size, max_order)


def format_times(times: Iterable[float | None]) -> str:
    """Return the times of several runs as text; None means that the loss was not reached."""
    return ", ".join("never" if time is None else f"{time:.1f} s" for time in times)


def main(argv: list[str]) -> None:
    """Train all experiments and print a table."""
    options = read_options(argv, SpeedrunOptions)
    experiments = [options.baseline, *_split(options.runs)]
    targets = _split(options.targets)
    runs: dict[str, list[TrainedRun]] = {name: [] for name in experiments}
    for seed in range(1, options.pairs + 1):
        for name in experiments:
            runs[name].append(train(name, seed, options.settings, targets))
    Console().print(make_table(runs, options.baseline, targets))
    losses = count_ngram_losses([f"experiment={options.baseline}", *options.settings])
    orders = ", ".join(f"{loss:.4f} (order {n})" for n, loss in enumerate(losses, 1))
    print(f"counting alone, interpolated Kneser-Ney: {orders}")


def make_table(runs: dict[str, list[TrainedRun]], baseline: str, targets: list[str]) -> Table:
    """Show the mean of every experiment beside the baseline."""
    title = "Tiny Shakespeare, characters"
    if baseline in PUBLISHED_LOSSES:
        title += f" (published loss of {baseline}: {PUBLISHED_LOSSES[baseline]})"
    table = Table(title=title)
    table.add_column("experiment")
    columns = ["loss, mean", "worst", "seconds, mean", "against the baseline"]
    for column in [*columns, *(f"to {target}" for target in targets)]:
        table.add_column(column, justify="right")
    baseline_seconds = mean(run.seconds for run in runs[baseline])
    for name, trained in runs.items():
        seconds = mean(run.seconds for run in trained)
        if name == baseline:
            ratio = ""
        elif seconds < baseline_seconds:
            ratio = f"{baseline_seconds / seconds:.1f}x faster"
        else:
            ratio = f"{seconds / baseline_seconds:.1f} times as long"
        table.add_row(
            name,
            f"{mean(run.loss for run in trained):.4f}",
            f"{max(run.loss for run in trained):.4f}",
            f"{seconds:.1f}",
            ratio,
            *(format_times(run.seconds_to[target] for run in trained) for target in targets),
        )
    return table


def _split(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


if __name__ == "__main__":
    run_command(main, __doc__)
