"""Read a sweep's folder: its runs, and its variants ranked. Does not import torch."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from math import isfinite, nan
from pathlib import Path
from statistics import fmean

from cli.config_file import read_config
from common.checkpoints import CONFIG_FILE
from common.errors import UserError
from common.files import exists, is_folder, list_folder
from common.metrics import METRICS, read_rows
from common.settings import explain_unused, format_value, iterate_settings
from common.statistics import SIGNIFICANCE_LEVEL, Difference, standard_error, welch_difference
from common.terminal import explain_error
from config import Config
from studies.claims import STUDIES
from studies.verdicts import ARM
from sweeps.figures import summarize_run
from sweeps.note import JOB, JobNote, read_job

# A pseudo-setting of compared runs: the name of each, so that each is a variant of its own.
RUN = "run"


@dataclass(frozen=True)
class Run:
    """One job of a sweep, or a run outside of any sweep, as its folder records it."""

    path: Path
    # Swept settings as typed, such as model.n_kv_head → 2, including the seed. If runs are compared
    # one by one: the run's name under `RUN`, and the settings in which the runs differ.
    settings: dict[str, str]
    overrides: dict[str, str]  # everything typed when it first trained
    config: Config | None  # resolved; None before it trained
    rows: list[dict]  # rows of metrics.jsonl
    status: str  # finished, failed (in its last attempt), or unfinished (stopped or still running)
    failure: str  # why its last attempt failed, in one line; "" if it did not

    @property
    def name(self) -> str:
        """The name of its folder, or the path that tells it from other compared runs."""
        return self.settings.get(RUN, self.path.name)

    @property
    def steps(self) -> int:
        """Number of steps that it has taken."""
        return self.rows[-1]["step"] if self.rows else 0

    @cached_property
    def all_settings(self) -> dict[str, str]:
        """Every setting by its key, as a user would type it; {} without a configuration."""
        settings = iterate_settings(self.config) if self.config else ()
        return {key: format_value(value) for key, _, value in settings}

    @cached_property
    def figures(self) -> dict[str, float]:
        """The run's numbers in sweep.csv, such as `val/loss`; see `summarize_run`."""
        return summarize_run(self.path, self.config, self.rows)


def is_comparison(runs: Sequence[Run]) -> bool:
    """Return whether runs are compared one by one, not the variants of a sweep."""
    return any(RUN in run.settings for run in runs)


def output_file(folder: Path, runs: Sequence[Run], suffix: str) -> Path:
    """Return the path of the table (.csv) or the page (.html) of some runs in a folder."""
    return folder / f"{'comparison' if is_comparison(runs) else 'sweep'}{suffix}"


def is_sweep(folder: Path) -> bool:
    """Return whether a sweep has started a job in this folder."""
    jobs = _job_folders(folder)
    return any(os.access(path, os.X_OK) for path in jobs) or any(
        exists(path / JOB) for path in jobs
    )


def _job_folders(folder: Path) -> list[Path]:
    return [path for path in list_folder(folder) if _is_job(path)]


def _is_job(path: Path) -> bool:
    try:
        return is_folder(path) and exists(path / JOB)
    except OSError:  # one that cannot be read is reported as failed
        return True


def require_sweep(folder: Path) -> None:
    """Raise `UserError` unless a sweep has started a job in this folder."""
    if not is_sweep(folder):
        raise UserError(
            f"{folder} is not the folder of a sweep: give one that python train.py -m … has printed"
        )


def read_sweep(folder: Path) -> list[Run]:
    """Read the runs of a sweep, sorted by the names of their folders; of a study, by their arms."""
    require_sweep(folder)
    runs = [read_run(job) for job in _job_folders(folder)]
    names = {run.overrides.get("sweep", "") for run in runs}
    arms = STUDIES[names.pop()].arms if len(names) == 1 and names <= STUDIES.keys() else ()
    sorted_runs = []
    for arm in arms:
        matching = [run for run in runs if arm.settings.items() <= run.all_settings.items()]
        runs = [run for run in runs if run not in matching]
        sorted_runs += [replace(run, settings={ARM: arm.name} | run.settings) for run in matching]
    return sorted_runs + runs


def read_run(path: Path) -> Run:
    """Read a run from its folder. If its files cannot be read, it has failed for that reason."""
    note, config, rows = JobNote(overrides={}, swept=[]), None, []
    config_file = path / CONFIG_FILE
    try:
        note = read_job(path) if exists(path / JOB) else note
    except (UserError, OSError) as e:
        note = replace(note, failure=explain_error(e) or str(e))
    try:
        if exists(config_file):
            config = _read_config(config_file, config_file.stat().st_mtime_ns)
        rows = read_rows(path / METRICS)
    except (UserError, OSError) as e:
        note = replace(note, failure=explain_error(e) or str(e))
    status = "failed" if note.failure else "unfinished"
    if config is not None and rows and rows[-1]["step"] >= config.max_steps:
        status = "finished"
    return Run(path, note.settings, note.overrides, config, rows, status, note.failure)


