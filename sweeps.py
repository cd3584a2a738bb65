"""A sweep's folder → a table, sweep.csv, sweep.html, the best setting as a command: `python -m sweeps DIR`. Does not import torch.

All that is said is read from the folder, so it is the same whatever started the jobs and whichever of them are left to do.
"""

import csv
import json
import shlex
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite, nan, prod, sqrt
from pathlib import Path
from statistics import fmean, stdev

from filelock import FileLock
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open

from config import Config, UserError, read_config
from files import atomic_write
from training.record import METRICS, Terminal, best_row, read_rows, teller

JOB = "job.json"  # in a job's folder: what it was given, and why its last attempt failed
MOST_SHOWN = 30  # settings in the printed table; sweep.csv has all


def _step(value: float) -> str:
    return f"{value:,.0f}"


def _thousands(value: float, unit: str = "") -> str:
    """12 k, 3.4 M, 124 M."""
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f}{prefix}{unit}"
    return f"{value:.0f} {unit}".strip()


# The measures of the table, in the order of their weight, and what they are called there; then come the births and the scores of heads.
FORMATS = {"val/loss": "{:.4f}".format, "val/bits_per_byte": "{:.4f}".format,
           "parameters": _thousands, "kv_cache_bytes": partial(_thousands, unit="B"),
           "tokens_per_second": _step, "train_seconds": _step}
HEADINGS = {"val/bits_per_byte": "bits/byte", "kv_cache_bytes": "KV cache", "tokens_per_second": "tokens/s", "train_seconds": "train s"}


@dataclass(frozen=True)
class Run:
    """A job of a sweep as its folder has it."""

    path: Path
    settings: dict[str, str]  # what the sweep varied, as typed for this job: model.n_kv_head → 2; `seed` too where it varied
    overrides: dict[str, str]  # all that was typed for this job: what reproduces it
    config: Config | None  # as resolved; None where the job failed or was stopped before it had one
    rows: list[dict]  # metrics.jsonl
    status: str  # finished: all its steps are recorded; failed: its last attempt was; unfinished: stopped, or still running
    reason: str  # why its last attempt failed, in one line; else empty. An attempt to go on with a finished run can fail too

    @cached_property
    def measures(self) -> dict[str, float]:
        """What it came to: losses at its best step, size, speed; of each kind of head the first birth and the greatest last score.

        Names as in metrics.jsonl (`births/induction`, `heads/induction` without a head's name), and `best_step`, `tokens_per_second`
        (of training), `parameters`, `kv_cache_bytes` (one sequence of block_size tokens). What was not measured is not there.
        """
        found, best, last = {}, best_row(self.rows), self.rows[-1] if self.rows else {}
        if best:
            found |= {"val/loss": best["val/loss"], "val/bits_per_byte": best["val/bits_per_byte"], "best_step": best["step"]}
        found |= {key: last[key] for key in ("step", "tokens", "train_seconds") if key in last}
        if found.get("train_seconds") and "tokens" in found:
            found["tokens_per_second"] = last["tokens"] / last["train_seconds"]
        found |= {name: value for name, value in (("parameters", parameters(self.path)), ("kv_cache_bytes", kv_cache_bytes(self.config))) if value}
        for kind, choose in (("births", min), ("heads", max)):
            scores = defaultdict(list)
            for key in last:
                if key.startswith(f"{kind}/"):
                    scores[key.rpartition("/")[0]].append(last[key])
            found |= {score: choose(values) for score, values in scores.items()}
        return found


# --- the folder, read -------------------------------------------------------------------------------------------------


def read_sweep(folder: Path) -> list[Run]:
    """The jobs of a sweep in the order of their folders' names; of one that another process writes now, what is whole.

    Raises:
        UserError: there is no sweep, or a file in it does not fit this version.
    """
    return [read_run(job.parent) for job in jobs_of(folder)]


def jobs_of(folder: Path) -> list[Path]:
    jobs = sorted(folder.glob(f"*/{JOB}"))
    if not jobs:
        raise UserError(f"{folder} is not the folder of a sweep: python train.py -m … names it when it ends")
    return jobs


