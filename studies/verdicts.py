"""Test the claims of a study on its runs: a verdict with its reason for each, and the tables."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf, isfinite
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from cli.config_file import read_config
from common.checkpoints import CONFIG_FILE
from common.files import exists, is_folder, list_folder
from common.metrics import METRICS, read_rows
from common.settings import format_value
from common.statistics import (
    Difference,
    censored_median,
    paired_difference,
    proportion_interval,
    standard_error,
    welch_difference,
)
from common.terminal import Terminal, printer
from common.text import format_with_error, pluralize
from config import Config
from studies.claims import (
    END,
    METRIC_NAMES,
    START,
    STEP,
    Arm,
    Claim,
    Comparison,
    Emergence,
    Quantity,
    Study,
)

REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
UNDECIDED = "undecided"
MIN_SEEDS = 5  # finished seeds in each arm of a test
# Standard errors inside its bounds from which a claim is reproduced (with 5 seeds, p < 0.01 by
# Student's t), and outside from which it is not.
MIN_ERRORS = 5
MIN_ERRORS_TO_REFUTE = 3


class Run(NamedTuple):
    """A finished run of a study."""

    name: str
    config: Config
    rows: list[dict]  # of metrics.jsonl


class Verdict(NamedTuple):
    """The verdict of the runs on a claim, and its reason in one sentence."""

    verdict: str
    reason: str


class ResultTable(NamedTuple):
    """A table of texts; the first columns up to `text_columns` are aligned to the left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1


def read_study(study: Study, folder: Path) -> "StudyResults":
    """Read the finished runs in a folder, and sort them into the arms of a study."""
    runs: list[Run] = []
    for path in filter(is_folder, list_folder(folder)):
        if exists(path / CONFIG_FILE):
            config, rows = read_config(path / CONFIG_FILE), read_rows(path / METRICS)
            if rows and rows[-1]["step"] >= config.max_steps:
                runs.append(Run(path.name, config, rows))
    runs.sort(key=lambda run: run.config.seed)
    return StudyResults(
        study,
        {arm.name: [run for run in runs if is_in(arm, run.config)] for arm in study.arms},
    )


def is_in(arm: Arm, config: Config) -> bool:
    """Return whether a run with this configuration belongs to an arm."""
    values = {key: format_value(attrgetter(key)(config)) for key in arm.settings}
    return values == arm.settings


