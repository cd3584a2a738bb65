"""One job of `python train.py -m …`, and the results of all jobs so far. Does not import torch.

The tables and pages are made from the folders of the runs alone.
"""

import contextlib
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import cli
from cli.folders import (
    count_jobs,
    describe_job,
    hash_settings,
    is_grid,
    list_swept,
    name_job,
    read_overrides,
)
from cli.job import ReadModel
from common.errors import UserError
from common.files import exists
from common.settings import format_settings
from common.terminal import (
    Terminal,
    error_sentence,
    explain_error,
    print_stderr,
    printer,
    replace_unprintable_characters,
)
from common.text import pluralize, printable
from data.corpus import open_corpus
from data.tokens import corpus_fingerprint
from run.config_file import absolute_paths
from run.run_dir import RunDir
from sweeps.page import write_results
from sweeps.runs import JobRecord, Run, read_record, read_sweep, write_record

Train = Callable[[cli.Job], float]  # a checked job


def rewrite_results(folder: Path) -> list[Run]:
    """Write sweep.csv and sweep.html from the runs in the folder, one process at a time."""
    with FileLock(folder / ".lock"):
        runs = read_sweep(folder)
        write_results(folder, runs)
    return runs


def run_job(composed: DictConfig, read_model: ReadModel, train: Train) -> float | None:
    """Train the job that Hydra has started in its own folder, or continue it; return its best loss.

    The job's output goes to log.txt in its folder; the terminal gets one line. The result is None
    if the job failed: Optuna counts that as a failed trial, whereas nan would end its search.
    """
    replace_unprintable_characters()  # in the process that a launcher has started
    hydra = HydraConfig.get()
    sweep_folder = Path(hydra.sweep.dir)
    overrides = read_overrides(sweep_folder)
    job = replace(cli.make_job(composed, hydra), swept=list_swept(overrides))
    number = f"{hydra.job.num + 1}"
    if is_grid(hydra):
        number += f"/{count_jobs(overrides)}"
    title = name_job(number, job)
    run_dir = RunDir(Path(hydra.runtime.output_dir))
    print_line = printer(Terminal(file=sys.stdout))
    start = time.time()

    loss = nan
    failure = ""
    try:
        with _locked_and_logged(run_dir):
            ready = prepare_job(job, run_dir, read_model)
            print_line(title)
            loss = train(ready)
    except Exception as e:
        failure = explain_error(e) or error_sentence(e)
        print_stderr(printable(f"{title}  failed: {failure}", one_line=True))

    gc.collect()  # reference cycles of the job may hold its model
    with contextlib.suppress(UserError, OSError):  # the summary at the end reports it again
        run_dir.failure_file.unlink(missing_ok=True)
        if failure:
            run_dir.failure_file.write_text(failure, encoding="utf-8", errors="backslashreplace")
        rewrite_results(sweep_folder)
        if not failure:
            print_line(f"{title}  {loss:.4f} val/loss  {time.time() - start:.0f} s")
    return loss if isfinite(loss) else None


@contextlib.contextmanager
def _locked_and_logged(run_dir: RunDir) -> Iterator[None]:
    """Lock the folder of a job, so that an equal job waits, and write what it prints to its log.

    The traceback of a bug goes there too.
    """
    with (
        FileLock(run_dir.job_lock),
        run_dir.job_log.open("a", encoding="utf-8") as log_file,
        contextlib.redirect_stdout(log_file),
        contextlib.redirect_stderr(log_file),
    ):
        try:
            yield
        except Exception as e:
            if explain_error(e) is None:
                traceback.print_exc()
            raise


def prepare_job(job: cli.Job, run_dir: RunDir, read_model: ReadModel) -> cli.Job:
    """Configure a job that begins, continues or is finished in its folder, and record it there.

    Raises:
        UserError: If it cannot work, or what is in the folder is not of its text or its length.
    """
    steps_taken = max(run_dir.steps(), default=0)
    if not steps_taken:
        write_record(run_dir, record_job(job))
    configured = cli.configure(assign_folder(job, run_dir.path), read_model)
    data = configured.config.data
    max_steps = job.config.max_steps
    # The settings and the seed, which a job keeps, determine a generated text
    if steps_taken and data.source != "synthetic":
        corpus = open_corpus(data)
        if corpus_fingerprint(corpus, corpus.hash_files()) != run_dir.fingerprint():
            raise UserError(
                "it was trained on another text than the one there now: restore that text, or "
                "train on this one with another hydra.sweep.dir"
            )
    if max_steps < steps_taken:
        raise UserError(
            f"it has taken {pluralize(steps_taken, 'step')}, more than max_steps={max_steps}: "
            "use at least as many, or another hydra.sweep.dir"
        )
    write_record(run_dir, read_record(run_dir).continued(steps_taken, max_steps))
    return configured


def assign_folder(job: cli.Job, folder: Path | None) -> cli.Job:
    """Return the job with its folder, in which it starts or continues; without one, it starts.

    Its number of steps is that of this call.
    """
    if folder is None:
        return replace(job, config=replace(job.config, resume=False))
    config = replace(job.in_folder(str(folder)).config, resume="auto")
    length = [] if "max_steps" in job.keys else [f"max_steps={config.max_steps}"]
    return replace(job, config=config, overrides=[*job.overrides, *length])


def record_job(job: cli.Job) -> JobRecord:
    """Return the record of a job that has not begun; its paths are absolute."""
    options = {}
    presets, *own_folders = job.source.folders
    if presets != str(cli.CONFIGS):
        options["--config-path"] = presets
    if own_folders:
        options["--config-dir"] = own_folders[0]
    if job.source.name != "config":
        options["--config-name"] = job.source.name
    typed = [key for key in job.keys if key != "resume"]
    if "sweep" in typed:  # its preset may have settings of its own
        options["hydra.mode"] = "RUN"
    config = absolute_paths(job.config)
    if config.init_from and not exists(Path(config.init_from)):
        config.init_from = job.config.init_from  # a name on the hub
    settings = describe_job(replace(job, config=config))
    composed = format_settings(job.config)
    moved = [key for key in composed if settings[key] != composed[key] and key not in typed]
    if "init_from" in moved:  # typed, it could imply an experiment
        moved.append("experiment")
    typed += moved  # paths in a preset
    return JobRecord(
        hash_settings(job), hash_settings(job, "seed"), options | settings, [*options, *typed]
    )