def read_run(path: Path) -> Run:
    try:
        job = json.loads((path / JOB).read_text(encoding="utf-8"))
        overrides, swept, reason = dict(job["overrides"]), list(job["swept"]), str(job.get("failed", ""))
        settings = {key: overrides[key] for key in swept}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path / JOB} cannot be read ({e}): mend it, or remove {path}") from None
    config = read_config(path / "config.yaml") if (path / "config.yaml").exists() else None
    rows = read_rows(path / METRICS)
    done = config is not None and bool(rows) and rows[-1]["step"] >= config.max_steps
    return Run(path, settings, overrides, config, rows, "finished" if done else "failed" if reason else "unfinished", reason)


def parameters(run_dir: Path) -> int | None:
    """Numbers that are trained, counted in the newest checkpoint."""
    for weights in sorted(run_dir.glob("checkpoints/step_*/model.safetensors"))[-1:]:
        with suppress(SafetensorError, OSError), safe_open(weights, "np") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118  it is no dict
            return sum(prod(shape) for shape in shapes)
    return None


def kv_cache_bytes(config: Config | None) -> int | None:
    """Bytes of the keys and values of one sequence of block_size tokens, in the precision of the run."""
    if config is None:
        return None
    model = config.model
    return model.n_layer * model.kv_heads * model.block_size * (model.key_dim + model.value_dim) * (2 if config.precision == "bf16" else 4)


# --- the runs, compared -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The runs that differ by their seed alone."""

    settings: dict[str, str]  # without the seed
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    def values(self, measure: str) -> list[float]:
        """A measure of each finished run that has it."""
        return [run.measures[measure] for run in self.finished if measure in run.measures]

    def mean(self, measure: str) -> float:
        """The mean over the finished runs; nan where there is none."""
        values = self.values(measure)
        return fmean(values) if values else nan

    def error(self, measure: str) -> float:
        """The standard error of that mean: nan where fewer than two runs are finished."""
        values = self.values(measure)
        return stdev(values) / sqrt(len(values)) if len(values) > 1 and all(map(isfinite, values)) else nan


def compared_by(runs: list[Run]) -> str:
    """The metric that ranks the runs: the loss where their vocabulary is one, else bits per byte, which compare across vocabularies."""
    vocabularies = {(run.config.tokenizer.name, run.config.model.vocab_size, run.config.data.source, run.config.data.path, run.config.data.name)
                    for run in runs if run.config and run.rows}
    return "val/loss" if len(vocabularies) < 2 else "val/bits_per_byte"


def ranked(runs: list[Run]) -> list[Setting]:
    """The settings, best mean first; then those whose mean is not a number, at the end those without a finished run."""
    metric, groups = compared_by(runs), {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "seed"}
        groups.setdefault(tuple(sorted(settings.items())), Setting(settings, [])).runs.append(run)

    def order(setting: Setting) -> tuple:
        mean = setting.mean(metric)
        return not setting.finished, not isfinite(mean), mean if isfinite(mean) else 0

    return sorted(groups.values(), key=order)


def best_run(runs: list[Run]) -> Run | None:
    """The best run of the best setting; None where no run has a result."""
    metric = compared_by(runs)
    results = [run for run in ranked(runs)[0].finished if isfinite(run.measures.get(metric, nan))] if runs else []
    return min(results, key=lambda run: run.measures[metric], default=None)


def command(run: Run) -> str:
    """The command that gives this run again, by itself."""
    return shlex.join(["python", "train.py", *(f"{key}={value}" for key, value in run.overrides.items() if key not in ("sweep", "resume"))])


# --- what is written and said -----------------------------------------------------------------------------------------


def summarise(folder: Path) -> list[Run]:
    """Write sweep.csv and sweep.html anew from what is in the folder; jobs that end at the same time wait for each other."""
    from report.sweep_page import write_sweep_page

    jobs_of(folder)  # before a lock is left in a folder that is none of ours
    try:
        with FileLock(folder / ".lock"):
            runs = read_sweep(folder)
            write_csv(folder / "sweep.csv", runs)
            write_sweep_page(folder, runs)
    except OSError as e:
        raise UserError(f"{e.filename or folder} cannot be written: {e.strerror or e}") from None
    return runs


