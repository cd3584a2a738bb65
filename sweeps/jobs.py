"""Run the jobs of `python train.py -m …`, and summarize the sweep.

The tables and pages are made from the folders of the runs alone. Does not import torch.
"""

import contextlib
import gc
import io
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, nan
from pathlib import Path

from filelock import FileLock

import cli
from cli.wandb_environment import refuse_in_sweep
from common.errors import UserError
from common.files import list_folder
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
from config import Config
from run.run_dir import SWEEP_FILE, RunDir, new_run_dir
from sweeps.identity import (
    assign_folder,
    find_job_folder,
    hash_settings,
    hash_text,
    name_job,
    record_job,
)
from sweeps.launching import compose_jobs, launch, make_loader, parse_settings
from sweeps.page import write_results
from sweeps.runs import Run, is_sweep, read_record, read_sweep, write_record
from sweeps.table import print_sweep

Configure = Callable[..., cli.Job]  # `cli.configure` of a job; `log` prints notes
Train = Callable[[cli.Job], float]  # a checked job


@dataclass(frozen=True)
class Sweep:
    """The facts of a sweep that a process needs to run one of its jobs; launchers pickle them."""

    folder: Path
    start_folder: Path  # where the command was started; relative paths begin there
    jobs: Sequence[cli.Job]  # all jobs of a grid; examples if a sweeper draws the values
    is_grid: bool
    configure: Configure
    train: Train

    def job(self, overrides: Sequence[str], number: int) -> cli.Job:
        """Return a job of a grid by its number, or compose the one that a sweeper has drawn."""
        if self.is_grid:
            return self.jobs[number - 1]
        first = self.jobs[0]
        return replace(cli.compose_job([*overrides], first.config_dir), swept=first.swept)


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
    # Settings and jobs
    loader = make_loader(command_line.config_dir)
    shared, settings = parse_settings(command_line, loader)
    folder = find_sweep(shared.hydra.sweep.dir, resume=shared.resume == "auto")
    is_grid = shared.hydra.sweeper._target_.endswith(".BasicSweeper")
    composed = compose_jobs(settings, command_line.config_dir, is_grid)
    if shared.dry_run:
        jobs_in_folders = [assign_folder(job, folder) for job in composed]
        preview_jobs(jobs_in_folders, lambda job: train(configure(job)))
        return

    # Checks
    jobs = list(composed)
    launcher = shared.hydra.launcher._target_
    trains_here = launcher.endswith((".BasicLauncher", ".JoblibLauncher"))

    def check(job: cli.Job) -> None:
        placed = assign_folder(job, folder)
        check_settings_and_machine(configure(placed, log=lambda line: None).config, trains_here)

    require_possible_job(jobs, check)

    # Jobs
    sweep = Sweep(folder or new_run_dir("sweep"), Path.cwd(), jobs, is_grid, configure, train)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    (sweep.folder / SWEEP_FILE).touch()
    count = f"{pluralize(len(jobs), 'job')}, " if is_grid else ""
    printer(Terminal())(f"sweep    {count}in {sweep.folder}")
    try:
        launch(settings, sweep.folder, loader, partial(run_job, sweep=sweep))
    except SystemExit:
        _print_how_to_resume(command_line, sweep.folder)
        rewrite_results(sweep.folder)
        raise
    except Exception as e:  # jobs report their own errors: this one is of what starts them
        raise UserError(
            f"Hydra ended the sweep ({error_sentence(e)}): correct the settings of hydra.launcher "
            "and hydra.sweeper"
        ) from None

    # Results
    runs = rewrite_results(sweep.folder)
    print_sweep(Terminal(), sweep.folder, runs)
    report(sweep.folder)
    _forget_refusals(sweep.folder, runs)
    if any(run.failure or run.status != "finished" for run in runs):
        sys.exit(1)


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


def rewrite_results(folder: Path) -> list[Run]:
    """Write sweep.csv and sweep.html from the runs in the folder, one process at a time."""
    with FileLock(folder / ".lock"):
        runs = read_sweep(folder)
        write_results(folder, runs)
    return runs


def _print_how_to_resume(command_line: cli.CommandLine, folder: Path) -> None:
    of_this_call = ("resume=", "hydra.sweep.dir=")
    typed = [argument for argument in command_line.typed if not argument.startswith(of_this_call)]
    again = ["python", "train.py", *typed, "resume=auto", f"hydra.sweep.dir={folder}"]
    print_stderr(f"the sweep was stopped; to resume it:\n{shlex.join(again)}")


def _forget_refusals(folder: Path, runs: Sequence[Run]) -> None:
    """Remove why finished runs were refused, which says nothing about the runs themselves."""
    refused = [run for run in runs if run.failure and run.status == "finished"]
    for run in refused:
        RunDir(run.path).failure_file.unlink()
    if refused:
        rewrite_results(folder)


