"""Write a sweep's table: sweep.csv, and what the terminal shows of it."""

import csv
import shlex
from collections.abc import Sequence
from math import isfinite, sqrt
from pathlib import Path
from statistics import harmonic_mean
from typing import Literal, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.folders import shorten_number
from common.files import atomic_write
from common.statistics import POWER, SIGNIFICANCE_LEVEL, seeds_needed, welch_difference
from common.terminal import printer
from common.text import format_with_error, pluralize, printable
from sweeps.figures import FIGURES, describe_figure
from sweeps.ranking import Ranking, Variant, reproduce_command
from sweeps.runs import Run

COLUMN_GAP = 2  # spaces between two columns

NamedLine = tuple[str, str]  # below the table


def write_csv(path: Path, ranking: Ranking) -> None:
    """Write one line per run, best variant first: its swept settings and its figures."""
    lines = [
        {"run": run.name, "status": run.status, "reason": run.failure} | run.settings | run.figures
        for variant in ranking.variants
        for run in variant.runs
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


def print_sweep(console: Console, folder: Path, runs: Sequence[Run]) -> None:
    """Print the table of some runs, and below it the best run and what to do next."""
    print_line = printer(console)
    ranking = Ranking(runs)
    print_line("")
    if any(variant.measured for variant in ranking.variants):
        print_line(make_table(ranking, console.width))
    print_line("")
    page = folder / f"{ranking.file_name}.html"
    lines = [
        ("page", page.absolute().as_uri()),
        ("table", str(page.with_suffix(".csv"))),
        *conclusion(ranking),
        *_list_problems(ranking),
    ]
    if not ranking.compares_runs:
        lines += _suggest_commands(folder, ranking)
    for name, value in lines:
        print_line(printable(f"{name:<12}{value}", one_line=True))


class Column(NamedTuple):
    """A column of the table: settings are aligned to the left, numbers to the right."""

    heading: str
    cells: list[str]
    is_text: bool = False


def make_table(ranking: Ranking, width: int) -> Table:
    """Build the table of the measured variants, best first, with as many figures as fit.

    The metric that ranks them always has a column, and so do all swept settings. Of the settings in
    which compared runs differ, those that fit have one. `width` is in characters.
    """
    variants = [variant for variant in ranking.variants if variant.measured]
    metric, *figures = [
        Column(describe_figure(name).heading, [format_cell(variant, name) for variant in variants])
        for name in figure_names(variants, ranking.metric)
    ]
    settings = setting_columns(variants)
    counts = _count_columns(ranking, variants)
    if ranking.compares_runs:
        name, *others = settings
        settings = [name]
        for column in others:
            if _table_width([*settings, column, *counts, metric]) <= width:
                settings.append(column)
    columns = [*settings, *counts, metric]
    for column in figures:
        if _table_width([*columns, column]) > width:
            break
        columns.append(column)

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        table.add_column(_plain(column.heading), justify=justify, no_wrap=not column.is_text)
    for cells in zip(*(column.cells for column in columns)):
        table.add_row(*map(_plain, cells))
    return table


def _plain(cell: str) -> Text:
    return Text(printable(cell, one_line=True))


def _table_width(columns: Sequence[Column]) -> int:
    widths = [max(map(cell_len, [column.heading, *column.cells])) for column in columns]
    return sum(widths) + COLUMN_GAP * (len(columns) - 1)


def setting_columns(variants: Sequence[Variant]) -> list[Column]:
    """Return a column per swept setting, headed by the last part of its key if that is unique."""
    keys = list(dict.fromkeys(key for variant in variants for key in variant.settings))
    short_names = [key.rpartition(".")[2] for key in keys]
    columns = []
    for key, short_name in zip(keys, short_names):
        heading = short_name if short_names.count(short_name) == 1 else key
        values = [shorten_number(variant.settings.get(key, "")) for variant in variants]
        columns.append(Column(heading, values, is_text=True))
    return columns


def _count_columns(ranking: Ranking, variants: Sequence[Variant]) -> list[Column]:
    """Return the column with the steps of compared runs, or with the seeds of a sweep's variants.

    It is left out if all of them are finished, or if there are no seeds.
    """
    if ranking.compares_runs:
        if all(run.status == "finished" for run in ranking.runs):
            return []
        return [Column("steps", [format_steps(variant.runs[0]) for variant in variants])]
    if not any("seed" in run.settings for run in ranking.runs):
        return []
    counts = [_format_count(len(variant.finished), len(variant.runs)) for variant in variants]
    return [Column("seeds", counts)]


def figure_names(variants: Sequence[Variant], metric: str) -> list[str]:
    """Return the measured figures in the order of their columns: metric, task, FIGURES, heads."""
    runs = [run for variant in variants for run in variant.measured]
    measured = dict.fromkeys(name for run in runs for name in run.figures)
    task = [name for name in measured if name.startswith("task/")]
    known = [figure.name for figure in FIGURES if figure.name in measured]
    emerged = [name for name in measured if name.startswith("emerged/")]
    scores = [name for name in measured if name.startswith("heads/")]
    return list(dict.fromkeys([metric, *task, *known, *emerged, *scores]))


def format_cell(variant: Variant, name: str) -> str:
    """Format a variant's mean of a figure, with its standard error and how many runs have it."""
    values = variant.values(name)
    if not values:
        return "–"
    figure = describe_figure(name)
    mean, error = variant.typical_value(name)
    text = figure.format(mean, error if isfinite(error) and error else None)
    if figure.is_time and not isfinite(mean):
        text = "–"
    if len(values) < len(variant.measured):
        return f"{text} ({_format_count(len(values), len(variant.measured))})"
    return text


def format_steps(run: Run) -> str:
    """Format the steps of a run, with those that it was to have if they differ: 10 of 20."""
    return _format_count(run.steps, run.config.max_steps if run.config else run.steps)


def _format_count(count: int, total: int) -> str:
    """Format a count, with the total if they differ: 3, 2 of 3."""
    return f"{count:,}" if count == total else f"{count:,} of {total:,}"


def _list_problems(ranking: Ranking) -> list[NamedLine]:
    """Return a line for each run that failed or was refused, and each job that is unfinished."""
    lines = []
    for run in ranking.runs:
        if run.failure:
            name = "refused" if run.status == "finished" else "failed"
            lines.append((name, f"{run.name}: {run.failure}"))
        elif run.status == "unfinished" and not ranking.compares_runs:
            lines.append(("unfinished", f"{run.name}: {pluralize(run.steps, 'step')}"))
    return lines


def _suggest_commands(folder: Path, ranking: Ranking) -> list[NamedLine]:
    """Return the commands that resume a sweep, and that use and reproduce its best run."""
    lines = []
    if any(run.status != "finished" for run in ranking.runs):
        resume = f"resume=auto hydra.sweep.dir={shlex.quote(str(folder))}"
        lines.append(("to resume", f"the same command with {resume}"))
    if best := ranking.best_run:
        run_dir = shlex.quote(str(best.path))
        lines.append(("best run", f"python explore.py run_dir={run_dir}"))
        lines.append(("", f"python sample.py run_dir={run_dir}"))
        if command := reproduce_command(best):
            lines.append(("reproduce", command))
    return lines


def conclusion(ranking: Ranking) -> list[NamedLine]:
    """Return the lines that name the best variant, and whether it is significantly better."""
    if ranking.has_several_texts:
        return [("note", "the texts differ or are unknown, so the losses are not compared")]
    if not ranking.best_run:
        return []
    best = ranking.variants[0]
    if ranking.compares_runs:
        if len(ranking.runs) == 1:
            return []
        note = "each row is one run, so there is no error estimate"
        return [("lowest", best.name), ("note", note)]
    if not best.name:  # only the seed differs
        return []
    if len(ranking.variants) == 1:
        return [("best", best.name)]
    return _compare(best, ranking.variants[1], ranking.metric)


def _compare(best: Variant, second: Variant, metric: str) -> list[NamedLine]:
    """Return the lines that say whether the best variant is significantly better than the next."""
    if 1 in (len(best.finished), len(second.finished)):
        return [
            ("lowest", best.name),
            ("note", "with one seed there is no error estimate, so no setting is declared best"),
            ("", "(add seed=1,2,3)"),
        ]
    difference = welch_difference(second.values(metric), best.values(metric))
    is_tie = difference.p_value >= SIGNIFICANCE_LEVEL
    if not is_tie:
        return [("best", best.name)]
    by = format_with_error(difference.value, difference.error)
    p = f"p = {difference.p_value:.2g}"
    lines = [("best", f"{best.name}, but {second.name} is not distinguishable ({by}, {p})")]
    seeds = harmonic_mean([len(best.finished), len(second.finished)])
    spread = difference.error * sqrt(seeds / 2)
    if needed := seeds_needed(difference.value, spread):
        test = f"p < {SIGNIFICANCE_LEVEL} with probability {POWER:.0%}"
        lines.append(("", f"a difference of this size needs {needed:,} seeds per setting ({test})"))
    return lines
