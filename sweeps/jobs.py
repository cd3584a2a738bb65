"""Run the jobs of `python train.py -m …`, which Hydra starts, and summarize the sweep.

A job is its resolved settings: jobs with the same settings share one folder, in every call of a
sweep. The tables and pages are made from the folders of the runs alone. Does not import torch.
"""

import contextlib
import gc
import hashlib
import io
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import isfinite, nan
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

import cli
from cli.command_line import TEXTS, quote
from cli.job import fit_to_overrides
from cli.wandb_environment import refuse_in_sweep
from common.checkpoints import CONFIG_FILE
from common.errors import UserError
from common.files import exists, is_folder, list_folder
from common.paths import expand_home, require_output_folder
from common.terminal import (
    Terminal,
    error_sentence,
    explain_error,
    print_stderr,
    printer,
    replace_unprintable_characters,
)
from common.text import pluralize, printable, shell_command
from config import Config
from sweeps.page import write_results
from sweeps.ranking import name_settings
from sweeps.runs import (
    FAILURE,
    OVERRIDES,
    Run,
    format_settings,
    identify,
    is_sweep,
    job_folders,
    read_request,
    read_sweep,
    require_sweep,
    write_request,
)
from sweeps.table import print_sweep
from training.run_folder import new_run_dir

JOB_LOCK = ".job.lock"  # held while a job runs
# In a sweep's folder during a call: the jobs that it may not continue, which stay as they were.
REFUSALS = ".refusals.txt"
MAX_CHECKED_VALUES = 50  # of one setting, before the sweep
MAX_CHECKED_JOBS = 100  # of a grid without one that can work
MAX_JOB_NAME = 120  # characters of a job's folder name; file systems allow 255 bytes

Configure = Callable[..., cli.Job]  # `cli.configure` of a job; `log` prints notes
Train = Callable[[cli.Job], float]  # a checked job


@dataclass(frozen=True)
class SweepPlan:
    """The facts about a sweep that each of its jobs needs."""

    folder: Path
    start_folder: Path  # where the command was started; relative paths begin there
    config_dir: str | None  # --config-dir, which the jobs' commands repeat
    constant_keys: list[str]  # keys of the settings that all jobs share
    n_jobs: int | None  # None if it is not known before the sweep
    configure: Configure
    train: Train


def run_sweep(
    command_line: cli.CommandLine,
    configure: Configure,
    train: Train,
    report: Callable[[Path], None],
) -> None:
    """Have Hydra run the jobs of a sweep, then print their table and `report`; or preview them.

    Exits with status 1 unless all jobs are finished, with 128 + its number after a stop signal.

    Raises:
        UserError: If a value of a setting is impossible, or every job is; then nothing is written.
    """
    composed, overrides = sweep_settings(command_line)
    n_jobs = count_jobs(composed.hydra.sweeper, overrides)
    constant_keys = [o.key_or_group for o in overrides if not o.is_sweep_override()]
    check_values(command_line.config_dir, overrides)
    folder = find_sweep(composed.hydra.sweep.dir, resume=composed.resume == "auto")

    if composed.dry_run:
        preview_jobs(
            command_line, constant_keys, lambda job: train(configure(place_job(folder, job)))
        )
        return
    trains_here = composed.hydra.launcher._target_.endswith((".BasicLauncher", ".JoblibLauncher"))

    def check_job(job: cli.Job) -> None:
        job = configure(place_job(folder, job), log=lambda line: None)
        check_machine(job.config, trains_here)

    if not any(isinstance(override.value(), Glob) for override in overrides):
        check_grid(command_line.config_dir, overrides, check_job)
    folder = folder or new_run_dir("sweep")
    folder.mkdir(parents=True, exist_ok=True)
    _take_refusals(folder)  # of a call that was stopped
    plan = SweepPlan(
        folder,
        Path.cwd(),
        command_line.config_dir,
        ["resume", *constant_keys],
        n_jobs,
        configure,
        train,
    )
    jobs = f"{pluralize(n_jobs, 'job')}, " if n_jobs else ""
    printer(Terminal())(f"sweep    {jobs}in {folder}")
    # For jobs in processes of their own, which may start anywhere
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # jobs report their own failures

    def run_hydra_job(cfg: DictConfig) -> float | None:
        return run_job(cfg, plan)

    reason = ""
    try:
        cli.run_hydra(run_hydra_job, _hydra_arguments(command_line, folder))
    except SystemExit:
        typed = [a for a in command_line.typed if not a.startswith(("resume=", "hydra.sweep.dir="))]
        again = ["python", "train.py", *typed, "resume=auto", f"hydra.sweep.dir={folder}"]
        goes_on = "" if trains_here else ", but jobs that are already submitted go on"
        print_stderr(f"the sweep was stopped{goes_on}; to resume it:\n{shell_command(again)}")
        if is_sweep(folder):
            summarize(folder)
        raise
    except Exception as e:  # jobs report their own errors: this one is of what starts them
        reason = error_sentence(e)

    if not is_sweep(folder):
        (folder / "multirun.yaml").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder holds other files
            folder.rmdir()
        raise UserError(
            f"no job could be started in {folder} ({reason or 'the launcher ran none'}): "
            "correct the settings of hydra.launcher and hydra.sweeper"
        )
    if reason:
        print_stderr(f"error: {reason}")
    runs = summarize(folder)
    print_sweep(Terminal(), folder, runs)
    refusals = _take_refusals(folder)
    for refusal in refusals:
        printer(Terminal(), wrap=True)(f"refused     {refusal}")
    report(folder)
    if reason or refusals or any(run.failure or run.status != "finished" for run in runs):
        sys.exit(1)


