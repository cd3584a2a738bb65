"""Run the jobs of `python train.py -m …`, which Hydra starts, and summarize the sweep.

The tables and pages are made from the folders of the runs alone. Does not import torch.
"""

import contextlib
import gc
import hashlib
import io
import logging
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite, nan, prod
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig, OmegaConf

import cli
from cli.command_line import GROUPS, quote
from cli.config_file import escape_interpolation
from common.checkpoints import contains_run
from common.errors import UserError
from common.files import list_folder
from common.paths import expand_home, require_output_folder
from common.settings import format_value
from common.terminal import (
    Terminal,
    error_sentence,
    explain_error,
    print_stderr,
    printer,
)
from common.text import pluralize, printable
from sweeps.note import JOB_LOCK, JobNote, read_job, write_job
from sweeps.page import write_results
from sweeps.runs import (
    Run,
    format_settings,
    is_sweep,
    read_sweep,
    require_sweep,
)
from sweeps.table import print_sweep
from training.run_folder import new_run_dir

MUTABLE_ON_RESUME = ("max_steps", "wandb.")  # settings that may change when a sweep is resumed
MAX_CHECKED_VALUES = 50  # of one setting, before the sweep
MAX_JOB_NAME = 120  # characters of a job's folder name; file systems allow 255 bytes


@dataclass(frozen=True)
class SweepPlan:
    """The facts about a sweep that each of its jobs needs."""

    folder: Path
    start_folder: Path  # where the command was started; relative paths begin there
    config_dir: str | None  # --config-dir, which the jobs' commands repeat
    constant_keys: list[str]  # keys of the settings that all jobs share
    n_jobs: int | None  # None if it is not known before the sweep


def run_sweep(command_line: cli.CommandLine, train: Callable[[cli.Job], float]) -> None:
    """Have Hydra run the jobs of a sweep, then print their table.

    Exits with status 1 unless all jobs are finished, with 130 or 143 after a stop signal.
    """
    if "dry_run=true" in command_line.settings:
        preview_sweep(command_line, train)
        return
    plan = _plan_sweep(command_line)
    print_line = printer(Terminal())
    jobs = f"{pluralize(plan.n_jobs, 'job')}, " if plan.n_jobs else ""
    print_line(f"sweep    {jobs}in {plan.folder}")

    def run_hydra_job(cfg: DictConfig) -> float | None:
        return run_job(cfg, plan, train)

    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # jobs report their own failures
    launcher_failed = False
    try:
        cli.run_hydra(run_hydra_job, _hydra_arguments(command_line, plan.folder))
    except SystemExit:
        again = shlex.join(["python", "train.py", *_resume_arguments(command_line, plan.folder)])
        print_stderr(f"the sweep was stopped; to resume it:\n{again}")
        if not _remove_if_empty(plan.folder):
            summarize(plan.folder)
        raise
    except Exception as e:
        if _remove_if_empty(plan.folder):
            if explain_error(e) and str(e):
                raise
            raise UserError(
                f"no job could be started ({error_sentence(e)}): correct the settings of "
                "hydra.launcher and hydra.sweeper"
            ) from None
        launcher_failed = True  # jobs report their own errors: this one is of what starts them
        print_stderr(f"error: {error_sentence(e)}")

    if _remove_if_empty(plan.folder):
        raise UserError(
            f"the launcher ran no job in {plan.folder}: choose a hydra.sweep.dir that its jobs can "
            "write to, or another hydra/launcher"
        )
    runs = summarize(plan.folder)
    print_sweep(Terminal(), plan.folder, runs)
    if launcher_failed or any(run.failure or run.status != "finished" for run in runs):
        sys.exit(1)


def _plan_sweep(command_line: cli.CommandLine) -> SweepPlan:
    hydra_settings, overrides = sweep_settings(command_line)
    sweeper = hydra_settings.sweeper
    n_jobs = count_jobs(sweeper, overrides)
    check_values(command_line.config_dir, overrides)
    values = {override.key_or_group: override.value() for override in overrides}
    folder = open_sweep(hydra_settings.sweep.dir, resume=values.get("resume") == "auto")
    # For jobs in processes of their own, which may start anywhere
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return SweepPlan(
        folder=folder,
        start_folder=Path.cwd(),
        config_dir=command_line.config_dir,
        constant_keys=["resume"] + [o.key_or_group for o in overrides if not o.is_sweep_override()],
        n_jobs=n_jobs,
    )


