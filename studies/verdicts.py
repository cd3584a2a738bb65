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
    standard_error,
    welch_difference,
)
from common.text import format_with_error
from config import Config
from studies.claims import (
    METRIC_NAMES,
    STUDIES,
    Claim,
    Coincidence,
    Comparison,
    Emergence,
    Order,
    Quantity,
    Study,
)

ARM = "arm"  # among the settings of a study's runs: the name of their arm
REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
UNTESTABLE = "cannot be tested at this scale"
MIN_SEEDS = 5  # finished seeds in each arm of a test
# In standard errors: how far an effect is from 0 if it is reproduced (with 5 seeds, p < 0.01 by
# Student's t), and how far below its margin if it is not.
MIN_ERRORS = 5
MIN_ERRORS_TO_REFUTE = 3
STEP_OF = "step of "


class Run(Protocol):
    """A run of a sweep, as far as a study reads it."""

    @property
    def overrides(self) -> dict[str, str]:
        """Settings that were typed; `sweep` names the study."""

    @property
    def settings(self) -> dict[str, str]:
        """Settings in which the runs differ, with the name of the arm as `ARM`."""

    @property
    def config(self) -> Config | None:
        """All settings; None before it trained."""

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
        finished.sort(key=lambda run: run.config.seed if run.config else 0)
        self.runs = {
            arm.name: [run for run in finished if run.settings.get(ARM) == arm.name]
            for arm in study.arms
        }
        self.emergences = {emergence.name: emergence for emergence in study.emergences}
        tests = [test for claim in study.claims for test in claim.tests]
        self.comparisons = [test for test in tests if isinstance(test, Comparison)]

    # --- measurements -----------------------------------------------------------------------------

    def steps(self, emergence: str, arm: str) -> list[int | None]:
        """Return the step at which an event happened in each run of an arm, or None."""
        return [find_step(run, self.emergences[emergence]) for run in self.runs[arm]]

    def steps_by_metric(self, run: Run) -> dict[str, int | None]:
        """Return the step of each event in a run, or None, by the metric of the event."""
        return {e.metric: find_step(run, e) for e in self.study.emergences}

    def _value(self, run: Run, metric: str) -> float | None:
        """Return a metric at the end of a run; the last step for an event that did not happen."""
        if metric.startswith(STEP_OF):
            step = find_step(run, self.emergences[metric.removeprefix(STEP_OF)])
            return run.rows[-1]["step"] if step is None else step
        return next((row[metric] for row in reversed(run.rows) if metric in row), None)

    def _values(self, quantity: Quantity) -> list[float]:
        values = (self._value(run, quantity.metric) for run in self.runs[quantity.arm])
        return [value for value in values if value is not None]

    def _difference(self, test: Comparison) -> Difference:
        """Return the difference of two quantities, of pairs if both are of the same runs."""
        if test.larger.arm != test.smaller.arm:
            return welch_difference(self._values(test.larger), self._values(test.smaller))
        metrics = test.larger.metric, test.smaller.metric
        pairs = ([self._value(run, m) for m in metrics] for run in self.runs[test.larger.arm])
        complete = [(a, b) for a, b in pairs if a is not None and b is not None]
        return paired_difference([a for a, _ in complete], [b for _, b in complete])

    # --- verdicts ---------------------------------------------------------------------------------

    def verdict(self, claim: Claim) -> Verdict:
        """Return the verdict on a claim: the least favorable one of its tests."""
        for emergence, arm in claim.needs:
            count, total = _count_events(self.steps(emergence, arm))
            if 2 * count <= total:
                return Verdict(UNTESTABLE, f"{arm}: {emergence} in only {count} of {total} seeds.")
        verdicts = [self._check(test) for test in claim.tests]
        for kind in (NOT_REPRODUCED, UNTESTABLE):
            for verdict in verdicts:
                if verdict.verdict == kind:
                    return verdict
        return Verdict(REPRODUCED, " ".join(verdict.reason for verdict in verdicts))

    def _check(self, test: Comparison | Order | Coincidence) -> Verdict:
        if isinstance(test, Comparison):
            counts = {side.arm: len(self._values(side)) for side in (test.larger, test.smaller)}
        else:
            counts = {test.arm: len(self.runs[test.arm])}
        for arm, count in counts.items():
            if count < MIN_SEEDS:
                return Verdict(UNTESTABLE, f"{arm}: {count} of at least {MIN_SEEDS} seeds.")
        match test:
            case Comparison(at_most=True):
                return _check_cost(test, self._difference(test))
            case Comparison():
                return _check_excess(test, self._difference(test))
            case Order():
                return self._check_order(test)
            case Coincidence():
                return self._check_coincidence(test)

    def _check_order(self, test: Order) -> Verdict:
        firsts = [_first_steps_of_phases(run, test.metrics) for run in self.runs[test.arm]]
        is_in_order = [
            all(a is not None and b is not None and a < b for a, b in pairwise(steps))
            for steps in firsts
        ]
        medians = _format_medians([_metric_name(metric) for metric in test.metrics], firsts)
        return _count_verdict(is_in_order, f"are lowest in this order ({medians})")

    def _check_coincidence(self, test: Coincidence) -> Verdict:
        steps = list(zip(*(self.steps(name, test.arm) for name in test.emergences)))
        config = self.runs[test.arm][0].config
        window = test.evaluations * config.eval.every if config else 0
        is_close = [None not in events and max(events) - min(events) <= window for events in steps]
        medians = _format_medians(test.emergences, steps)
        return _count_verdict(is_close, f"happen within {window} steps ({medians})")

    # --- tables -----------------------------------------------------------------------------------

    def tables(self, extra_metrics: Sequence[str] = ()) -> list[ResultTable]:
        """Return the tables that have rows, with the metrics of the claims and the extra ones."""
        compared = [quantity.metric for test in self.comparisons for quantity in test[:2]]
        metrics = dict.fromkeys([*compared, *extra_metrics])
        tables = [self._value_table(metric) for metric in metrics if STEP_OF not in metric]
        return [table for table in (*tables, self._emergence_table()) if table.rows]

    def _value_table(self, metric: str) -> ResultTable:
        rows = []
        for arm in self.runs:
            values = self._values(Quantity(metric, arm))
            if not values:
                continue
            errors = self._values(Quantity(f"{metric}_se", arm))
            mean = format_with_error(fmean(values), standard_error(values))
            within = f"{round(fmean(errors), 6):.2g}" if errors else "–"
            rows.append([arm, " ".join(map(_format_value, values)), mean, within])
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
                count, total = _count_events(steps)
                median = _format_step(censored_median(steps))
                rows.append([event, arm, by_seed, median, f"{count} of {total}"])
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
    rows = [row for row in run.rows if emergence.metric in row]
    is_past = [(row[emergence.metric] > emergence.threshold) == emergence.is_rise for row in rows]
    pairs = zip(rows, pairwise(is_past))
    return next((row["step"] for row, is_confirmed in pairs if all(is_confirmed)), None)


