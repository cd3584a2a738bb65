"""Group runs into variants, and rank them. Does not import torch."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from statistics import fmean

from cli.command_line import SETTINGS
from cli.folders import name_settings
from common.settings import explain_unused
from common.statistics import censored_median, standard_error
from sweeps.figures import describe_figure
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

    def typical_value(self, figure: str) -> tuple[float, float]:
        """Return the mean of a figure and its standard error, nan if that is unknown.

        Of times of emergence it is the median, with runs without an emergence last.
        """
        if describe_figure(figure).is_time:
            return censored_median([run.figures.get(figure) for run in self.measured]), nan
        values = self.values(figure)
        return fmean(values) if values else nan, standard_error(values)


class Ranking:
    """The variants of some runs, best first, as far as their losses can be compared."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.compares_runs = any(RUN in run.settings for run in runs)  # not variants of a sweep
        self.file_name = "comparison" if self.compares_runs else "sweep"  # of the table and page

    @cached_property
    def metric(self) -> str:
        """The metric that ranks the runs: the loss, or bits per byte if vocabularies differ."""
        configs = [run.config for run in self.runs if run.config and run.rows]
        vocabularies = {(config.tokenizer.name, config.model.vocab_size) for config in configs}
        return "val/loss" if len(vocabularies) < 2 else "val/bits_per_byte"

    @cached_property
    def has_several_texts(self) -> bool:
        """True if runs have losses on different texts, or on an unknown one."""
        texts = {
            (run.text or run.name, run.config.data.val_max_tokens)
            for run in self.runs
            if run.config and self.metric in run.figures
        }
        return len(texts) > 1

    @cached_property
    def variants(self) -> list[Variant]:
        """The variants, best mean first, then non-finite means, then unfinished ones.

        If no loss ranks the runs, their variants keep the order of the runs.
        """
        variants: dict[object, Variant] = {}
        known_texts = {run.record.row: run.text for run in self.runs if run.text}
        for run in self.runs:
            settings = dict(run.settings)
            if not self.compares_runs:
                settings.pop("seed", None)
            record = run.record
            text = run.text or known_texts.get(record.row)  # before its first checkpoint
            key = run.name if self.compares_runs else (record.row, text, record.length)
            variants.setdefault(key, Variant(settings, [])).runs.append(run)

        def order(variant: Variant) -> tuple:
            mean, _ = variant.typical_value(self.metric)
            return not variant.measured, not isfinite(mean), mean if isfinite(mean) else 0

        ordered = list(variants.values())
        return ordered if self.has_several_texts else sorted(ordered, key=order)

    @cached_property
    def best_run(self) -> Run | None:
        """The best run of the best variant, or None if no run has a result or is ranked."""
        if not self.runs or self.has_several_texts:
            return None
        candidates = [
            run for run in self.variants[0].measured if isfinite(run.figures.get(self.metric, nan))
        ]
        return min(candidates, key=lambda run: run.figures[self.metric], default=None)


def reproduce_command(run: Run) -> str | None:
    """Return the shell command that trains this run again, without settings for other jobs.

    None if it would not reproduce the run: another `max_steps` has continued it, or its text may
    have changed.
    """
    if len(run.record.schedule) != 1 or run.failure:
        return None
    settings = [
        f"{key}={run.record.settings[key]}"
        for key in run.record.typed
        if not (run.config and key in SETTINGS and explain_unused(run.config, key))
    ]
    return shlex.join(["python", "train.py", *settings])
