"""Run the jobs of `python train.py -m …`, and summarize the sweep.

A job is composed once, and every call of a sweep finds its folder by the hash of what was composed.
The tables and pages are made from the folders of the runs alone. Does not import torch.
"""

import contextlib
import copy
import gc
import hashlib
import io
import json
import logging
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import isfinite, nan
from pathlib import Path

from filelock import FileLock
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

import cli
from cli.command_line import CONFIGS, check_argument, quote
from cli.wandb_environment import refuse_in_sweep
from common.errors import UserError
from common.files import is_folder, list_folder
from common.paths import expand_home, require_output_folder
from common.terminal import (
    Terminal,
    error_sentence,
    explain_error,
    print_stderr,
    printer,
    replace_unprintable_characters,
)
from common.text import pluralize, printable
from config import Config, TokenizerConfig
from data.corpus import open_corpus
from data.tokens import corpus_fingerprint
from run.config_file import PER_COMMAND, absolute_paths
from run.run_dir import SWEEP_FILE, RunDir
from sweeps.page import write_results
from sweeps.ranking import name_settings
from sweeps.runs import (
    JobRecord,
    Run,
    format_settings,
    is_sweep,
    read_record,
    read_sweep,
    write_record,
)
from sweeps.table import print_sweep
from training.run_folder import new_run_dir

MAX_CHECKED_JOBS = 100  # of a sweep without one that can work, before it starts
MAX_JOB_NAME = 120  # characters of a job's folder name without the hash; 255 bytes are allowed
HASH_DIGITS = 10

Configure = Callable[..., cli.Job]  # `cli.configure` of a job; `log` prints notes
Train = Callable[[cli.Job], float]  # a checked job


@dataclass(frozen=True)
class SweepPlan:
    """The facts about a sweep that each of its jobs needs."""

    folder: Path
    start_folder: Path  # where the command was started; relative paths begin there
    jobs: dict[tuple[str, ...], cli.Job]  # of a grid, by their overrides
    compose_drawn: Callable[[Sequence[str]], cli.Job]  # a job whose values a sweeper has drawn
    configure: Configure
    train: Train


class JobLoader(ConfigLoaderImpl):
    """Gives Hydra's launchers what all jobs share; `cli.compose_job` composes each job."""

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Return the configuration that a launcher starts a job with."""
        config = copy.deepcopy(master_config)
        config.hydra.overrides.task = list(sweep_overrides)
        return config


def run_sweep(
    command_line: cli.CommandLine,
    configure: Configure,
    train: Train,
    report: Callable[[Path], None],
) -> None:
    """Have Hydra start the jobs of a sweep, then print their table and `report`; or preview them.

    Exits with status 1 unless all jobs are finished, with 128 + its number after a stop signal.

    Raises:
        UserError: If a value of a setting is impossible, or every job is; then nothing is written.
    """
    from training.device import pick_device  # imports torch
    from training.wandb_record import check_wandb

    search_path = create_config_search_path(str(CONFIGS))
    if command_line.config_dir:
        presets = expand_home("--config-dir", command_line.config_dir)
        search_path.prepend("command-line", str(presets.absolute()), anchor="schema")
    loader = JobLoader(search_path)
    composed, settings = sweep_settings(command_line, loader)
    is_grid = composed.hydra.sweeper._target_.endswith(".BasicSweeper")
    folder = find_sweep(composed.hydra.sweep.dir, resume=composed.resume == "auto")
    all_jobs = compose_jobs(settings, command_line.config_dir, is_grid)
    if composed.dry_run:
        placed = (place_job(folder, job) for job in all_jobs)
        preview_jobs(placed, lambda job: train(configure(job)))
        return
    jobs = list(all_jobs)
    trains_here = composed.hydra.launcher._target_.endswith((".BasicLauncher", ".JoblibLauncher"))

    def check_job(job: cli.Job) -> None:
        config = configure(place_job(folder, job), log=lambda line: None).config
        if trains_here:
            pick_device(config.device)
        if check_wandb(config.wandb) != "disabled":
            refuse_in_sweep()

    require_possible_job(jobs, check_job)
    folder = folder or new_run_dir("sweep")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWEEP_FILE).touch()
    jobs_of_grid = {tuple(job.overrides): job for job in jobs if is_grid}
    compose_drawn = partial(_compose_job, config_dir=command_line.config_dir, swept=jobs[0].swept)
    plan = SweepPlan(folder, Path.cwd(), jobs_of_grid, compose_drawn, configure, train)
    count = f"{pluralize(len(jobs), 'job')}, " if is_grid else ""
    printer(Terminal())(f"sweep    {count}in {folder}")

    is_stopped = False
    try:
        launch(settings, plan, loader)
    except SystemExit:
        typed = [a for a in command_line.typed if not a.startswith(("resume=", "hydra.sweep.dir="))]
        again = ["python", "train.py", *typed, "resume=auto", f"hydra.sweep.dir={folder}"]
        print_stderr(f"the sweep was stopped; to resume it:\n{shlex.join(again)}")
        summarize(folder)
        raise
    except Exception as e:  # jobs report their own errors: this one is of what starts them
        is_stopped = True
        print_stderr(
            f"error: Hydra ended the sweep ({error_sentence(e)}): correct the settings of "
            "hydra.launcher and hydra.sweeper"
        )
    runs = summarize(folder)
    print_sweep(Terminal(), folder, runs)
    report(folder)
    refused = [run for run in runs if run.failure and run.status == "finished"]
    for run in refused:  # which says nothing about the run itself
        RunDir(run.path).failure_file.unlink()
    if refused:
        summarize(folder)
    if is_stopped or any(run.failure or run.status != "finished" for run in runs):
        sys.exit(1)


def launch(settings: Sequence[Override], plan: SweepPlan, loader: ConfigLoaderImpl) -> None:
    """Have Hydra's sweeper and launcher call `run_job` for each job, here or in other processes."""
    # For jobs in processes of their own, which may start anywhere
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("WANDB_RUN_GROUP", plan.folder.name)
    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # jobs report their own failures
    typed = [str(s.input_line) for s in settings if s.key_or_group != "hydra.sweep.dir"]
    typed.append(f"hydra.sweep.dir={quote(str(plan.folder))}")

    def run_hydra_job(_: DictConfig) -> float | None:
        return run_job(HydraConfig.get().overrides.task, plan)

    hydra = Hydra(task_name="train", config_loader=loader)
    hydra.multirun("config", run_hydra_job, typed, with_log_configuration=False)