@lru_cache(maxsize=1000)
def _read_config(path: Path, modified_ns: int) -> Config:
    """Read a file once per version: parsing takes longer than all other reading of a run."""
    return read_config(path)


# --- variants -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The runs of a sweep whose settings differ only by the seed, or one of several runs."""

    settings: dict[str, str]  # settings of its runs; in a sweep without the seed
    runs: list[Run]

    @property
    def name(self) -> str:
        """Its settings for display: n_kv_head=2 lr=0.01; the name of a single run or of an arm."""
        name = self.settings.get(RUN) or self.settings.get(ARM)
        return name or format_settings(self.settings)

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


def format_settings(settings: dict[str, str]) -> str:
    """Format settings with the last part of their keys: n_kv_head=2 lr=0.01."""
    items = settings.items()
    return " ".join(f"{key.rpartition('.')[2]}={shorten_number(value)}" for key, value in items)


def shorten_number(value: str) -> str:
    """Round a number that a sweeper drew to four digits; leave every other value as it is."""
    if re.fullmatch(r"-?\d*\.\d{5,}(e-?\d+)?", value):
        return f"{float(value):.4g}"
    return value


def lacks_error_estimate(variants: Sequence[Variant]) -> bool:
    """Return whether several variants have at most one finished run each, so that none is best."""
    return len(variants) > 1 and all(len(variant.finished) < 2 for variant in variants)


def ranking_metric(runs: Sequence[Run]) -> str:
    """Return the metric that ranks the runs: the loss, or bits per byte if vocabularies differ."""
    configs = [run.config for run in runs if run.config and run.rows]
    vocabularies = {(config.tokenizer.name, config.model.vocab_size) for config in configs}
    return "val/loss" if len(vocabularies) < 2 else "val/bits_per_byte"


def _is_ranked(runs: Sequence[Run]) -> bool:
    """Return whether losses rank the runs: they are of one text, and not of a study."""
    return not has_several_texts(runs) and not any(ARM in run.settings for run in runs)


def has_several_texts(runs: Sequence[Run]) -> bool:
    """Return whether runs were trained and evaluated on different texts.

    The rules of a generated text come from the seed. All variants of a sweep have the same seeds,
    but compared runs may differ in it.
    """
    configs = [run.config for run in runs if run.config and run.rows]
    texts = {astuple(config.data) for config in configs}
    seeds = {config.seed for config in configs if config.data.source == "synthetic"}
    return len(texts) > 1 or (is_comparison(runs) and len(seeds) > 1)


def rank_variants(runs: Sequence[Run]) -> list[Variant]:
    """Group runs into variants, best mean first, then non-finite means, then unfinished ones.

    If no loss ranks the runs, their variants keep the order of the runs.
    """
    metric = ranking_metric(runs)
    variants: dict[tuple, Variant] = {}
    for run in runs:
        settings = dict(run.settings)
        if RUN not in settings:
            settings.pop("seed", None)
        variant = variants.setdefault(tuple(sorted(settings.items())), Variant(settings, []))
        variant.runs.append(run)

    def order(variant: Variant) -> tuple:
        mean = variant.mean(metric)
        return not variant.measured, not isfinite(mean), mean if isfinite(mean) else 0

    return sorted(variants.values(), key=order) if _is_ranked(runs) else [*variants.values()]


def lead(variants: Sequence[Variant], metric: str) -> Difference:
    """Return by how much the mean of the second-best variant is worse than that of the best."""
    best, second = variants[:2]
    return welch_difference(second.values(metric), best.values(metric))


def find_tied_variant(variants: Sequence[Variant], metric: str) -> Variant | None:
    """Return the second-best variant if the best one does not beat it significantly.

    It is tied unless Welch's t-test finds p < `SIGNIFICANCE_LEVEL`, which accounts for the number
    of seeds.
    """
    if len(variants) < 2:
        return None
    return variants[1] if lead(variants, metric).p_value >= SIGNIFICANCE_LEVEL else None


def find_best_run(runs: Sequence[Run]) -> Run | None:
    """Return the best run of the best variant, or None if no run has a result or is ranked."""
    if not runs or not _is_ranked(runs):
        return None
    metric = ranking_metric(runs)
    candidates = [
        run for run in rank_variants(runs)[0].measured if isfinite(run.figures.get(metric, nan))
    ]
    return min(candidates, key=lambda run: run.figures[metric], default=None)


def reproduce_command(run: Run) -> str:
    """Return the shell command that trains this run again, without settings for other jobs."""
    settings = [
        f"{key}={value}"
        for key, value in run.overrides.items()
        if key != "sweep" and not (key in run.all_settings and explain_unused(run.config, key))
    ]
    return shlex.join(["python", "train.py", *settings])
