"""Test the claims of a study on its runs: a verdict with its reason for each, and the tables."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf, isfinite
from statistics import fmean
from typing import NamedTuple, Protocol

from common.statistics import (
    Difference,
    censored_median,
    paired_difference,
    proportion_interval,
    standard_error,
    welch_difference,
)
from common.text import format_with_error, pluralize
from studies.claims import (
    END,
    METRIC_NAMES,
    START,
    STEP,
    STUDIES,
    Claim,
    Comparison,
    Emergence,
    Quantity,
    Study,
)

ARM = "arm"  # among the settings of a study's runs: the name of their arm
REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
UNDECIDED = "undecided"
MIN_SEEDS = 5  # finished seeds in each arm of a test
# Standard errors inside its bounds from which a claim is reproduced (with 5 seeds, p < 0.01 by
# Student's t), and outside from which it is not.
MIN_ERRORS = 5
MIN_ERRORS_TO_REFUTE = 3


class Run(Protocol):
    """A run of a sweep, as far as a study reads it."""

    @property
    def overrides(self) -> dict[str, str]:
        """Settings that were typed; `sweep` names the study."""

    @property
    def settings(self) -> dict[str, str]:
        """Settings in which the runs differ, with the name of the arm as `ARM`."""

    @property
    def rows(self) -> list[dict]:
        """Rows of metrics.jsonl."""

    @property
    def status(self) -> str:
        """One of "finished", "unfinished" or "failed"."""


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


def verdicts(runs: Sequence[Run]) -> "StudyResults | None":
    """Return the results of the study that runs belong to; None if they are not its arms."""
    names = {run.overrides.get("sweep", "") for run in runs if ARM in run.settings} - {""}
    return StudyResults(STUDIES[names.pop()], runs) if len(names) == 1 else None


class StudyResults:
    """The finished runs of a study by arm, and what they show."""

    def __init__(self, study: Study, runs: Sequence[Run]) -> None:
        self.study = study
        finished = [run for run in runs if run.status == "finished"]
        finished.sort(key=lambda run: int(run.settings.get("seed") or 0))
        self.runs = {
            arm.name: [run for run in finished if run.settings.get(ARM) == arm.name]
            for arm in study.arms
        }
        self.emergences = {emergence.name: emergence for emergence in study.emergences}

    # --- measurements -----------------------------------------------------------------------------

    def steps(self, emergence: str, arm: str) -> list[int | None]:
        """Return the step at which an event happened in each run of an arm, or None."""
        return [find_step(run, self.emergences[emergence]) for run in self.runs[arm]]

    def steps_by_metric(self, run: Run) -> dict[str, list[int]]:
        """Return the steps of the events in a run by their metric."""
        steps: dict[str, list[int]] = {}
        for emergence in self.study.emergences:
            step = find_step(run, emergence)
            if step is not None:
                steps.setdefault(emergence.metric, []).append(step)
        return steps

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

    def tables(self, extra_metrics: Sequence[str] = ()) -> list[ResultTable]:
        """Return the tables that have rows, with the metrics of the claims and the extra ones."""
        quantities = [quantity for claim in self.study.claims for quantity in claim.quantities]
        compared = [quantity for quantity in quantities if quantity.metric != STEP]
        metrics = dict.fromkeys([*(quantity.metric for quantity in compared), *extra_metrics])
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
        seeds = {tuple(run.settings.get("seed", "") for run in runs) for runs in self.runs.values()}
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

    def page_content(self) -> dict:
        """Return what the page of the sweep shows of the study."""
        return {
            "title": self.study.title,
            "papers": self.study.papers,
            "claims": [[claim.text, *self.verdict(claim)] for claim in self.study.claims],
            "tables": [table._asdict() for table in self.tables(self.study.plot)],
            "plot": [[metric, METRIC_NAMES.get(metric, metric)] for metric in self.study.plot],
            "hasLogSteps": self.study.has_log_steps,
            "events": [_name_event(emergence) for emergence in self.study.emergences],
        }


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


def _name_event(emergence: Emergence) -> str:
    """Return an event with its threshold: "recall (loss of repeated tokens below 0.5)"."""
    name, threshold = _metric_name(emergence.metric), emergence.threshold
    past = "above" if emergence.is_rise else "below"
    limit = _metric_name(threshold) if isinstance(threshold, str) else f"{threshold:g}"
    return f"{emergence.name} ({name} {past} {limit})"


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