class StudyResults:
    """The finished runs of a study by arm, sorted by their seeds, and what they show."""

    def __init__(self, study: Study, runs: dict[str, list[Run]]) -> None:
        self.study, self.runs = study, runs
        self.emergences = {emergence.name: emergence for emergence in study.emergences}

    # --- measurements -----------------------------------------------------------------------------

    def steps(self, emergence: str, arm: str) -> list[int | None]:
        """Return the step at which an event happened in each run of an arm, or None."""
        return [find_step(run, self.emergences[emergence]) for run in self.runs[arm]]

    def _values(self, quantity: Quantity) -> list[float | None]:
        """Return a quantity of each run of its arm, None if it was not measured then."""
        return [self._value(run, quantity) for run in self.runs[quantity.arm]]

    def _value(self, run: Run, quantity: Quantity) -> float | None:
        if quantity.at in self.emergences:
            step = find_step(run, self.emergences[quantity.at])
        else:
            step = run.rows[0 if quantity.at == START else -1]["step"]
        values = (row.get(quantity.metric) for row in run.rows if row["step"] == step)
        return next(values, None)

    # --- verdicts ---------------------------------------------------------------------------------

    def verdict(self, claim: Claim) -> Verdict:
        """Return the verdict on a claim: the least favorable one of its tests."""
        events = [(q.at, q.arm) for q in claim.quantities if q.at in self.emergences]
        for emergence, arm in (*claim.needs, *events):
            steps = self.steps(emergence, arm)
            count = len(_drop_missing(steps))
            if 2 * count <= len(steps):
                text = f"{arm}: {emergence} in only {count} of {len(steps)} seeds."
                return Verdict(UNDECIDED, text)
        verdicts = [self._check(test) for test in claim.tests]
        for kind in (NOT_REPRODUCED, UNDECIDED):
            for verdict in verdicts:
                if verdict.verdict == kind:
                    return verdict
        return Verdict(REPRODUCED, " ".join(verdict.reason for verdict in verdicts))

    def _check(self, test: Comparison) -> Verdict:
        first, second = self._values(test.first), self._values(test.second)
        seeds_within = ""
        if test.first.arm == test.second.arm:
            pairs = [(a, b) for a, b in zip(first, second) if a is not None and b is not None]
            counts = {test.first.arm: len(pairs)}
            difference = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
            is_within = [test.at_least <= a - b <= test.at_most for a, b in pairs]
            seeds_within = f" {_state_count(sum(is_within), len(first))}"
        else:
            counts = {
                test.first.arm: len(_drop_missing(first)),
                test.second.arm: len(_drop_missing(second)),
            }
            difference = welch_difference(_drop_missing(first), _drop_missing(second))
        for arm, count in counts.items():
            if count < MIN_SEEDS:
                text = f"{arm}: {pluralize(count, 'seed')}, but {MIN_SEEDS} are needed."
                return Verdict(UNDECIDED, text)
        verdict, reason = _compare(test, difference, min(counts.values()))
        return Verdict(verdict, reason + seeds_within)

    # --- tables -----------------------------------------------------------------------------------

    def tables(self) -> list[ResultTable]:
        """Return the tables that have rows: of each metric of the claims, and of the events."""
        quantities = [quantity for claim in self.study.claims for quantity in claim.quantities]
        compared = [quantity for quantity in quantities if quantity.metric != STEP]
        metrics = dict.fromkeys(quantity.metric for quantity in compared)
        tables = [self._value_table(metric, compared) for metric in metrics]
        return [table for table in (*tables, self._emergence_table()) if table.rows]

    def _value_table(self, metric: str, compared: Sequence[Quantity]) -> ResultTable:
        """Return the values of a metric at the end of each arm, and at other times of claims."""
        times = (START, *self.emergences, END)
        quantities = [Quantity(metric, arm, at) for arm in self.runs for at in times]
        rows = []
        for quantity in quantities:
            values = self._values(quantity)
            if not _drop_missing(values) or not (quantity.at == END or quantity in compared):
                continue
            errors = _drop_missing(self._values(quantity._replace(metric=f"{metric}_se")))
            mean = format_with_error(
                fmean(_drop_missing(values)), standard_error(_drop_missing(values))
            )
            within = f"{round(fmean(errors), 6):.2g}" if errors else "–"
            name = quantity.arm if quantity.at == END else f"{quantity.arm}, {quantity.at}"
            rows.append([name, " ".join(map(_format_value, values)), mean, within])
        seeds = {tuple(str(run.config.seed) for run in runs) for runs in self.runs.values()}
        by_seed = f"seed {', '.join(seeds.pop())}" if len(seeds) == 1 else "by seed"
        columns = ["arm", by_seed, "mean ± SE", "SE in a run"]
        return ResultTable(METRIC_NAMES.get(metric, metric), columns, rows, text_columns=2)

    def _emergence_table(self) -> ResultTable:
        rows: list[list[str]] = []
        for name in self.emergences:
            event = name
            for arm in self.runs:
                steps = self.steps(name, arm)
                if not steps:
                    continue
                by_seed = " ".join("–" if step is None else f"{step:,}" for step in steps)
                median = _format_step(censored_median(steps))
                count = f"{len(_drop_missing(steps))} of {len(steps)}"
                rows.append([event, arm, by_seed, median, count])
                event = ""  # only in its first row
        columns = ["event", "arm", "step by seed", "median", "seeds"]
        return ResultTable("Emergence", columns, rows, text_columns=3)

    def print(self) -> None:
        """Print the tables, and a verdict on each claim with its reason."""
        print_line = printer(Terminal())
        print_line(f"\n{self.study.title}\n{self.study.papers}\n")
        for table in self.tables():
            print_line(table.title)
            print_line(_format_table(table))
            print_line("")
        claims = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        claims.add_column(width=14)
        for claim in self.study.claims:
            verdict, reason = self.verdict(claim)
            claims.add_row(Text(verdict), Text(f"{claim.text}\n{reason}\n"))
        print_line(claims)