# --- the jobs before they start -------------------------------------------------------------------


def sweep_settings(
    command_line: cli.CommandLine, loader: ConfigLoaderImpl
) -> tuple[DictConfig, list[Override]]:
    """Return what all jobs share, and the settings of the jobs: those typed and the preset's."""
    parser = OverridesParser.create(config_loader=loader)
    typed = parser.parse_overrides(command_line.settings)
    constant = [str(o.input_line) for o in typed if not o.is_sweep_override()]
    composed = cli.compose_settings(constant, command_line.config_dir)
    params = composed.hydra.sweeper.get("params") or {}
    preset = [check_argument(f"{key}={value}", is_sweep=True) for key, value in params.items()]
    settings = [*parser.parse_overrides(preset), *typed]
    return composed, list({setting.key_or_group: setting for setting in settings}.values())


def compose_jobs(
    settings: Sequence[Override], config_dir: str | None, is_grid: bool
) -> Iterator[cli.Job]:
    """Compose the jobs of a grid; if a sweeper draws values, jobs that have each of them once.

    Raises:
        UserError: If a value cannot work, whatever the others are.
    """
    overrides = [o for o in settings if not o.key_or_group.startswith("hydra")]
    swept = [str(override.key_or_group) for override in overrides if override.is_sweep_override()]
    jobs = BasicSweeper.split_arguments(overrides, None)[0] if is_grid else _draw_jobs(overrides)
    if not jobs:
        raise UserError(f"{' or '.join(swept)} has no values: give it some")
    for job in jobs:
        yield _compose_job(job, config_dir, swept)


def _draw_jobs(overrides: Sequence[Override]) -> list[list[str]]:
    """Return settings of jobs in which each value occurs, and both ends of each interval."""
    columns = []
    for override in overrides:
        if not override.is_sweep_override():
            values = [override.get_value_element_as_str()]
        elif override.is_discrete_sweep():
            values = list(islice(override.sweep_string_iterator(), MAX_CHECKED_JOBS))
        else:
            values = [str(override.value().start), str(override.value().end)]
        columns.append([f"{override.get_key_element()}={value}" for value in values])
    count = max(map(len, columns), default=1)
    return [[values[number % len(values)] for values in columns] for number in range(count)]


def _compose_job(overrides: Sequence[str], config_dir: str | None, swept: Sequence[str]) -> cli.Job:
    return replace(cli.compose_job(list(overrides), config_dir), swept=swept)


