"""A sweep before Hydra starts its jobs, and after they have ended. Does not import torch itself."""

import contextlib
import gc
import io
import logging
import os
import shlex
import sys
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

import cli
from cli.command_line import TEXTS, quote, translate_setting
from cli.folders import count_jobs, find_job_folder, is_grid, list_swept, name_job, parse_overrides
from cli.job import ReadModel, find_source, prepare_to_import_torch, stop_reports, typed_arguments
from cli.wandb_environment import refuse_in_sweep
from common.errors import UserError
from common.files import list_folder
from common.launcher import count_processes
from common.paths import require_output_folder
from common.terminal import Terminal, error_sentence, explain_error, print_stderr, printer
from common.text import pluralize
from run.run_dir import SWEEP_FILE
from sweeps.jobs import Train, assign_folder, rewrite_results
from sweeps.runs import is_sweep
from sweeps.table import print_sweep

MAX_DRAWN_VALUES = 100  # of a setting whose values a sweeper draws, of which jobs are checked


class Sweep:
    """The sweep that Hydra is about to start, from what it has composed for all jobs.

    Raises:
        UserError: If a value of a setting is impossible.
    """

    def __init__(self, shared: DictConfig) -> None:
        self.shared = shared
        self.hydra = shared.hydra
        if count_processes(alone=False) > 1:
            raise UserError(
                "torchrun cannot start a sweep, because its processes share one run: "
                "use python train.py -m, without RANK and WORLD_SIZE in the environment"
            )
        self.folder = self._find_folder()
        if params := self.hydra.sweeper.get("params"):  # which are quoted as typed settings are
            typed = [translate_setting(f"{key}={params[key]}", is_sweep=True) for key in params]
            self.hydra.sweeper.params = dict(setting.split("=", 1) for setting in typed)
        self.is_grid = is_grid(self.hydra)
        task = OmegaConf.to_container(self.hydra.overrides.task, resolve=False)
        self.overrides = parse_overrides(task, self.hydra.sweeper.get("params"))
        self.values = [self._list_values(override) for override in self.overrides]
        if not self.is_grid:  # Optuna passes on a text without its quotes
            self.hydra.overrides.task = [_quote_twice(each) for each in self.overrides]

    def _list_values(self, override: Override) -> list[str]:
        """Return KEY=VALUE for each value of a setting; of an interval, for both ends."""
        key = override.get_key_element()
        if not override.is_sweep_override():
            values = [override.get_value_element_as_str()]
        elif override.is_discrete_sweep():
            limit = None if self.is_grid else MAX_DRAWN_VALUES
            values = list(islice(override.sweep_string_iterator(), limit))
        elif self.is_grid:
            raise UserError(f"{key} is drawn from an interval, which needs hydra/sweeper=optuna")
        else:
            values = [str(override.value().start), str(override.value().end)]
        if not values:
            raise UserError(f"{key} has no values: give it some")
        return [f"{key}={value}" for value in values]

    def _find_folder(self) -> Path | None:
        """Return the folder of a new or resumed sweep that was chosen; None: it gets a new one."""
        if OmegaConf.is_interpolation(self.hydra.sweep, "dir"):
            return None
        folder = Path(self.hydra.sweep.dir)
        name = f"hydra.sweep.dir={folder}"
        require_output_folder(name, folder)
        if list_folder(folder) and not is_sweep(folder):
            raise UserError(
                f"{name} is not empty and holds no sweep of this version of GlassGPT: choose "
                "another folder; python -m sweeps FOLDER out=NEW compares its runs"
            )
        if is_sweep(folder) and self.shared.resume != "auto":
            raise UserError(
                f"{name} already holds a sweep: add resume=auto to resume it, or choose another "
                "folder"
            )
        return folder

    def compose_jobs(self) -> list[cli.Job]:
        """Compose the jobs of a grid; if a sweeper draws values, jobs that have each of them once.

        A job has its folder if the sweep has one.
        """
        if self.is_grid:
            jobs = [list(values) for values in product(*self.values)]
        else:
            count = max(map(len, self.values), default=1)
            jobs = [[values[i % len(values)] for values in self.values] for i in range(count)]
        source = find_source(self.hydra)
        swept = list_swept(self.overrides)
        composed = [replace(cli.compose_job(job, source), swept=swept) for job in jobs]
        return [
            assign_folder(job, find_job_folder(self.folder, job) if self.folder else None)
            for job in composed
        ]

    def check(self, read_model: ReadModel) -> None:
        """Raise `UserError` if no job can work, before torch is imported if that is known then."""
        refusals = []
        for job in self.compose_jobs():
            try:
                configured = cli.configure(job, read_model, log=lambda line: None)
                prepare_to_import_torch()
                self._check_machine(configured)
                return
            except UserError as e:
                refusals.append(e)
        raise refusals[0]

    def _check_machine(self, job: cli.Job) -> None:
        """Raise `UserError` if a job's device or the W&B settings of this machine cannot work."""
        from training.device import pick_device  # imports torch
        from training.wandb_record import check_wandb

        if self.hydra.launcher._target_.endswith((".BasicLauncher", ".JoblibLauncher")):
            pick_device(job.config.device)
        if check_wandb(job.config.wandb) != "disabled":
            refuse_in_sweep()

    def preview(self, read_model: ReadModel, train: Train) -> None:
        """Print the cost of each job, one after the other; exit with status 1 if one cannot work.

        `train` prints it in its last line.
        """
        has_failed = False
        jobs = self.compose_jobs()
        print_line = printer(Terminal())
        if self.is_grid:
            print_line(f"sweep    {pluralize(len(jobs), 'job')}")
        for number, job in enumerate(jobs, 1):
            title = name_job(f"{number:>{len(str(len(jobs)))}}", job)
            try:
                output = io.StringIO()
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    train(cli.configure(job, read_model))
                cost = output.getvalue().splitlines()[-1].removeprefix("cost")
                print_line(f"{title}  {cost.strip()}")
            except Exception as e:
                has_failed = True
                print_stderr(f"{title}  error: {explain_error(e) or error_sentence(e)}")
            gc.collect()  # reference cycles of the job may hold its model
        sys.exit(int(has_failed))

    def start(self) -> None:
        """Make the folder of the sweep, and prepare the processes that train its jobs."""
        folder = Path(self.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.shared, folder / SWEEP_FILE)  # as Hydra's own sweeper does later
        count = f"{pluralize(count_jobs(self.overrides), 'job')}, " if self.is_grid else ""
        printer(Terminal())(f"sweep    {count}in {folder}")
        stop_reports.append(partial(report_stop, folder))
        # For jobs in processes of their own, which may start anywhere
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ.setdefault("WANDB_RUN_GROUP", folder.name)
        logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # jobs report their failures