def sweep_settings(command_line: cli.CommandLine) -> tuple[DictConfig, list[Override]]:
    """Return what all jobs share, and the settings of the jobs: those typed and the preset's."""
    parser = OverridesParser.create()
    typed = parser.parse_overrides(command_line.settings)
    composed = cli.compose_settings(constant_settings(typed), command_line.config_dir)
    params = composed.hydra.sweeper.get("params") or {}
    settings = {key: f"{key}={value}" for key, value in params.items()} | {
        override.key_or_group: override.input_line
        for override in typed
        if not override.key_or_group.startswith("hydra")
    }
    overrides = parser.parse_overrides(list(settings.values()))
    for override in overrides:
        _check_texts(override)
    return composed, overrides


def _check_texts(override: Override) -> None:
    """Raise `UserError` if YAML or Hydra's grammar has changed a text, as 007 to 7."""
    value = override.value()
    texts = value.list if isinstance(value, ChoiceSweep) else [value]
    if override.key_or_group in TEXTS and any(isinstance(text, (int, float)) for text in texts):
        raise UserError(
            f"{override.input_line} has a number, true or false where a text is needed: put each "
            f"text in quotes; in a preset, {override.key_or_group}: \"'007','008'\""
        )


def check_machine(config: Config, trains_here: bool) -> None:
    """Raise `UserError` if W&B's settings, or the device if it trains here, do not work."""
    from training.device import pick_device  # imports torch
    from training.wandb_record import check_wandb

    if trains_here:
        pick_device(config.device)
    if check_wandb(config.wandb) != "disabled":
        refuse_in_sweep()


def check_values(config_dir: str | None, overrides: Sequence[Override]) -> None:
    """Raise `UserError` if a value of a swept setting cannot work, whatever the others are."""
    constant = constant_settings(overrides)
    for axis in swept_axes(overrides):
        for setting in axis[:MAX_CHECKED_VALUES]:
            cli.compose_job([*constant, setting], config_dir)


def check_grid(
    config_dir: str | None, overrides: Sequence[Override], check: Callable[[cli.Job], None]
) -> None:
    """Raise the first error of `check` if no job of the grid passes; one seed stands for all."""
    constant, refusals = constant_settings(overrides), []
    axes = [axis[:1] if axis[0].startswith("seed=") else axis for axis in swept_axes(overrides)]
    for swept in islice(product(*axes), MAX_CHECKED_JOBS):
        job = cli.compose_job([*constant, *swept], config_dir)
        try:
            check(replace(job, swept=[setting.partition("=")[0] for setting in swept]))
            return
        except UserError as e:
            refusals.append(e)
    if len(refusals) < MAX_CHECKED_JOBS:
        raise refusals[0]


def constant_settings(overrides: Sequence[Override]) -> list[str]:
    """Return the settings that all jobs share, as they were typed."""
    return [str(o.input_line) for o in overrides if not o.is_sweep_override()]