def require_possible_job(jobs: Sequence[cli.Job], check: Callable[[cli.Job], None]) -> None:
    """Raise the first error of `check` if no job passes; one seed stands for all."""
    one_per_row = {hash_settings(job, "seed"): job for job in jobs}
    refusals = []
    for job in islice(one_per_row.values(), MAX_CHECKED_JOBS):
        try:
            check(job)
            return
        except UserError as e:
            refusals.append(e)
    raise refusals[0]


def preview_jobs(jobs: Iterable[cli.Job], train: Train) -> None:
    """Print the size and cost of each job of a sweep; exit with status 1 if a job cannot work.

    They do not depend on the seed, so that they are found once for jobs that differ only by it.
    """
    has_failed = False
    lines: dict[tuple[str, int], str] = {}
    for number, job in enumerate(jobs, 1):
        title, output = name_job(f"{number}", job), io.StringIO()
        remaining = hash_settings(job, "seed"), count_steps(job.config.run_dir)
        try:
            if remaining not in lines:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    train(job)
                lines[remaining] = output.getvalue().splitlines()[-1]
            printer(Terminal())(f"{title}  {lines[remaining]}")
        except Exception as e:
            has_failed = True
            print_stderr(f"{title}  error: {explain_error(e) or error_sentence(e)}")
    if has_failed:
        sys.exit(1)


def count_steps(run_dir: Path | str | None) -> int:
    """Return the number of steps that a job has taken, as far as they are saved."""
    return max(RunDir(Path(run_dir)).steps(), default=0) if run_dir else 0


# --- one job --------------------------------------------------------------------------------------


def run_job(overrides: Sequence[str], plan: SweepPlan) -> float | None:
    """Train one job of a sweep in its own folder, or continue it, and return its best loss.

    The job's output goes to log.txt in its folder; the terminal gets one line. The result is None
    if the job failed: Optuna counts that as a failed trial, whereas nan would end its search.
    """
    os.chdir(plan.start_folder)  # Hydra (hydra.job.chdir) or a launcher may have left it
    replace_unprintable_characters()  # in the process that a launcher has started
    job = plan.jobs.get(tuple(overrides)) or plan.compose_drawn(overrides)
    number = HydraConfig.get().job.num + 1
    title = name_job(f"{number}/{len(plan.jobs)}" if plan.jobs else f"{number}", job)
    folder = RunDir(find_job_folder(plan.folder, job))
    print_line, start = printer(Terminal(file=sys.stdout)), time.time()

    loss, failure = nan, ""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(folder.job_lock),  # an equal job that runs in parallel waits here
            folder.job_log.open("a", encoding="utf-8") as log_file,
            contextlib.redirect_stdout(log_file),
            contextlib.redirect_stderr(log_file),
        ):
            ready = prepare_job(job, folder.path, plan)
            print_line(title)
            loss = plan.train(ready)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # a panic of a library in Rust is not an Exception
        explanation = explain_error(e)
        failure = explanation or error_sentence(e)
        if explanation is None:  # a bug
            with contextlib.suppress(OSError), folder.job_log.open("a") as log_file:
                traceback.print_exception(e, file=log_file)
        print_stderr(printable(f"{title}  failed: {failure}", one_line=True))

    gc.collect()  # reference cycles of the job may hold its model
    with contextlib.suppress(UserError, OSError):  # the summary at the end reports it again
        folder.failure_file.unlink(missing_ok=True)
        if failure:
            folder.failure_file.write_text(failure, encoding="utf-8", errors="backslashreplace")
        summarize(plan.folder)
        if not failure:
            print_line(f"{title}  {loss:.4f} val/loss  {time.time() - start:.0f} s")
    return loss if isfinite(loss) else None


def prepare_job(job: cli.Job, path: Path, plan: SweepPlan) -> cli.Job:
    """Configure a job that begins, continues or is finished in its folder, and record it there.

    Raises:
        UserError: If it cannot work, or what is in the folder is not of its text or its length.
    """
    steps_taken = count_steps(path)
    if not steps_taken:
        write_record(path, record_job(job))
    configured = plan.configure(place_job(plan.folder, job))
    record, text = read_record(path), hash_text(configured.config)
    max_steps = job.config.max_steps
    if steps_taken and text != record.text:
        raise UserError(
            "it was trained on another text than the one there now: restore that text, or train on "
            "this one with another hydra.sweep.dir"
        )
    if max_steps < steps_taken:
        raise UserError(
            f"it has taken {pluralize(steps_taken, 'step')}, more than max_steps={max_steps}: "
            "use at least as many, or another hydra.sweep.dir"
        )
    write_record(path, replace(record.continued(steps_taken, max_steps), text=text))
    return configured