def _quote_twice(override: Override) -> str:
    """Return a setting as it was typed, with another pair of quotes around each of its texts."""
    key = override.get_key_element()
    if key not in TEXTS or not override.is_choice_sweep():
        return str(override.input_line)
    return f"{key}=choice({','.join(map(quote, override.sweep_string_iterator()))})"


def report_stop(folder: Path) -> None:
    """Print how to resume a sweep that has not ended, and summarize its jobs so far."""
    of_this_call = ("resume=", "hydra.sweep.dir=")
    typed = [argument for argument in typed_arguments if not argument.startswith(of_this_call)]
    again = ["python", "train.py", *typed, "resume=auto", f"hydra.sweep.dir={folder}"]
    print_stderr(f"the sweep was stopped; to resume it:\n{shlex.join(again)}")
    rewrite_results(folder)


def end_sweep(folder: Path, name: str | None) -> None:
    """Print the table of a sweep's jobs, and what its study says if it is one of a study.

    Exits with status 1 unless all jobs are finished.
    """
    from studies.study import report_sweep

    stop_reports.clear()
    runs = rewrite_results(folder)
    print_sweep(Terminal(), folder, runs)
    report_sweep(name, folder)
    if any(run.failure or run.status != "finished" for run in runs):
        sys.exit(1)
