"""Identify a job of a sweep: its hash, name, folder and record.

A job is composed once, and every call of a sweep finds its folder by the hash of what was composed.
Does not import torch.
"""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import cli
from common.files import list_folder
from common.settings import format_settings
from common.text import printable
from config import Config, TokenizerConfig
from data.corpus import open_corpus
from data.tokens import corpus_fingerprint
from run.config_file import PER_COMMAND, absolute_paths
from sweeps.ranking import name_settings
from sweeps.runs import JobRecord

MAX_JOB_NAME = 120  # characters of a job's folder name without the hash; 255 bytes are allowed
HASH_DIGITS = 10


def hash_settings(job: cli.Job, *ignored: str) -> str:
    """Return the hash of what was composed for a job, without what is of a command.

    `max_steps` counts only if it is swept, so that a longer sweep continues the jobs.
    """
    left_out = {*PER_COMMAND, *ignored}
    if "max_steps" not in job.swept:
        left_out.add("max_steps")
    settings = {
        key: value
        for key, value in format_settings(absolute_paths(job.config)).items()
        if key not in left_out and not key.startswith("wandb.")
    }
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:HASH_DIGITS]


def hash_text(config: Config) -> str:
    """Return the hash of a job's text, which its tokenizer does not change; "" if generated."""
    if config.data.source == "synthetic":
        return ""
    return corpus_fingerprint(open_corpus(config.data), TokenizerConfig())[:HASH_DIGITS]


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


def name_job(number: str, job: cli.Job) -> str:
    """Return the number and the swept settings of a job for the terminal."""
    return printable(f"{number}  {name_settings(_swept_settings(job))}", one_line=True)


def _swept_settings(job: cli.Job) -> dict[str, str]:
    settings = describe_job(job)
    return {key: settings[key] for key in job.swept}


def find_job_folder(sweep_folder: Path, job: cli.Job) -> Path:
    """Return the folder of a job, whose name ends with its hash: the one that it has, or a new one.

    The name begins with the swept settings, in which two calls may differ.
    """
    ending = f"_{hash_settings(job)}"
    if existing := list_folder(sweep_folder, f"*{ending}"):
        return existing[0]
    settings = _swept_settings(job)
    name = ",".join(f"{key}={settings[key]}" for key in sorted(settings)) or "job"
    return sweep_folder / f"{name_part(name)}{ending}"


def name_part(text: str) -> str:
    """Return a text as it can be in the name of a folder."""
    return re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII)[:MAX_JOB_NAME]


def assign_folder(job: cli.Job, sweep_folder: Path | None) -> cli.Job:
    """Return the job with its folder in that of the sweep, in which it starts or continues.

    In a sweep that has no folder yet, it starts. Its number of steps is that of this call.
    """
    if sweep_folder is None:
        return replace(job, config=replace(job.config, resume=False))
    path = find_job_folder(sweep_folder, job)
    config = replace(job.config, run_dir=str(path), resume="auto")
    length = [] if "max_steps" in job.keys else [f"max_steps={config.max_steps}"]
    return replace(job, config=config, overrides=[*job.overrides, *length])