def sweep_settings(command_line: cli.CommandLine) -> tuple[DictConfig, list[Override]]:
    """Return Hydra's settings, and the settings of the jobs: those typed and the preset's."""
    parser = OverridesParser.create()
    typed = parser.parse_overrides(command_line.settings)
    constant = [str(override.input_line) for override in typed if not override.is_sweep_override()]
    hydra_settings = cli.compose_settings(constant, command_line.config_dir).hydra
    params = hydra_settings.sweeper.get("params") or {}
    settings = {key: f"{key}={value}" for key, value in params.items()} | {
        override.key_or_group: override.input_line
        for override in typed
        if not override.key_or_group.startswith("hydra")
    }
    return hydra_settings, parser.parse_overrides(list(settings.values()))


def check_values(config_dir: str | None, overrides: Sequence[Override]) -> None:
    """Raise `UserError` if a value of a swept setting cannot work, whatever the others are."""
    constant = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
    for override in overrides:
        if override.is_discrete_sweep() and not isinstance(override.value(), Glob):
            for value in islice(override.sweep_string_iterator(), MAX_CHECKED_VALUES):
                cli.compose_job([*constant, f"{override.key_or_group}={value}"], config_dir)


def count_jobs(sweeper: DictConfig, overrides: Sequence[Override]) -> int | None:
    """Return the number of jobs, or None if it is not known before the sweep."""
    if not sweeper._target_.endswith(".BasicSweeper"):  # Hydra's own, which runs a grid
        is_exhaustible = "GridSampler" in str(sweeper.get("sampler"))
        return None if is_exhaustible else sweeper.get("n_trials")
    counts = []
    for override in overrides:
        if not override.is_sweep_override():
            continue
        value = override.value()
        if not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line} needs a sweeper that draws values: add hydra/sweeper=optuna"
            )
        if isinstance(value, Glob):
            return None
        counts.append(len(list(override.sweep_string_iterator())))
        if not counts[-1]:
            raise UserError(f"{override.input_line} has no values: give it some")
    return prod(counts)


def _hydra_arguments(command_line: cli.CommandLine, folder: Path) -> list[str]:
    settings = [s for s in command_line.settings if not s.startswith("hydra.sweep.dir=")]
    fixed = [f"hydra.sweep.dir={quote(str(folder))}", "hydra.mode=MULTIRUN"]  # over any preset's
    return [*settings, *fixed, *command_line.options]


def _resume_arguments(command_line: cli.CommandLine, folder: Path) -> list[str]:
    arguments = [
        argument
        for argument in command_line.typed
        if not argument.startswith(("resume=", "hydra.sweep.dir="))
    ]
    return [*arguments, "resume=auto", f"hydra.sweep.dir={folder}"]


def preview_sweep(command_line: cli.CommandLine, train: Callable[[cli.Job], float]) -> None:
    """Print the size and cost of each job of a sweep; exit with status 1 if a job cannot work."""
    hydra_settings, overrides = sweep_settings(command_line)
    count_jobs(hydra_settings.sweeper, overrides)  # refuses some sweeps
    check_values(command_line.config_dir, overrides)
    swept_keys = {o.key_or_group for o in overrides if o.is_sweep_override()}
    has_failed = False

    def preview_job(cfg: DictConfig) -> None:
        nonlocal has_failed
        hydra_job, output = HydraConfig.get(), io.StringIO()
        values = _typed_values(cfg, hydra_job.overrides.task)
        swept = {key: value for key, value in values.items() if key in swept_keys} or values
        title = printable(f"{hydra_job.job.num + 1}  {format_settings(swept)}", one_line=True)
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                config = OmegaConf.to_object(cfg)
                train(cli.Job(config, list(hydra_job.overrides.task), swept=list(swept)))
            printer(Terminal())(f"{title}  {output.getvalue().splitlines()[-1]}")
        except Exception as e:
            has_failed = True
            print_stderr(f"{title}  error: {explain_error(e) or error_sentence(e)}")

    with TemporaryDirectory() as folder:  # Hydra writes into a sweep's folder
        cli.run_hydra(preview_job, _hydra_arguments(command_line, Path(folder)))
    if has_failed:
        sys.exit(1)


# --- one job --------------------------------------------------------------------------------------


