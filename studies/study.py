"""Test published claims on the finished runs of a sweep: tables, verdicts and curves.

A study is a file beside this one: its variants by their settings, its events, and its claims, each
with differences and their bounds. docs/papers.md has the rules and the results.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise, product
from math import ceil, inf, isfinite
from operator import attrgetter, gt, lt
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Literal, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from common.errors import UserError
from common.files import atomic_write, is_folder, list_folder
from common.paths import expand_home
from common.statistics import (
    Difference,
    censored_median,
    mean_difference,
    proportion_interval,
    standard_error,
    welch_difference,
)
from common.terminal import Terminal, command, print_stderr, printer, tolerate_errors
from common.text import format_with_error, pluralize
from config import Config
from run.row import Row
from run.run_dir import RunDir

START, END = "start", "end"
STEP = "step"
VERDICTS = NOT_REPRODUCED, UNDECIDED, REPRODUCED = "not reproduced", "undecided", "reproduced"
MIN_SEEDS = 5  # in which both quantities of a difference were measured
# Standard errors inside its bounds from which a claim is reproduced (with 5 seeds, p < 0.01 by
# Student's t), and outside from which it is not.
MIN_ERRORS = 5
MIN_ERRORS_TO_REFUTE = 3
INDENT = " " * 16  # of the reasons below a verdict
CHART_WIDTH, CHART_HEIGHT = 1100, 600  # pixels, with the margins of a chart
CHART_MARGIN = 90
VARIANT_COLORS = ("#2f6db3", "#c8502f", "#2f8a57", "#8455ac")
USAGE = "python -m studies.NAME FOLDER"

Runs = dict[str, dict[int, list[Row]]]  # the rows of metrics.jsonl by variant and seed


class Event(NamedTuple):
    """The first evaluation at which a metric is past a threshold, and at the next too."""

    metric: str
    side: Literal["above", "below"]
    threshold: float | str  # the name of a metric is its value at the same evaluation

    def find(self, rows: Sequence[dict]) -> dict:
        """Return the row of metrics.jsonl at which it happened, or {}."""
        is_past = gt if self.side == "above" else lt
        measured = [row for row in rows if self.metric in row]
        past = [
            is_past(row[self.metric], row.get(self.threshold, self.threshold)) for row in measured
        ]
        confirmed = (row for row, both in zip(measured, pairwise(past)) if all(both))
        return next(confirmed, {})


class Quantity(NamedTuple):
    """A metric in the runs of a variant: at their end, at the start or at an event."""

    metric: str  # `STEP`: the step at which the event happened
    variant: str
    at: str = END

    def minus(self, at_least: float = -inf, at_most: float = inf, **other: str) -> "Comparison":
        """Return the comparison with the quantity in which these fields are different."""
        return Comparison(self, self._replace(**other), at_least, at_most)


class Comparison(NamedTuple):
    """The first quantity minus the second, and the bounds within which it is expected."""

    first: Quantity
    second: Quantity
    at_least: float
    at_most: float

    @property
    def name(self) -> str:
        """The fields that both quantities share, and those in which they differ."""
        pairs = list(zip(self.first, self.second))
        shared = ", ".join(first for first, second in pairs if first == second)
        distinct = zip(*(pair for pair in pairs if pair[0] != pair[1]))
        return f"{shared}: {' − '.join(map(', '.join, distinct))}"


class Claim(NamedTuple):
    """A claim that is reproduced if every difference is within its bounds."""

    text: str
    comparisons: Sequence[Comparison]
    needs: Sequence[tuple[str, str]] = ()  # (event, variant): it must have happened in most seeds

    @property
    def quantities(self) -> list[Quantity]:
        """The quantities that are compared."""
        return [quantity for each in self.comparisons for quantity in (each.first, each.second)]


class Study(NamedTuple):
    """Claims of papers, and the variants and events that test them."""

    title: str
    papers: str
    variants: dict[str, dict[str, object]]  # the settings of their runs
    events: dict[str, Event]
    claims: Sequence[Claim]

    def variants_of(self, config: Config) -> list[str]:
        """Return the variants to which a run with this configuration belongs."""
        return [
            variant
            for variant, settings in self.variants.items()
            if all(attrgetter(key)(config) == value for key, value in settings.items())
        ]

    @property
    def quantities(self) -> list[Quantity]:
        """The quantities that the claims compare."""
        return [quantity for claim in self.claims for quantity in claim.quantities]


class Results(NamedTuple):
    """The finished runs of a study, and what they show."""

    study: Study
    runs: Runs

    def values(self, quantity: Quantity) -> dict[int, float]:
        """Return a quantity by the seeds of the runs in which it was measured."""
        values = {}
        for seed, rows in self.runs[quantity.variant].items():
            row: dict = rows[0 if quantity.at == START else -1]
            if quantity.at in self.study.events:
                row = self.study.events[quantity.at].find(rows)
            if quantity.metric in row:
                values[seed] = row[quantity.metric]
        return values

    def judge(self, claim: Claim) -> tuple[str, list[str]]:
        """Return the verdict on a claim, the worst of its comparisons, and the reasons."""
        events = [(q.at, q.variant) for q in claim.quantities if q.at in self.study.events]
        for event, variant in (*claim.needs, *events):
            count = len(self.values(Quantity(STEP, variant, event)))
            total = len(self.runs[variant])
            if 2 * count <= total:
                return UNDECIDED, [f"{variant}: {event} in only {count} of {total} seeds"]
        verdicts, reasons = zip(*map(self.judge_comparison, claim.comparisons))
        return min(verdicts, key=VERDICTS.index), [*reasons]

    def judge_comparison(self, comparison: Comparison) -> tuple[str, str]:
        """Return the verdict on one comparison, and its reason."""
        difference, n_seeds = self._measure(comparison)
        if n_seeds < MIN_SEEDS:
            count = pluralize(n_seeds, "seed")
            return UNDECIDED, f"{comparison.name} = unknown ({count}, but {MIN_SEEDS} are needed)"

        above = difference.value - comparison.at_least
        below = comparison.at_most - difference.value
        bound = f"at most {comparison.at_most:g}"
        if above < below:
            bound = f"at least {comparison.at_least:g}"
        errors = difference._replace(value=min(above, below)).in_errors
        size = abs(errors)
        is_inside = errors > 0
        value = format_with_error(difference.value, difference.error)
        side = "inside" if is_inside else "outside"
        reason = (
            f"{comparison.name} = {value}, {bound}: {size:.{0 if size >= 10 else 1}f} SE {side}"
            f"{self._count_seeds_within(comparison)}"
        )
        needed = MIN_ERRORS if is_inside else MIN_ERRORS_TO_REFUTE
        if size >= needed:
            return REPRODUCED if is_inside else NOT_REPRODUCED, reason
        if size > needed / 10:
            n_deciding = ceil(n_seeds * (needed / size) ** 2)
            reason += f"; about {n_deciding} seeds would decide"
        return UNDECIDED, reason

    def _measure(self, comparison: Comparison) -> tuple[Difference, int]:
        """Return a difference, paired by the seeds in one variant, and the number of its seeds."""
        first, second = map(self.values, (comparison.first, comparison.second))
        if comparison.first.variant != comparison.second.variant:
            n_seeds = min(len(first), len(second))
            return welch_difference([*first.values()], [*second.values()]), n_seeds
        differences = self._differences(comparison)
        return mean_difference(differences), len(differences)

    def _differences(self, comparison: Comparison) -> list[float]:
        """Return the difference in each run of a variant that has both quantities."""
        first, second = map(self.values, (comparison.first, comparison.second))
        return [first[seed] - second[seed] for seed in first if seed in second]

    def _count_seeds_within(self, comparison: Comparison) -> str:
        """Say in how many runs of a variant the difference is in its bounds; "" between two."""
        if comparison.first.variant != comparison.second.variant:
            return ""
        differences = self._differences(comparison)
        n_within = sum(comparison.at_least <= d <= comparison.at_most for d in differences)
        n_runs = len(self.runs[comparison.first.variant])
        low, high = proportion_interval(n_within, n_runs)
        return f"; {n_within} of {n_runs} seeds ({low:.0%} to {high:.0%})"

    def text(self) -> str:
        """Return the tables, and the verdict on each claim with its reasons."""
        rows = [*self._value_rows(), *self._event_rows()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [self.study.title, self.study.papers, ""]
        for name, by_seed, summary in rows:
            lines.append(f"{name:{widths[0]}}  {by_seed:{widths[1]}}  {summary}".rstrip())
        for claim in self.study.claims:
            verdict, reasons = self.judge(claim)
            paragraphs = [f"{verdict:16}{claim.text}", *(f"{INDENT}{reason}" for reason in reasons)]
            lines += ["", *(fill(each, 80, subsequent_indent=INDENT) for each in paragraphs)]
        return "\n".join(lines)

    def _value_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the values of the claims' metrics: at the end of all runs, and when compared."""
        seeds = {", ".join(map(str, runs)) for runs in self.runs.values()}
        by_seed = f"seeds {seeds.pop()}" if len(seeds) == 1 else "by seed"
        yield "", by_seed, "mean ± SE (SE in a run)"
        compared = self.study.quantities
        for metric in dict.fromkeys(each.metric for each in compared if each.metric != STEP):
            yield metric, "", ""
            for variant, at in product(self.runs, (START, *self.study.events, END)):
                quantity = Quantity(metric, variant, at)
                is_shown = at == END or quantity in compared
                if is_shown and self.values(quantity):
                    yield self._value_row(quantity)

    def _value_row(self, quantity: Quantity) -> tuple[str, str, str]:
        """Return the name of a quantity in the table, its values by seed, and their mean."""
        values = self.values(quantity)
        seeds = self.runs[quantity.variant]
        texts = [f"{values[seed]:.3f}" if seed in values else "–" for seed in seeds]
        mean = format_with_error(fmean(values.values()), standard_error([*values.values()]))
        errors = self.values(quantity._replace(metric=f"{quantity.metric}_se")).values()
        within = f" ({round(fmean(errors), 6):.2g})" if errors else ""
        at = "" if quantity.at == END else f", {quantity.at}"
        return f"  {quantity.variant}{at}", " ".join(texts), f"{mean}{within}"

    def _event_rows(self) -> Iterator[tuple[str, str, str]]:
        yield "", "step of the event", "median (seeds)"
        for event in self.study.events:
            yield event, "", ""
            for variant, runs in self.runs.items():
                steps = self.values(Quantity(STEP, variant, event))
                texts = [f"{steps[seed]:,}" if seed in steps else "–" for seed in runs]
                median = censored_median([steps.get(seed) for seed in runs])
                text = f"{median:,.0f}" if isfinite(median) else "–"
                by_seed = " ".join(texts) if steps else "never"
                yield f"  {variant}", by_seed, f"{text} ({len(steps)} of {len(runs)})"

    def draw(self) -> Image.Image:
        """Draw the metrics of the study: a line for each run, and a dot at each event."""
        compared = [each.metric for each in self.study.quantities if each.metric != STEP]
        of_events = [event.metric for event in self.study.events.values()]
        metrics = dict.fromkeys([*compared, *of_events])
        size = 2 * CHART_WIDTH, CHART_MARGIN + ceil(len(metrics) / 2) * CHART_HEIGHT
        image = Image.new("RGB", size, "white")
        pen = ImageDraw.Draw(image)
        pen.font = ImageFont.load_default(26)
        for index, (variant, color) in enumerate(zip(self.runs, VARIANT_COLORS)):
            pen.text((CHART_MARGIN + 500 * index, CHART_MARGIN / 2), variant, color)
        for index, metric in enumerate(metrics):
            corner = index % 2 * CHART_WIDTH, CHART_MARGIN + index // 2 * CHART_HEIGHT
            self._draw_chart(pen, metric, *corner)
        return image

    def _draw_chart(self, pen: ImageDraw.ImageDraw, metric: str, left: int, top: int) -> None:
        """Draw a line for each run, in the color of its variant, with a dot at each event."""
        rows_by_color = [
            (color, [row for row in rows if metric in row])
            for color, runs in zip(VARIANT_COLORS, self.runs.values())
            for rows in runs.values()
        ]
        steps = [row["step"] for _, rows in rows_by_color for row in rows]
        values = [row[metric] for _, rows in rows_by_color for row in rows]
        last_step = max([0, *steps]) or 1
        low = min([0, *values])
        high = max([0, *values]) or 1

        def place(step: float, value: float) -> tuple[float, float]:
            width = CHART_WIDTH - 2 * CHART_MARGIN
            height = CHART_HEIGHT - 2 * CHART_MARGIN
            x = left + CHART_MARGIN + width * step / last_step
            y = top + CHART_MARGIN + height * (high - value) / (high - low)
            return x, y

        # The title, and three labels of each axis
        pen.text((left + CHART_MARGIN, top), metric, "black")
        for share in (0, 0.5, 1):
            value = low + share * (high - low)
            step = share * last_step
            pen.text(place(0, value), f"{value:.2g}  ", "black", anchor="rm")
            pen.text(place(step, low), f"\n{step:,.0f}", "black", anchor="ma")

        # The runs and their events
        for color, rows in rows_by_color:
            pen.line([place(row["step"], row[metric]) for row in rows], color, 3)
            for event in self.study.events.values():
                if event.metric == metric and (row := event.find(rows)):
                    pen.circle(place(row["step"], row[metric]), 8, color)