# --- the jobs before they start -------------------------------------------------------------------


def check_settings_and_machine(config: Config, trains_here: bool) -> None:
    """Raise `UserError` if a job's device or the W&B settings of this machine cannot work."""
    from training.device import pick_device  # imports torch
    from training.wandb_record import check_wandb

    if trains_here:
        pick_device(config.device)
    if check_wandb(config.wandb) != "disabled":
        refuse_in_sweep()


def require_possible_job(jobs: Sequence[cli.Job], check: Callable[[cli.Job], None]) -> None:
    """Raise the first error of `check` if no job passes."""
    refusals = []
    for job in jobs:
        try:
            check(job)
            return
        except UserError as e:
            refusals.append(e)
    raise refusals[0]


def preview_jobs(jobs: Sequence[cli.Job], plan: Train) -> None:
    """Print the size and cost of each job of a sweep; exit with status 1 if a job cannot work.

    They do not depend on the seed, so that they are found once for jobs that differ only by it.
    `plan` prints them in its last line.
    """
    has_failed = False
    lines: dict[tuple[str, int], str] = {}
    for number, job in enumerate(jobs, 1):
        title = name_job(f"{number:>{len(str(len(jobs)))}}", job)
        steps = RunDir(Path(job.config.run_dir)).steps() if job.config.run_dir else []
        remaining = hash_settings(job, "seed"), max(steps, default=0)
        try:
            if remaining not in lines:
                lines[remaining] = _last_printed_line(plan, job)
            printer(Terminal())(f"{title}  {lines[remaining]}")
        except Exception as e:
            has_failed = True
            print_stderr(f"{title}  error: {explain_error(e) or error_sentence(e)}")
    if has_failed:
        sys.exit(1)


def _last_printed_line(plan: Train, job: cli.Job) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        plan(job)
    return output.getvalue().splitlines()[-1]


# --- one job --------------------------------------------------------------------------------------


def run_job(overrides: Sequence[str], number: int, sweep: Sweep) -> float | None:
    """Train one job of a sweep in its own folder, or continue it, and return its best loss.

    The job's output goes to log.txt in its folder; the terminal gets one line. The result is None
    if the job failed: Optuna counts that as a failed trial, whereas nan would end its search.
    """
    os.chdir(sweep.start_folder)  # Hydra (hydra.job.chdir) or a launcher may have left it
    replace_unprintable_characters()  # in the process that a launcher has started
    job = sweep.job(overrides, number)
    title = name_job(f"{number}/{len(sweep.jobs)}" if sweep.is_grid else f"{number}", job)
    run = RunDir(find_job_folder(sweep.folder, job))
    print_line = printer(Terminal(file=sys.stdout))
    start = time.time()

    loss = nan
    failure = ""
    try:
        with _locked_and_logged(run):
            ready = prepare_job(job, run, sweep)
            print_line(title)
            loss = sweep.train(ready)
    except Exception as e:
        failure = explain_error(e) or error_sentence(e)
        print_stderr(printable(f"{title}  failed: {failure}", one_line=True))

    gc.collect()  # reference cycles of the job may hold its model
    with contextlib.suppress(UserError, OSError):  # the summary at the end reports it again
        run.failure_file.unlink(missing_ok=True)
        if failure:
            run.failure_file.write_text(failure, encoding="utf-8", errors="backslashreplace")
        rewrite_results(sweep.folder)
        if not failure:
            print_line(f"{title}  {loss:.4f} val/loss  {time.time() - start:.0f} s")
    return loss if isfinite(loss) else None


@contextlib.contextmanager
def _locked_and_logged(run: RunDir) -> Iterator[None]:
    """Lock the folder of a job, so that an equal job waits, and write what it prints to its log.

    The traceback of a bug goes there too.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    with (
        FileLock(run.job_lock),
        run.job_log.open("a", encoding="utf-8") as log_file,
        contextlib.redirect_stdout(log_file),
        contextlib.redirect_stderr(log_file),
    ):
        try:
            yield
        except Exception as e:
            if explain_error(e) is None:
                traceback.print_exc()
            raise


def prepare_job(job: cli.Job, run: RunDir, sweep: Sweep) -> cli.Job:
    """Configure a job that begins, continues or is finished in its folder, and record it there.

    Raises:
        UserError: If it cannot work, or what is in the folder is not of its text or its length.
    """
    steps_taken = max(run.steps(), default=0)
    if not steps_taken:
        write_record(run, record_job(job))
    configured = sweep.configure(assign_folder(job, sweep.folder))
    record = read_record(run)
    text = hash_text(configured.config)
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
    write_record(run, replace(record.continued(steps_taken, max_steps), text=text))
    return configured