def _first_steps_of_phases(run: Run, metrics: Sequence[str]) -> list[int | None]:
    """Return for each metric the first step at which it is the lowest of all."""
    rows = [row for row in run.rows if all(metric in row for metric in metrics)]
    firsts: dict[str, int] = {}
    for row in rows:
        firsts.setdefault(min(metrics, key=lambda metric: row[metric]), row["step"])
    return [firsts.get(metric) for metric in metrics]


# --- verdicts -------------------------------------------------------------------------------------


def _check_excess(test: Comparison, difference: Difference) -> Verdict:
    value, error, _ = difference
    larger, smaller = _name_sides(test)
    by = format_with_error(value, error)
    if value >= test.margin and difference.in_errors >= MIN_ERRORS:
        effect = f"({_format_errors(difference.in_errors)} standard errors)"
        return Verdict(REPRODUCED, f"{larger} exceeds {smaller} by {by} {effect}.")
    if value + MIN_ERRORS_TO_REFUTE * error < test.margin:
        text = f"{larger} does not exceed {smaller} by {test.margin:g}: the difference is {by}."
        return Verdict(NOT_REPRODUCED, text)
    return _too_uncertain(difference, f"{larger} exceeds {smaller} by {by}", value, test.margin)


def _check_cost(test: Comparison, difference: Difference) -> Verdict:
    value, error, _ = difference
    larger, smaller = _name_sides(test)
    by = f"{larger} exceeds {smaller} by {format_with_error(value, error)}"
    if value + MIN_ERRORS * error <= test.margin:
        text = f"{by}, at least {MIN_ERRORS} standard errors below {test.margin:g}."
        return Verdict(REPRODUCED, text)
    if value - MIN_ERRORS_TO_REFUTE * error > test.margin:
        return Verdict(NOT_REPRODUCED, f"{by}, more than {test.margin:g}.")
    return _too_uncertain(difference, by, test.margin - value, test.margin)


def _too_uncertain(difference: Difference, text: str, distance: float, margin: float) -> Verdict:
    times = MIN_ERRORS * difference.error / abs(distance) if distance else inf
    needed = f"; about {ceil(times**2)} times the seeds would decide" if 1 < times < 10 else ""
    return Verdict(UNTESTABLE, f"{text}, too uncertain to compare with {margin:g}{needed}.")


def _count_verdict(is_as_claimed: Sequence[bool], text: str) -> Verdict:
    """Return the verdict on what should hold in every seed: not reproduced if in at most half."""
    count, total = sum(is_as_claimed), len(is_as_claimed)
    failure = NOT_REPRODUCED if 2 * count <= total else UNTESTABLE
    verdict = REPRODUCED if count == total else failure
    return Verdict(verdict, f"In {count} of {total} seeds they {text}.")


# --- texts ----------------------------------------------------------------------------------------


def _metric_name(metric: str) -> str:
    """Return a metric's name without its unit."""
    return METRIC_NAMES.get(metric, metric).partition(" (")[0]


def _name_event(emergence: Emergence) -> str:
    """Return an event with its threshold: "recall (loss of repeated tokens below 0.5)"."""
    name = _metric_name(emergence.metric)
    past = "above" if emergence.is_rise else "below"
    return f"{emergence.name} ({name[0].lower()}{name[1:]} {past} {emergence.threshold:g})"


def _name_sides(test: Comparison) -> tuple[str, str]:
    """Return what is compared: "Loss: one layer" and "two layers", or two metrics of an arm."""
    larger, smaller = _metric_name(test.larger.metric), _metric_name(test.smaller.metric)
    if test.larger.arm == test.smaller.arm:
        return f"{test.larger.arm}: {larger}", smaller
    return f"{larger}: {test.larger.arm}", test.smaller.arm


def _format_errors(in_errors: float) -> str:
    if in_errors == inf:
        return "∞"
    return f"{in_errors:.0f}" if in_errors >= 10 else f"{in_errors:.1f}"


def _format_value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def _format_step(step: float) -> str:
    return f"{step:,.0f}" if isfinite(step) else "–"


def _format_medians(names: Sequence[str], steps: Sequence[Sequence[int | None]]) -> str:
    medians = [_format_step(censored_median(of_event)) for of_event in zip(*steps)]
    return "median steps: " + ", ".join(f"{n} {step}" for n, step in zip(names, medians))


def _count_events(steps: Sequence[int | None]) -> tuple[int, int]:
    return len(steps) - steps.count(None), len(steps)