def read_runs(study: Study, folder: Path) -> Runs:
    """Read the finished runs in a folder, one for each variant and seed, and all on one text."""
    runs: Runs = {variant: {} for variant in study.variants}
    texts = set()
    for path in filter(is_folder, list_folder(folder)):
        run_dir = RunDir(path)
        config = run_dir.config
        rows = run_dir.rows()
        if config is None or not rows or rows[-1]["step"] < config.max_steps:
            continue
        for variant in study.variants_of(config):
            texts.add(run_dir.fingerprint(across_seeds=True) or path.name)  # without a checkpoint
            if config.seed in runs[variant]:
                raise UserError(
                    f"{folder} has several runs of {variant} with seed {config.seed}, such as "
                    f"{path.name}: give a folder with one run for each variant and seed"
                )
            runs[variant][config.seed] = rows
    if not any(runs.values()):
        raise UserError(f"{folder} has no finished run of this study: give that of its sweep")
    if len(texts) > 1:
        raise UserError(f"{folder} has runs on {len(texts)} texts: give a folder with runs on one")
    return {variant: dict(sorted(by_seed.items())) for variant, by_seed in runs.items()}


def report(study: Study, folder: Path) -> None:
    """Print the results of the runs in a folder, and draw their curves into its study.png."""
    results = Results(study, read_runs(study, folder))
    picture = folder / "study.png"
    with atomic_write(picture) as part:
        results.draw().save(part, "PNG")
    printer(Terminal())(f"\ncurves      {picture.absolute().as_uri()}\n\n{results.text()}")


def report_sweep(preset: str | None, folder: Path) -> None:
    """Report the study of a sweep: that of the preset paper_NAME is studies/NAME.py."""
    if preset is None or not preset.startswith("paper_"):
        return
    name = preset.removeprefix("paper_")
    if find_spec(f"studies.{name}"):
        with tolerate_errors("testing the claims", print_stderr):  # the runs have finished
            report(import_module(f"studies.{name}").STUDY, folder)


def main(study: Study) -> None:
    """Report the results of a study on the folder that is typed."""
    with command(lambda: USAGE):
        if len(sys.argv) != 2:
            raise UserError(f"give the folder of the study's sweep: {USAGE}")
        report(study, expand_home("FOLDER", sys.argv[1]))
