"""Write a sweep's table: sweep.csv, and what the terminal shows of it."""

import csv
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from statistics import harmonic_mean

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.files import atomic_write
from common.statistics import POWER, SIGNIFICANCE_LEVEL, censored_median, seeds_needed
from common.terminal import printer
from common.text import (
    format_fixed,
    format_magnitude,
    format_speed,
    format_with_error,
    pluralize,
    printable,
)
from studies.verdicts import StudyResults, verdicts
from sweeps.runs import (
    Run,
    Variant,
    find_best_run,
    find_tied_variant,
    has_several_texts,
    is_comparison,
    lacks_error_estimate,
    lead,
    output_file,
    rank_variants,
    ranking_metric,
    reproduce_command,
    shorten_number,
)


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write one line per run, best variant first: its swept settings and its figures."""
    lines = [
        {"run": run.name, "status": run.status, "reason": run.failure} | run.settings | run.figures
        for variant in rank_variants(runs)
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


def _format_measured_speed(value: float, error: float | None) -> str:
    return format_speed(value) if error is None else format_with_error(value, error)


def print_sweep(console: Console, folder: Path, runs: Sequence[Run]) -> None:
    """Print the table of some runs, and below it the best run and what to do next."""
    print_line = printer(console)
    variants = [v for v in rank_variants(runs) if v.finished or is_comparison(runs)]
    print_line("")
    if results := verdicts(runs):
        _print_study(results, print_line)
    elif variants:
        print_line(make_table(variants, ranking_metric(runs), console.width))
    print_line("")
    for name, value in _footer(folder, runs):
        print_line(printable(f"{name:<12}{value}", one_line=True))


def _print_study(results: StudyResults, print_line: Callable[[str | Table], None]) -> None:
    print_line(results.study.title)
    print_line(f"{results.study.papers}\n")
    for title, columns, rows, text_columns in results.tables():
        print_line(title)
        print_line(_format_table(columns, rows, text_columns))
        print_line("")
    claims = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    claims.add_column(width=14)
    for claim in results.study.claims:
        verdict, reason = results.verdict(claim)
        claims.add_row(Text(verdict), Text(f"{claim.text}\n{reason}\n"))
    print_line(claims)


def _format_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], n_text_columns: int
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(columns):
        is_text = index < n_text_columns
        text = Text(printable(heading, one_line=True))
        table.add_column(text, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        table.add_row(*(Text(printable(cell, one_line=True)) for cell in row))
    return table


# How figures are formatted; the terminal's table shows them in this order, as far as they fit.
FORMATS: dict[str, Callable[[float, float | None], str]] = {
    "val/loss": partial(format_fixed, decimals=4),
    "copying_gain": format_with_error,
    "tokens_at_emergence/induction": format_magnitude,  # the median
    "parameters": format_magnitude,
    "kv_cache_bytes": partial(format_magnitude, unit="B"),
    "val/bits_per_byte": partial(format_fixed, decimals=4),
    "tokens_per_second": _format_measured_speed,
    "train_seconds": partial(format_fixed, decimals=0),
    "val/in_context_score": format_with_error,
}
HEADINGS = {
    "val/bits_per_byte": "bits/byte",
    "kv_cache_bytes": "KV cache",
    "copying_gain": "copying gain",
    "tokens_at_emergence/induction": "induction at",
    "tokens_per_second": "tok/s",
    "train_seconds": "train s",
    "val/in_context_score": "in-context",
}
COLUMN_GAP = 2  # spaces between two columns


def make_table(variants: Sequence[Variant], metric: str, width: int) -> Table:
    """Build the table of a sweep's variants, best first, with as many figures as fit.

    The metric that ranks them always has a column, and so do all swept settings. Of the settings in
    which compared runs differ, those that fit have one. `width` is in characters.
    """
    runs = [run for variant in variants for run in variant.runs]
    columns = _setting_columns(variants)
    metric_column, *figure_columns = (
        [HEADINGS.get(name, name.removeprefix("task/")), *(format_cell(v, name) for v in variants)]
        for name in figure_names(variants, metric)
    )
    counts = []
    if is_comparison(runs):
        if any(run.status != "finished" for run in runs):
            counts = [["steps", *map(_format_steps, runs)]]
        columns, settings = columns[:1], columns[1:]
        for column in settings:
            if _table_width([*columns, column, *counts, metric_column]) <= width:
                columns.append(column)
    elif any("seed" in run.settings for run in runs):
        counts = [["seeds", *(_format_share(len(v.finished), len(v.runs)) for v in variants)]]
    n_text_columns = len(columns)
    columns += [*counts, metric_column]
    for column in figure_columns:
        if _table_width([*columns, column]) > width:
            break
        columns.append(column)

    headings, *rows = zip(*columns)
    return _format_table(headings, rows, n_text_columns)


def _setting_columns(variants: Sequence[Variant]) -> list[list[str]]:
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
    """Return the measured figures in the order of their columns: metric, task, FORMATS, heads."""
    runs = [run for variant in variants for run in variant.measured]
    measured = dict.fromkeys(name for run in runs for name in run.figures)
    known = [name for name in FORMATS if name != metric and name in measured]
    task = [name for name in measured if name.startswith("task/")]
    emerged = [name for name in measured if name.startswith("emerged/")]
    scores = [name for name in measured if name.startswith("heads/")]
    return [metric, *task, *known, *emerged, *scores]


def _table_width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(cell_len, column)) + COLUMN_GAP for column in columns) - COLUMN_GAP


def format_cell(variant: Variant, name: str) -> str:
    """Format a variant's mean of a figure, with its standard error and how many runs have it.

    Of times of emergence it is the median, with runs without an emergence last.
    """
    values, error = variant.values(name), variant.error(name)
    if not values:
        return "–"
    share = ""
    if len(values) < len(variant.measured):
        share = f"({_format_share(len(values), len(variant.measured))})"
    if name.startswith(("emerged/", "tokens_at_emergence/")):
        median = censored_median([run.figures.get(name) for run in variant.measured])
        return f"{format_magnitude(median, None) if isfinite(median) else '–'} {share}".strip()
    format_figure = FORMATS.get(name, format_with_error)
    text = format_figure(variant.mean(name), error if isfinite(error) and error else None)
    return f"{text} {share}".strip()


def _format_steps(run: Run) -> str:
    return _format_share(run.steps, run.config.max_steps if run.config else run.steps)


def _format_share(count: int, total: int) -> str:
    """Format a count, with the total if they differ: 3, 2 of 3."""
    return f"{count:,}" if count == total else f"{count:,} of {total:,}"


def _footer(folder: Path, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the (name, value) lines below the table: the best run, failures and what is next."""
    is_of_sweep = not is_comparison(runs)
    lines = []
    if has_several_texts(runs):
        lines.append(("note", "the texts differ, so the losses are not compared"))
    if best := find_best_run(runs):
        lines += conclusion(runs)
        if is_of_sweep:
            lines.append(("best run", reproduce_command(best)))
    lines += [("failed", f"{run.name}: {run.failure}") for run in runs if run.failure]
    if is_of_sweep:
        lines += [
            ("unfinished", f"{run.name}: {pluralize(run.steps, 'step')}")
            for run in runs
            if run.status == "unfinished"
        ]
    lines += [
        ("table", str(output_file(folder, runs, ".csv"))),
        ("page", str(output_file(folder, runs, ".html"))),
    ]
    if is_of_sweep and any(run.status != "finished" for run in runs):
        resume = f"resume=auto hydra.sweep.dir={shlex.quote(str(folder))}"
        lines.append(("to resume", f"the same command with {resume}"))
    return lines


