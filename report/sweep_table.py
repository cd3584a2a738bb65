"""The settings of a sweep in a table: sweep.csv, and what is printed of it."""

import csv
import shlex
from functools import partial
from math import isfinite
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from common.files import atomic_write
from common.text import printable
from report import sweep
from report.sweep import Run, Setting


def write_csv(path: Path, runs: list[Run]) -> None:
    """A line for each run, those of the best setting first: what was swept, and its `measures`."""
    lines = [
        {
            "run": run.path.name,
            "status": run.status,
            "reason": run.reason,
            **run.settings,
            **run.measures,
        }
        for setting in sweep.ranked(runs)
        for run in setting.runs
    ]
    fullest_first = sorted(lines, key=len, reverse=True)
    columns = list(dict.fromkeys(key for line in fullest_first for key in line))
    with (
        atomic_write(path) as part,
        part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)


def thousands(value: float, unit: str = "") -> str:
    """12 k, 3.4 M, 124 M."""
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f}{prefix}{unit}"
    return f"{value:.0f} {unit}".strip()


# The measures of the table by their weight; then come the emerged and the scores of heads.
FORMATS = {
    "val/loss": "{:.4f}".format,
    "copying_gain": "{:.2f}".format,
    "tokens_at_emergence/induction": thousands,
    "parameters": thousands,
    "kv_cache_bytes": partial(thousands, unit="B"),
    "val/bits_per_byte": "{:.4f}".format,
    "tokens_per_second": "{:,.0f}".format,
    "train_seconds": "{:,.0f}".format,
}
HEADINGS = {
    "val/bits_per_byte": "bits/byte",
    "kv_cache_bytes": "KV cache",
    "copying_gain": "repeat gain",
    "tokens_at_emergence/induction": "induction born",
    "tokens_per_second": "tok/s here",
    "train_seconds": "train s",
}


def table(settings: list[Setting], metric: str, width: int) -> Table:
    """The settings in a table; of its columns, by their weight, as many as fit into `width`."""
    keys = list(dict.fromkeys(key for setting in settings for key in setting.settings))
    short = [key.rpartition(".")[2] for key in keys]
    columns = [
        [
            name if short.count(name) == 1 else key,
            *(sweep.brief(setting.settings.get(key, "")) for setting in settings),
        ]
        for key, name in zip(keys, short)
    ]
    if any("seed" in run.settings for setting in settings for run in setting.runs):
        columns.append(["seeds", *(counted(len(s.finished), len(s.runs)) for s in settings)])
    finished = [run for setting in settings for run in setting.finished]
    names = dict.fromkeys(name for run in finished for name in run.measures)
    scores = [name for kind in ("emerged/", "heads/") for name in names if name.startswith(kind)]
    for name in (metric, *(name for name in FORMATS if name != metric and name in names), *scores):
        column = [HEADINGS.get(name, name), *(cell(s, name) for s in settings)]
        needed = sum(max(map(cell_len, c)) + 2 for c in [*columns, column]) - 2
        if needed > width and name != metric:
            break
        columns.append(column)
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for n, (heading, *_) in enumerate(columns):
        made.add_column(
            Text(printable(heading, one_line=True)),
            no_wrap=n >= len(keys),
            justify="left" if n < len(keys) else "right",
        )
    for row in zip(*(cells for _, *cells in columns)):
        made.add_row(*(Text(printable(text, one_line=True)) for text in row))
    return made


def cell(setting: Setting, name: str) -> str:
    """A setting's mean of a measure with its standard error, if seeds differ; how many have it."""
    shown = FORMATS.get(name, ("{:,.0f}" if name.startswith("emerged/") else "{:.2f}").format)
    values, error = setting.values(name), setting.error(name)
    if not values:
        return "–"
    text = shown(setting.mean(name))
    if isfinite(error) and error:
        text += f" ± {shown(error)}"
    some = counted(len(values), len(setting.finished))
    return f"{text} ({some})" if "of" in some else text


def counted(n: int, of: int) -> str:
    return f"{n}" if n == of else f"{n} of {of}"


def notes(folder: Path, runs: list[Run]) -> list[tuple[str, str]]:
    """What is printed below the table, (name, value) each: the best, what failed, what is next."""
    lines, best, settings = [], sweep.best_run(runs), sweep.ranked(runs)
    if best and sweep.one_seed(settings):
        lines += [
            (
                "lowest",
                f"{settings[0].name}; one seed: a difference this small is no finding,"
                " add seed=1,2,3",
            )
        ]
    elif best and settings[0].name:  # more than the seed
        second = sweep.no_better(settings, sweep.compared_by(runs))
        lines += [
            (
                "best",
                settings[0].name + (f", but {second.name} is within the error" if second else ""),
            )
        ]
    if best:
        lines += [("best run", sweep.command(best))]
    lines += [("failed", f"{run.path.name}: {run.reason}") for run in runs if run.reason]
    lines += [
        ("unfinished", f"{run.path.name}: {run.rows[-1]['step'] if run.rows else 0:,} steps")
        for run in runs
        if run.status == "unfinished"
    ]
    lines += [("table", str(folder / sweep.CSV)), ("page", str(folder / sweep.PAGE))]
    if any(run.status != "finished" for run in runs):
        resume = f"resume=auto hydra.sweep.dir={shlex.quote(str(folder))}"
        lines += [("to go on", f"the same command with {resume}")]
    return lines