def run_job(cfg: DictConfig, plan: SweepPlan, train: Callable[[cli.Job], float]) -> float | None:
    """Train one job of a sweep in its own folder, or continue it, and return its best loss.

    The job's output goes to log.txt in its folder; the terminal gets one line. The result is None
    if the job failed: Optuna counts that as a failed trial, whereas nan would end its search.
    """
    os.chdir(plan.start_folder)  # Hydra (hydra.job.chdir) or a launcher may have left it
    hydra_job = HydraConfig.get()
    overrides = _typed_values(cfg, hydra_job.overrides.task)
    swept = {key: value for key, value in overrides.items() if key not in plan.constant_keys}
    path = plan.folder / job_name(swept)
    position = f"{hydra_job.job.num + 1}{f'/{plan.n_jobs}' if plan.n_jobs else ''}"
    title = printable(f"{position}  {format_settings(swept)}", one_line=True)
    print_line, start = printer(Terminal(file=sys.stdout)), time.time()

    loss, failure = nan, ""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / JOB_LOCK):  # an equal job that runs in parallel waits here
            note = _job_note(plan, overrides, list(swept))
            _check_unchanged(path, note)
            write_job(path, note)
            print_line(title)
            with (
                wandb_group(plan.folder.name),
                (path / "log.txt").open("a", encoding="utf-8") as log_file,
                contextlib.redirect_stdout(log_file),
                contextlib.redirect_stderr(log_file),
            ):
                cfg.run_dir, cfg.resume = escape_interpolation(str(path)), "auto"
                config = OmegaConf.to_object(cfg)
                loss = train(cli.Job(config, list(hydra_job.overrides.task), swept=list(swept)))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # a panic of a library in Rust is not an Exception
        failure = _describe_failure(e, path / "log.txt")
        print_stderr(printable(f"{title}  failed: {failure}", one_line=True))

    gc.collect()  # reference cycles of the job may hold its model
    with contextlib.suppress(UserError, OSError):  # the summary at the end reports it again
        write_job(path, replace(read_job(path), failure=failure))
        summarize(plan.folder)
        if not failure:
            print_line(f"{title}  {loss:.4f} val/loss  {time.time() - start:.0f} s")
    return loss if isfinite(loss) else None


def _typed_values(cfg: DictConfig, overrides: Sequence[str]) -> dict[str, str]:
    values = {}
    for override in overrides:
        key, _, value = override.partition("=")
        values[key] = value if key in GROUPS else format_value(OmegaConf.select(cfg, key))
    return values


def _job_note(plan: SweepPlan, overrides: dict[str, str], swept: list[str]) -> JobNote:
    repeated = {key: value for key, value in overrides.items() if key != "resume"}
    if plan.config_dir:
        repeated = {"--config-dir": plan.config_dir} | repeated
    return JobNote(repeated, swept)


def _check_unchanged(path: Path, note: JobNote) -> None:
    if not contains_run(path):
        return
    before, now = read_job(path).overrides, note.overrides
    changed = [
        f"{key}={before.get(key)}"
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key) and not key.startswith(MUTABLE_ON_RESUME)
    ]
    if changed:
        raise UserError(
            f"{path} was started with other settings ({', '.join(sorted(changed))}): use those, "
            "or choose another hydra.sweep.dir"
        )


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


def _describe_failure(error: BaseException, log_file: Path) -> str:
    """Return one line about a job's error; a bug's traceback is appended to its log."""
    if explanation := explain_error(error):
        return explanation
    with contextlib.suppress(OSError), log_file.open("a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    return error_sentence(error)


def job_name(settings: dict[str, str]) -> str:
    """Return the folder name of a job, which does not depend on the order of its settings."""
    full = ",".join(f"{key}={settings[key]}" for key in sorted(settings)) or "job"
    name = re.sub(r"[^\w.,=+-]", "_", full, flags=re.ASCII)[:MAX_JOB_NAME]
    if name == full:
        return name
    return f"{name}_{hashlib.sha256(full.encode()).hexdigest()[:8]}"


# --- the sweep's folder ---------------------------------------------------------------------------


def open_sweep(typed: str, resume: bool) -> Path:
    """Return the folder of a new or resumed sweep; without a path ("") a new one in runs/."""
    if not typed:
        return new_run_dir("sweep")
    folder = expand_home("hydra.sweep.dir", typed)
    require_output_folder(f"hydra.sweep.dir={typed}", folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in list_folder(folder)}
    has_jobs = names - {"multirun.yaml"}  # Hydra's, before a first job
    if has_jobs and not is_sweep(folder):
        raise UserError(
            f"hydra.sweep.dir={folder} is not empty and holds no sweep: choose another folder"
        )
    if has_jobs and not resume:
        raise UserError(
            f"hydra.sweep.dir={folder} already holds a sweep: add resume=auto to resume it, or "
            "choose another folder"
        )
    return folder


def _remove_if_empty(folder: Path) -> bool:
    if is_sweep(folder):
        return False
    (folder / "multirun.yaml").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder holds other files
        folder.rmdir()
    return True


def summarize(folder: Path) -> list[Run]:
    """Write sweep.csv and sweep.html from the runs in the folder, one process at a time."""
    require_sweep(folder)  # before a lock file is left in a folder of something else
    with FileLock(folder / ".lock"):
        runs = read_sweep(folder)
        write_results(folder, runs)
    return runs