def conclusion(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the lines that name the best variant, and whether it is significantly better."""
    variants = rank_variants(runs)
    best = variants[0]
    if is_comparison(runs):
        note = "each row is one run, so there is no error estimate"
        return [("lowest", best.name), ("note", note)] if len(runs) > 1 else []
    if lacks_error_estimate(variants):
        return [
            ("lowest", best.name),
            ("note", "with one seed there is no error estimate, so no setting is declared best"),
            ("", "(add seed=1,2,3)"),
        ]
    if not best.name:  # only the seed differs
        return []
    metric = ranking_metric(runs)
    tied = find_tied_variant(variants, metric)
    if tied is None:
        return [("best", best.name)]
    difference = lead(variants, metric)
    by = format_with_error(difference.value, difference.error)
    p = f"p = {difference.p_value:.2g}"
    lines = [("best", f"{best.name}, but {tied.name} is not distinguishable ({by}, {p})")]
    spread = difference.error * sqrt(harmonic_mean([len(v.finished) for v in (best, tied)]) / 2)
    if needed := seeds_needed(difference.value, spread):
        test = f"p < {SIGNIFICANCE_LEVEL} with probability {POWER:.0%}"
        lines.append(("", f"a difference of this size needs {needed:,} seeds per setting ({test})"))
    return lines
