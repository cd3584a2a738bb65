"""Group runs into variants, and rank them. Does not import torch."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from math import isfinite, nan
from statistics import fmean

from common.settings import explain_unused
from common.statistics import SIGNIFICANCE_LEVEL, Difference, standard_error, welch_difference
from sweeps.runs import RUN, Run


@dataclass(frozen=True)
class Variant:
    """The runs of a sweep whose settings differ only by the seed, or one of several runs."""

    settings: dict[str, str]  # settings of its runs; in a sweep without the seed
    runs: list[Run]

    @property
    def name(self) -> str:
        """The settings for display (n_kv_head=2 lr=0.01), or the name of a single run."""
        return self.settings.get(RUN) or name_settings(self.settings)

    @property
    def finished(self) -> list[Run]:
        """The finished runs."""
        return [run for run in self.runs if run.status == "finished"]

    @property
    def measured(self) -> list[Run]:
        """The runs that its figures are taken from: the finished ones, or a single run so far."""
        return self.runs if RUN in self.settings else self.finished

    def values(self, figure: str) -> list[float]:
        """Return a figure of each measured run that has it."""
        return [run.figures[figure] for run in self.measured if figure in run.figures]

    def mean(self, figure: str) -> float:
        """Return the mean of a figure over the measured runs, or nan if none has it."""
        values = self.values(figure)
        return fmean(values) if values else nan

    def error(self, figure: str) -> float:
        """Return the standard error of the mean, or nan with fewer than two measured runs."""
        return standard_error(self.values(figure))


class Ranking:
    """The variants of some runs, best first, as far as their losses can be compared."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.compares_runs = any(RUN in run.settings for run in runs)  # not variants of a sweep
        self.file_name = "comparison" if self.compares_runs else "sweep"  # of the table and page

    @cached_property
    def metric(self) -> str:
        """The metric that ranks the runs: the loss, or bits per byte if vocabularies differ."""
        vocabularies = {
            (config.tokenizer.name, config.model.vocab_size) for config in self._trained_configs
        }
        return "val/loss" if len(vocabularies) < 2 else "val/bits_per_byte"

    @cached_property
    def has_several_texts(self) -> bool:
        """True if runs were trained and evaluated on different texts.

        The rules of a generated text come from the seed, in which compared runs may differ.
        """
        trained = [(run.config, run.record.text) for run in self.runs if run.config and run.rows]
        texts = {(astuple(config.data), text) for config, text in trained}
        seeds = {config.seed for config, _ in trained if config.data.source == "synthetic"}
        return len(texts) > 1 or (self.compares_runs and len(seeds) > 1)

    @property
    def _trained_configs(self) -> list:
        return [run.config for run in self.runs if run.config and run.rows]

    @cached_property
    def variants(self) -> list[Variant]:
        """The variants, best mean first, then non-finite means, then unfinished ones.

        If no loss ranks the runs, their variants keep the order of the runs.
        """
        variants: dict[tuple, Variant] = {}
        for run in self.runs:
            settings = dict(run.settings)
            if not self.compares_runs:
                settings.pop("seed", None)
            variant = variants.setdefault(
                (run.row, *sorted(settings.items())), Variant(settings, [])
            )
            variant.runs.append(run)

        def order(variant: Variant) -> tuple:
            mean = variant.mean(self.metric)
            return not variant.measured, not isfinite(mean), mean if isfinite(mean) else 0

        ordered = list(variants.values())
        return ordered if self.has_several_texts else sorted(ordered, key=order)

    @property
    def lacks_error_estimate(self) -> bool:
        """True if one of the two best variants has a single finished run."""
        best_two = self.variants[:2]
        return len(best_two) > 1 and any(len(variant.finished) == 1 for variant in best_two)

    @cached_property
    def best_run(self) -> Run | None:
        """The best run of the best variant, or None if no run has a result or is ranked."""
        if not self.runs or self.has_several_texts:
            return None
        candidates = [
            run for run in self.variants[0].measured if isfinite(run.figures.get(self.metric, nan))
        ]
        return min(candidates, key=lambda run: run.figures[self.metric], default=None)

    @property
    def lead(self) -> Difference:
        """The mean of the second-best variant minus that of the best."""
        best, second = self.variants[:2]
        return welch_difference(second.values(self.metric), best.values(self.metric))

    @property
    def tied_variant(self) -> Variant | None:
        """The second-best variant if the best one does not beat it significantly.

        It is tied unless Welch's t-test finds p < `SIGNIFICANCE_LEVEL`, which accounts for the
        number of seeds.
        """
        if len(self.variants) < 2:
            return None
        return self.variants[1] if self.lead.p_value >= SIGNIFICANCE_LEVEL else None


def name_settings(settings: dict[str, str]) -> str:
    """Format settings with the last part of their keys: n_kv_head=2 lr=0.01."""
    items = settings.items()
    return " ".join(f"{key.rpartition('.')[2]}={shorten_number(value)}" for key, value in items)


def shorten_number(value: str) -> str:
    """Round a number that a sweeper drew to four digits; leave every other value as it is."""
    if re.fullmatch(r"-?\d*\.\d{5,}(e-?\d+)?", value):
        return f"{float(value):.4g}"
    return value


def reproduce_command(run: Run) -> str | None:
    """Return the shell command that trains this run again, without settings for other jobs.

    None if it would not reproduce the run: another `max_steps` has continued it, or its text may
    have changed.
    """
    if len(run.record.schedule) != 1 or run.failure:
        return None
    settings = [
        f"{key}={value}"
        for key, value in run.record.settings.items()
        if key != "sweep" and not (key in run.all_settings and explain_unused(run.config, key))
    ]
    return shlex.join(["python", "train.py", *settings])