def write_csv(path: Path, runs: list[Run]) -> None:
    """A line for each run, those of the best setting first: its folder, how it ended, what was swept, and its `measures`."""
    lines = [{"run": run.path.name, "status": run.status, "reason": run.reason, **run.settings, **run.measures}
             for setting in ranked(runs) for run in setting.runs]
    columns = list(dict.fromkeys(key for line in sorted(lines, key=len, reverse=True) for key in line))  # in the order of the fullest line
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)


def table(settings: list[Setting], metric: str, width: int) -> Table:
    """The settings in a table; of its columns, in the order of their weight, as many as fit into `width` characters."""
    keys = list(dict.fromkeys(key for setting in settings for key in setting.settings))
    short = [key.rpartition(".")[2] for key in keys]
    columns = [[name if short.count(name) == 1 else key, *(setting.settings.get(key, "") for setting in settings)] for key, name in zip(keys, short)]
    if any("seed" in run.settings for setting in settings for run in setting.runs):
        columns.append(["seeds", *(f"{len(s.finished)}" + f" of {len(s.runs)}" * (len(s.finished) < len(s.runs)) for s in settings)])
    measured = dict.fromkeys(name for setting in settings for run in setting.finished for name in run.measures)
    scores = [name for kind in ("births/", "heads/") for name in measured if name.startswith(kind)]
    for name in (metric, *(name for name in FORMATS if name != metric), *scores):
        column = [HEADINGS.get(name, name), *(_cell(setting, name, exact=name == metric) for setting in settings)]
        if sum(max(map(cell_len, c)) + 2 for c in [*columns, column]) - 2 > width and name != metric:
            break
        columns.append(column)
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for n, (heading, *_) in enumerate(columns):
        made.add_column(Text(heading), justify="left" if n < len(keys) else "right", no_wrap=n >= len(keys))
    for row in zip(*(cells for _, *cells in columns)):
        made.add_row(*map(Text, row))
    return made


def _cell(setting: Setting, name: str, exact: bool) -> str:
    """A setting's mean of a measure; with its standard error where that is asked for, and where some seeds lack it, in how many it is."""
    shown, values = FORMATS.get(name, _step if name.startswith("births/") else "{:.2f}".format), setting.values(name)
    if not values:
        return "–"
    error, some = setting.error(name), f" ({len(values)} of {len(setting.finished)})" * (len(values) < len(setting.finished))
    return shown(setting.mean(name)) + (f" ± {shown(error)}" if exact and isfinite(error) else "") + some


def print_sweep(console: Console, folder: Path, runs: list[Run]) -> None:
    """The table; the best setting as a command; in a line each what failed and why, and what is not finished."""
    say, metric, settings = teller(console), compared_by(runs), [setting for setting in ranked(runs) if setting.finished]
    say("")
    if settings:
        console.print(table(settings[:MOST_SHOWN], metric, console.width))
    if len(settings) > MOST_SHOWN:
        say(f"… and {len(settings) - MOST_SHOWN} more, in sweep.csv")
    say("")
    best = best_run(runs)
    lines = [("best", command(best))] if best else []
    lines += [("failed", f"{run.path.name}: {run.reason}") for run in runs if run.reason]
    lines += [("unfinished", f"{run.path.name}: {run.rows[-1]['step'] if run.rows else 0:,} of {run.config.max_steps:,} steps" if run.config
               else run.path.name) for run in runs if run.status == "unfinished"]
    lines += [("table", folder / "sweep.csv"), ("page", folder / "sweep.html")]
    if any(run.status != "finished" for run in runs):
        lines += [("to go on", f"the same command with resume=auto hydra.sweep.dir={shlex.quote(str(folder))}")]
    for name, value in lines:
        say(f"{name:<12}{value}")


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
            raise UserError("give the folder of a sweep: python -m sweeps DIR")
        print_sweep(Terminal(), Path(sys.argv[1]), summarise(Path(sys.argv[1])))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