def hash_text(config: Config) -> str:
    """Return the hash of a job's text, which its tokenizer does not change; "" if generated."""
    if config.data.source == "synthetic":
        return ""
    return corpus_fingerprint(open_corpus(config.data), TokenizerConfig())[:HASH_DIGITS]


def name_job(number: str, job: cli.Job) -> str:
    """Return the number and the swept settings of a job for the terminal."""
    return printable(f"{number}  {name_settings(_swept_settings(job))}", one_line=True)


def _swept_settings(job: cli.Job) -> dict[str, str]:
    settings = describe_job(job)
    return {key: settings[key] for key in job.swept}


# --- what a job is --------------------------------------------------------------------------------


def hash_settings(job: cli.Job, *ignored: str) -> str:
    """Return the hash of what was composed for a job, without what is of a command.

    `max_steps` counts only if it is swept, so that a longer sweep continues the jobs.
    """
    left_out = {*PER_COMMAND, *ignored} | ({"max_steps"} - {*job.swept})
    settings = {
        key: value
        for key, value in format_settings(absolute_paths(job.config)).items()
        if key not in left_out and not key.startswith("wandb.")
    }
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:HASH_DIGITS]


def describe_job(job: cli.Job) -> dict[str, str]:
    """Return every setting of a job as it was composed, and its presets as they were typed."""
    presets = {"--config-dir": job.config_dir} if job.config_dir else {}
    typed = {key: override.partition("=")[2] for key, override in zip(job.keys, job.overrides)}
    return presets | typed | format_settings(job.config)


def record_job(job: cli.Job) -> JobRecord:
    """Return the record of a job that has not begun; its paths are absolute."""
    settings = describe_job(replace(job, config=absolute_paths(job.config)))
    keys = [key for key in ("--config-dir", *job.keys) if key in settings]
    typed = [key for key in keys if key not in ("resume", "sweep")]
    return JobRecord(hash_settings(job), hash_settings(job, "seed"), settings, typed)


# --- the sweep's folder ---------------------------------------------------------------------------


def place_job(folder: Path | None, job: cli.Job) -> cli.Job:
    """Return the job with its folder in that of the sweep, in which it starts or continues.

    In a sweep that has no folder yet, it starts. Its number of steps is that of this call.
    """
    if folder is None:
        return replace(job, config=replace(job.config, resume=False))
    path = find_job_folder(folder, job)
    config = replace(job.config, run_dir=str(path), resume="auto")
    length = [] if "max_steps" in job.keys else [f"max_steps={config.max_steps}"]
    return replace(job, config=config, overrides=[*job.overrides, *length])


def find_job_folder(folder: Path, job: cli.Job) -> Path:
    """Return the folder of a job, whose name ends with its hash: the one that it has, or a new one.

    The name begins with the swept settings, in which two calls may differ.
    """
    ending = f"_{hash_settings(job)}"
    for path in list_folder(folder):
        if path.name.endswith(ending) and is_folder(path):
            return path
    settings = _swept_settings(job)
    name = ",".join(f"{key}={settings[key]}" for key in sorted(settings)) or "job"
    return folder / f"{name_part(name)}{ending}"


def name_part(text: str) -> str:
    """Return a text as it can be in the name of a folder."""
    return re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII)[:MAX_JOB_NAME]


def find_sweep(typed: str, resume: bool) -> Path | None:
    """Return the folder of a new or resumed sweep that was typed, None if none was ("")."""
    if not typed:
        return None
    folder = expand_home("hydra.sweep.dir", typed)
    require_output_folder(f"hydra.sweep.dir={typed}", folder)
    if list_folder(folder) and not is_sweep(folder):
        raise UserError(
            f"hydra.sweep.dir={folder} is not empty and holds no sweep of this version of "
            "GlassGPT: choose another folder; python -m sweeps FOLDER out=NEW compares its runs"
        )
    if is_sweep(folder) and not resume:
        raise UserError(
            f"hydra.sweep.dir={folder} already holds a sweep: add resume=auto to resume it, or "
            "choose another folder"
        )
    return folder


def summarize(folder: Path) -> list[Run]:
    """Write sweep.csv and sweep.html from the runs in the folder, one process at a time."""
    with FileLock(folder / ".lock"):
        runs = read_sweep(folder)
        write_results(folder, runs)
    return runs