def _format_table(table: ResultTable) -> Table:
    formatted = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(table.columns):
        is_text = index < table.text_columns
        justify = "left" if is_text else "right"
        formatted.add_column(heading, justify=justify, no_wrap=not is_text)
    for row in table.rows:
        formatted.add_row(*map(Text, row))
    return formatted


# --- measurements of one run ----------------------------------------------------------------------


def find_step(run: Run, emergence: Emergence) -> int | None:
    """Return the first evaluation past the threshold that the next one confirms, or None."""
    metric, threshold = emergence.metric, emergence.threshold
    metrics = [metric, threshold] if isinstance(threshold, str) else [metric]
    rows = [row for row in run.rows if all(name in row for name in metrics)]
    limits = [row[threshold] if isinstance(threshold, str) else threshold for row in rows]
    is_past = [
        row[metric] > limit if emergence.is_rise else row[metric] < limit
        for row, limit in zip(rows, limits)
    ]
    pairs = zip(rows, pairwise(is_past))
    return next((row["step"] for row, is_confirmed in pairs if all(is_confirmed)), None)


def _drop_missing(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# --- verdicts -------------------------------------------------------------------------------------


def _compare(test: Comparison, difference: Difference, seeds: int) -> Verdict:
    """Return the verdict by how many standard errors separate a difference from its bounds."""
    value = difference.value
    if value - test.at_least < test.at_most - value:
        name, bound, distance = "minimum", test.at_least, value - test.at_least
    else:
        name, bound, distance = "maximum", test.at_most, test.at_most - value
    in_errors = difference._replace(value=distance).in_errors
    text = (
        f"{_state_difference(test, difference)}: {_format_errors(abs(in_errors))} standard errors "
        f"{'above' if value > bound else 'below'} the {name} of {bound:g}"
    )
    if in_errors >= MIN_ERRORS:
        return Verdict(REPRODUCED, f"{text}.")
    if in_errors <= -MIN_ERRORS_TO_REFUTE:
        return Verdict(NOT_REPRODUCED, f"{text}.")
    times = (MIN_ERRORS if distance > 0 else MIN_ERRORS_TO_REFUTE) / (abs(in_errors) or inf)
    needed = f"; about {ceil(seeds * times**2)} seeds would decide" if 1 < times < 10 else ""
    return Verdict(UNDECIDED, f"{text}{needed}.")


# --- texts ----------------------------------------------------------------------------------------


def _metric_name(metric: str) -> str:
    """Return a metric's name within a sentence, without its unit."""
    name = METRIC_NAMES.get(metric, metric).partition(" (")[0]
    return name if name.startswith("KL") else f"{name[0].lower()}{name[1:]}"


def _state_difference(test: Comparison, difference: Difference) -> str:
    """Return by how much two quantities differ, as a clause."""
    first, second = test.first, test.second
    if first.metric == second.metric == STEP:
        steps = format_with_error(abs(difference.value), difference.error)
        order = "before" if difference.value < 0 else "after"
        return f"{first.arm}: {first.at} comes {steps} steps {order} {second.at}"
    by = format_with_error(difference.value, difference.error)
    name, other_name = _metric_name(first.metric), _metric_name(second.metric)
    if first.arm != second.arm:
        return f"{first.arm} exceeds {second.arm} in {name} by {by}"
    if first.metric == second.metric:
        return f"{first.arm}: {name} rises by {by} from {second.at} to {first.at}"
    at = "" if first.at == END else f", at {first.at}"
    return f"{first.arm}{at}: {name} exceeds {other_name} by {by}"


def _state_count(count: int, total: int) -> str:
    low, high = proportion_interval(count, total)
    return f"Within the bounds in {count} of {total} seeds (95% interval {low:.0%} to {high:.0%})."


def _format_errors(in_errors: float) -> str:
    if in_errors == inf:
        return "∞"
    return f"{in_errors:.0f}" if in_errors >= 10 else f"{in_errors:.1f}"


def _format_value(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def _format_step(step: float) -> str:
    return f"{step:,.0f}" if isfinite(step) else "–"
