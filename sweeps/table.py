"""Write a sweep's table: sweep.csv, and what the terminal shows of it."""

import csv
import shlex
from collections.abc import Sequence
from math import isfinite, sqrt
from pathlib import Path
from statistics import harmonic_mean

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.files import atomic_write
from common.statistics import POWER, SIGNIFICANCE_LEVEL, seeds_needed, welch_difference
from common.terminal import printer
from common.text import format_with_error, pluralize, printable
from sweeps.figures import FIGURES, describe_figure
from sweeps.ranking import Ranking, Variant, reproduce_command, shorten_number
from sweeps.runs import Run

COLUMN_GAP = 2  # spaces between two columns


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
    print_line, ranking = printer(console), Ranking(runs)
    print_line("")
    if any(variant.measured for variant in ranking.variants):
        print_line(make_table(ranking, console.width))
    print_line("")
    for name, value in _footer(folder, ranking):
        print_value = printer(console, wrap=not value.startswith("python "))
        print_value(printable(f"{name:<12}{value}", one_line=True))


def make_table(ranking: Ranking, width: int) -> Table:
    """Build the table of the measured variants, best first, with as many figures as fit.

    The metric that ranks them always has a column, and so do all swept settings. Of the settings in
    which compared runs differ, those that fit have one. `width` is in characters.
    """
    variants = [variant for variant in ranking.variants if variant.measured]
    columns, counts = setting_columns(variants), []
    metric_column, *figure_columns = (
        [describe_figure(name).heading, *(format_cell(variant, name) for variant in variants)]
        for name in figure_names(variants, ranking.metric)
    )
    if ranking.compares_runs:
        if any(run.status != "finished" for run in ranking.runs):
            counts = [["steps", *(format_steps(variant.runs[0]) for variant in variants)]]
        columns, settings = columns[:1], columns[1:]
        for column in settings:
            if _table_width([*columns, column, *counts, metric_column]) <= width:
                columns.append(column)
    elif any("seed" in run.settings for run in ranking.runs):
        counts = [["seeds", *(_format_share(len(v.finished), len(v.runs)) for v in variants)]]
    n_text_columns = len(columns)
    columns += [*counts, metric_column]
    for column in figure_columns:
        if _table_width([*columns, column]) > width:
            break
        columns.append(column)

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, (heading, *_) in enumerate(columns):
        is_text = index < n_text_columns
        table.add_column(
            _plain(heading), justify="left" if is_text else "right", no_wrap=not is_text
        )
    for row in list(zip(*columns))[1:]:
        table.add_row(*map(_plain, row))
    return table


def _plain(cell: str) -> Text:
    return Text(printable(cell, one_line=True))


def setting_columns(variants: Sequence[Variant]) -> list[list[str]]:
    """Return a column per swept setting, headed by the last part of its key if that is unique."""
    keys = list(dict.fromkeys(key for variant in variants for key in variant.settings))
    short_names = [key.rpartition(".")[2] for key in keys]
    columns = []
    for key, short_name in zip(keys, short_names):
        heading = short_name if short_names.count(short_name) == 1 else key
        values = [shorten_number(variant.settings.get(key, "")) for variant in variants]
        columns.append([heading, *values])
    return columns


def figure_names(variants: Sequence[Variant], metric: str) -> list[str]:
    """Return the measured figures in the order of their columns: metric, task, FIGURES, heads."""
    runs = [run for variant in variants for run in variant.measured]
    measured = dict.fromkeys(name for run in runs for name in run.figures)
    task = [name for name in measured if name.startswith("task/")]
    known = [figure.name for figure in FIGURES if figure.name in measured]
    emerged = [name for name in measured if name.startswith("emerged/")]
    scores = [name for name in measured if name.startswith("heads/")]
    return list(dict.fromkeys([metric, *task, *known, *emerged, *scores]))


def _table_width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(cell_len, column)) + COLUMN_GAP for column in columns) - COLUMN_GAP


def format_cell(variant: Variant, name: str) -> str:
    """Format a variant's mean of a figure, with its standard error and how many runs have it."""
    values, figure = variant.values(name), describe_figure(name)
    if not values:
        return "–"
    mean, error = variant.summarize(name)
    text = figure.format(mean, error if isfinite(error) and error else None)
    if figure.is_time and not isfinite(mean):
        text = "–"
    if len(values) < len(variant.measured):
        return f"{text} ({_format_share(len(values), len(variant.measured))})"
    return text


def format_steps(run: Run) -> str:
    """Format the steps of a run, with those that it was to have if they differ: 10 of 20."""
    return _format_share(run.steps, run.config.max_steps if run.config else run.steps)


def _format_share(count: int, total: int) -> str:
    """Format a count, with the total if they differ: 3, 2 of 3."""
    return f"{count:,}" if count == total else f"{count:,} of {total:,}"


def _footer(folder: Path, ranking: Ranking) -> list[tuple[str, str]]:
    """Return the (name, value) lines below the table: the best run, failures and what is next."""
    page = folder / f"{ranking.file_name}.html"
    lines = [
        ("page", page.absolute().as_uri()),
        ("table", str(page.with_suffix(".csv"))),
        *conclusion(ranking),
    ]
    for run in ranking.runs:
        if run.failure:
            name = "refused" if run.status == "finished" else "failed"
            lines.append((name, f"{run.name}: {run.failure}"))
        elif run.status == "unfinished" and not ranking.compares_runs:
            lines.append(("unfinished", f"{run.name}: {pluralize(run.steps, 'step')}"))
    if ranking.compares_runs:
        return lines
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


def conclusion(ranking: Ranking) -> list[tuple[str, str]]:
    """Return the lines that name the best variant, and whether it is significantly better."""
    if ranking.has_several_texts:
        return [("note", "the texts differ, so the losses are not compared")]
    if not ranking.best_run:
        return []
    best = ranking.variants[0]
    if ranking.compares_runs:
        note = "each row is one run, so there is no error estimate"
        return [("lowest", best.name), ("note", note)] if len(ranking.runs) > 1 else []
    if not best.name:  # only the seed differs
        return []
    second = next(iter(ranking.variants[1:]), best)
    if second is not best and 1 in (len(best.finished), len(second.finished)):
        return [
            ("lowest", best.name),
            ("note", "with one seed there is no error estimate, so no setting is declared best"),
            ("", "(add seed=1,2,3)"),
        ]
    difference = welch_difference(second.values(ranking.metric), best.values(ranking.metric))
    if second is best or not difference.p_value >= SIGNIFICANCE_LEVEL:
        return [("best", best.name)]
    by = format_with_error(difference.value, difference.error)
    p = f"p = {difference.p_value:.2g}"
    lines = [("best", f"{best.name}, but {second.name} is not distinguishable ({by}, {p})")]
    spread = difference.error * sqrt(harmonic_mean([len(v.finished) for v in (best, second)]) / 2)
    if needed := seeds_needed(difference.value, spread):
        test = f"p < {SIGNIFICANCE_LEVEL} with probability {POWER:.0%}"
        lines.append(("", f"a difference of this size needs {needed:,} seeds per setting ({test})"))
    return lines