def swept_axes(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the values of each swept setting, as KEY=VALUE; of an interval, its ends."""
    axes = []
    for override in overrides:
        sweep, values = override.value(), []
        if isinstance(sweep, IntervalSweep):
            values = [str(sweep.start), str(sweep.end)]
        elif override.is_discrete_sweep() and not isinstance(sweep, Glob):
            values = list(override.sweep_string_iterator())
        if values:
            axes.append([f"{override.key_or_group}={value}" for value in values])
    return axes


def count_jobs(sweeper: DictConfig, overrides: Sequence[Override]) -> int | None:
    """Return the number of jobs of a grid; None if the sweeper or a pattern decides it later."""
    if not sweeper._target_.endswith(".BasicSweeper"):
        return None
    n_jobs = 1
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line} needs a sweeper that draws values: add hydra/sweeper=optuna"
            )
        if isinstance(override.value(), Glob):
            return None
        if override.is_sweep_override():
            n_jobs *= len(list(override.sweep_string_iterator()))
        if not n_jobs:
            raise UserError(f"{override.input_line} has no values: give it some")
    return n_jobs


def _hydra_arguments(
    command_line: cli.CommandLine, folder: Path, replaced: tuple[str, ...] = ()
) -> list[str]:
    replaced = ("hydra.sweep.dir=", *replaced)
    settings = [s for s in command_line.settings if not s.startswith(replaced)]
    fixed = [f"hydra.sweep.dir={quote(str(folder))}", "hydra.mode=MULTIRUN"]  # over any preset's
    return [*settings, *fixed, *command_line.options]


def preview_jobs(command_line: cli.CommandLine, constant_keys: Sequence[str], train: Train) -> None:
    """Print the size and cost of each job of a sweep; exit with status 1 if a job cannot work."""
    has_failed = False

    def preview_job(cfg: DictConfig) -> None:
        nonlocal has_failed
        job, output = _read_job(cfg, constant_keys), io.StringIO()
        title = _title(job, None)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                train(job)
            printer(Terminal())(f"{title}  {output.getvalue().splitlines()[-1]}")
        except Exception as e:
            has_failed = True
            print_stderr(f"{title}  error: {explain_error(e) or error_sentence(e)}")

    with TemporaryDirectory() as folder:  # Hydra writes into a sweep's folder
        launcher = ("hydra/launcher=", "hydra.launcher.")  # a cluster is not needed
        arguments = _hydra_arguments(command_line, Path(folder), launcher)
        cli.run_hydra(preview_job, ["hydra/launcher=basic", *arguments])
    if has_failed:
        sys.exit(1)


# --- one job --------------------------------------------------------------------------------------


def run_job(cfg: DictConfig, plan: SweepPlan) -> float | None:
    """Train one job of a sweep in its own folder, or continue it, and return its best loss.

    The job's output goes to log.txt in its folder; the terminal gets one line. The result is None
    if the job failed: Optuna counts that as a failed trial, whereas nan would end its search.
    """
    os.chdir(plan.start_folder)  # Hydra (hydra.job.chdir) or a launcher may have left it
    replace_unprintable_characters()  # in the process that a launcher has started
    job = _read_job(cfg, plan.constant_keys)
    title = _title(job, plan.n_jobs)
    request = _request(job)
    job = place_job(plan.folder, job)
    path = Path(str(job.config.run_dir))
    overrides = [override for override in job.overrides if not override.startswith("resume=")]
    if plan.config_dir:
        overrides.insert(0, f"--config-dir={plan.config_dir}")
    print_line, start = printer(Terminal(file=sys.stdout)), time.time()

    loss, failure = nan, ""
    notes: list[str] = []
    last_start = _last_start(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / JOB_LOCK):  # an equal job that runs in parallel waits here
            if not _is_requested(path):
                write_request(path, overrides, request)
            job = plan.configure(job, log=notes.append)
            print_line(title)
            with (
                wandb_group(plan.folder.name),
                (path / "log.txt").open("a", encoding="utf-8") as log_file,
                contextlib.redirect_stdout(log_file),
                contextlib.redirect_stderr(log_file),
            ):
                for note in notes:
                    print(note)
                loss = plan.train(job)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # a panic of a library in Rust is not an Exception
        explanation = explain_error(e)
        failure = explanation or error_sentence(e)
        if explanation is None:  # a bug
            with contextlib.suppress(OSError), (path / "log.txt").open("a") as log_file:
                traceback.print_exception(e, file=log_file)
        print_stderr(printable(f"{title}  failed: {failure}", one_line=True))

    gc.collect()  # reference cycles of the job may hold its model
    with contextlib.suppress(UserError, OSError):  # the summary at the end reports it again
        if not failure:
            (path / FAILURE).unlink(missing_ok=True)
        elif last_start and _last_start(path) == last_start:  # refused before it could go on
            with (plan.folder / REFUSALS).open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{path.name}: {failure}\n")
        else:
            (path / FAILURE).write_text(failure, encoding="utf-8", errors="backslashreplace")
        summarize(plan.folder)
        if not failure:
            print_line(f"{title}  {loss:.4f} val/loss  {time.time() - start:.0f} s")
    return loss if isfinite(loss) else None


def _read_job(cfg: DictConfig, constant_keys: Sequence[str]) -> cli.Job:
    job = cli.Job(OmegaConf.to_object(cfg), list(HydraConfig.get().overrides.task))
    return replace(job, swept=[key for key in job.keys if key not in constant_keys])


def _swept_settings(job: cli.Job) -> dict[str, str]:
    settings = format_settings(job.config)
    values = {key: override.partition("=")[2] for key, override in zip(job.keys, job.overrides)}
    return {key: settings.get(key, values[key]) for key in job.swept}


def _title(job: cli.Job, n_jobs: int | None) -> str:
    number = HydraConfig.get().job.num + 1
    position = f"{number}/{n_jobs}" if n_jobs else f"{number}"
    return printable(f"{position}  {name_settings(_swept_settings(job))}", one_line=True)


@contextlib.contextmanager
def wandb_group(name: str) -> Iterator[None]:
    """Put the W&B runs of a sweep into one group, unless WANDB_RUN_GROUP names another."""
    previous = os.environ.get("WANDB_RUN_GROUP")
    os.environ["WANDB_RUN_GROUP"] = previous or name
    try:
        yield
    finally:  # a notebook goes on after the sweep
        del os.environ["WANDB_RUN_GROUP"]
        if previous is not None:
            os.environ["WANDB_RUN_GROUP"] = previous


# --- the sweep's folder ---------------------------------------------------------------------------


def place_job(folder: Path | None, job: cli.Job) -> cli.Job:
    """Return the job with its folder in that of the sweep, in which it starts or continues.

    In a sweep that has no folder yet, it starts.
    """
    if folder is None:
        return replace(job, config=replace(job.config, resume=False))
    path = find_job_folder(folder, identify(_request(job), job.keys), _swept_settings(job))
    return replace(job, config=replace(job.config, run_dir=str(path), resume="auto"))


def _request(job: cli.Job) -> Config:
    return fit_to_overrides(job.config, job.keys, log=lambda line: None)


def _is_requested(path: Path) -> bool:
    """Return whether a folder holds the request of a job, in files that are not damaged."""
    with contextlib.suppress(UserError, OSError):
        read_request(path)
        return True
    return False


def _last_start(path: Path) -> int:
    """Return when a job last began to train or continued, in ns; 0 if it never did."""
    config = path / CONFIG_FILE  # which the run writes when nothing can refuse it any more
    return config.stat().st_mtime_ns if exists(config) else 0


def find_job_folder(folder: Path, wanted: dict[str, str], swept: dict[str, str]) -> Path:
    """Return the folder of the job with this identity: the one that it has, or a new one.

    A job whose `max_steps` alone is different is continued, unless the sweep compares several.
    """
    names, other_lengths = [], []
    for path in job_folders(folder):
        with contextlib.suppress(UserError):  # one that cannot be read is no match
            identity = read_request(path).identity
            names.append(path.name)
            if identity == wanted:
                return path
            if identity | {"max_steps": wanted["max_steps"]} == wanted:
                other_lengths.append(path)
    if len(other_lengths) == 1 and "max_steps" not in swept:
        return other_lengths[0]
    name = job_name(swept)
    return folder / (name if name not in names else _with_hash(name, str(wanted)))


def job_name(settings: dict[str, str]) -> str:
    """Return the folder name of a job, which does not depend on the order of its settings."""
    full = ",".join(f"{key}={settings[key]}" for key in sorted(settings)) or "job"
    name = re.sub(r"[^\w.,=+-]", "_", full, flags=re.ASCII)[:MAX_JOB_NAME]
    return name if name == full else _with_hash(name, full)


def _with_hash(name: str, text: str) -> str:
    return f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def find_sweep(typed: str, resume: bool) -> Path | None:
    """Return the folder of a new or resumed sweep that was typed, None if none was ("")."""
    if not typed:
        return None
    folder = expand_home("hydra.sweep.dir", typed)
    require_output_folder(f"hydra.sweep.dir={typed}", folder)
    others = [path for path in list_folder(folder) if not _may_precede_first_job(path)]
    if others and not is_sweep(folder):
        raise UserError(
            f"hydra.sweep.dir={folder} is not empty and holds no sweep: choose another folder"
        )
    if is_sweep(folder) and not resume:
        raise UserError(
            f"hydra.sweep.dir={folder} already holds a sweep: add resume=auto to resume it, or "
            "choose another folder"
        )
    return folder


def _take_refusals(folder: Path) -> list[str]:
    """Return the jobs of this call that were refused, with the reasons, and remove their file."""
    path = folder / REFUSALS
    if not exists(path):
        return []
    refusals = path.read_text(encoding="utf-8").splitlines()
    path.unlink()
    return refusals


def _may_precede_first_job(path: Path) -> bool:
    """Return whether a sweep that was killed before its first job was recorded may leave a path."""
    if not is_folder(path):
        return path.name == "multirun.yaml"  # Hydra's
    return {inside.name for inside in list_folder(path)} <= {JOB_LOCK, Path(OVERRIDES).parts[0]}


def summarize(folder: Path) -> list[Run]:
    """Write sweep.csv and sweep.html from the runs in the folder, one process at a time."""
    require_sweep(folder)  # before a lock file is left in a folder of something else
    with FileLock(folder / ".lock"):
        runs = read_sweep(folder)
        write_results(folder, runs)
    return runs
