"""The folders that Hydra makes for runs, sweeps and jobs, by resolvers of configs/config.yaml.

A job is what was composed for it: every call of a sweep finds its folder by the hash of that.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from cli.job import Job, make_job, makes_no_run
from common.files import exists, list_folder
from common.paths import expand_home
from common.settings import format_settings
from common.text import printable
from run.config_file import PER_COMMAND, absolute_paths
from run.run_dir import HYDRA_FOLDER, RUNS, SWEEP_FILE, new_run_dir

MAX_JOB_NAME = 120  # characters of a job's folder name without the hash; 255 bytes are allowed
HASH_DIGITS = 10


# --- jobs -----------------------------------------------------------------------------------------


def parse_overrides(task: Sequence[str], params: dict[str, str] | None) -> list[Override]:
    """Return the settings of a sweep's jobs: those of its preset, and those typed, which win."""
    typed = [f"{key}={value}" for key, value in (params or {}).items()]
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*typed, *task])
    return list({override.get_key_element(): override for override in overrides}.values())


def read_overrides(sweep_folder: Path) -> list[Override]:
    """Return `parse_overrides` of the sweep in a folder, as Hydra has recorded it there."""
    if not exists(sweep_folder / SWEEP_FILE):
        return []
    recorded = yaml.safe_load((sweep_folder / SWEEP_FILE).read_text(encoding="utf-8"))["hydra"]
    return parse_overrides(recorded["overrides"]["task"], recorded["sweeper"].get("params"))


def list_swept(overrides: Sequence[Override]) -> list[str]:
    """Return the keys that differ between the jobs of a sweep."""
    return [override.get_key_element() for override in overrides if override.is_sweep_override()]


def is_grid(hydra: DictConfig) -> bool:
    """Return whether a sweep runs each combination of its values; other sweepers draw them."""
    return bool(hydra.sweeper._target_.endswith(".BasicSweeper"))


def count_jobs(overrides: Sequence[Override]) -> int:
    """Return the number of combinations of the values in a grid."""
    swept = (override for override in overrides if override.is_sweep_override())
    return prod(len(list(override.sweep_string_iterator())) for override in swept)


def hash_settings(job: Job, *ignored: str) -> str:
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


def describe_job(job: Job) -> dict[str, str]:
    """Return every setting of a job as it was composed, and its presets as they were typed."""
    typed = {key: override.partition("=")[2] for key, override in zip(job.keys, job.overrides)}
    return typed | format_settings(job.config)


def name_job(number: str, job: Job) -> str:
    """Return the number and the swept settings of a job for the terminal."""
    return printable(f"{number}  {name_settings(_describe_swept(job))}", one_line=True)


def name_settings(settings: dict[str, str]) -> str:
    """Format settings with the last part of their keys: n_kv_head=2 lr=0.01."""
    items = settings.items()
    return " ".join(f"{key.rpartition('.')[2]}={shorten_number(value)}" for key, value in items)


def shorten_number(value: str) -> str:
    """Round a number that a sweeper drew to four digits; leave every other value as it is."""
    if re.fullmatch(r"-?\d*\.\d{5,}(e-?\d+)?", value):
        return f"{float(value):.4g}"
    return value


def _describe_swept(job: Job) -> dict[str, str]:
    settings = describe_job(job)
    return {key: settings[key] for key in job.swept}


def find_job_folder(sweep_folder: Path, job: Job) -> Path:
    """Return the folder of a job, whose name ends with its hash: the one that it has, or a new one.

    The name begins with the swept settings, in which two calls may differ.
    """
    ending = f"_{hash_settings(job)}"
    if existing := list_folder(sweep_folder, f"*{ending}"):
        return existing[0]
    swept = sorted(_describe_swept(job).items())
    name = ",".join(f"{key}={value}" for key, value in swept) or "job"
    return sweep_folder / f"{name_part(name)}{ending}"


def name_part(text: str) -> str:
    """Return a text as it can be in the name of a folder."""
    return re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII)[:MAX_JOB_NAME]


# --- resolvers (Hydra has no mode if nothing is to be run, as with --cfg hydra) -------------------


def _run_folder(_root_: DictConfig) -> str:
    if _root_.hydra.mode is None or makes_no_run(_root_):
        return "."
    if _root_.run_dir is not None:
        return str(expand_home("run_dir", _root_.run_dir))
    return _new_folder(_root_.hydra.runtime.choices.get("experiment") or "run", _root_.hydra.mode)


def _new_folder(name: str, mode: RunMode | None) -> str:
    """Make a new folder in runs/, and return its path."""
    return str(new_run_dir(name) if mode else RUNS / name)


def _record_folder(_root_: DictConfig) -> str | None:
    """Return where Hydra saves what was typed and composed: .hydra, then .hydra_2 and so on."""
    if _root_.hydra.mode is None or makes_no_run(_root_):
        return None
    folder = Path(_root_.hydra.runtime.output_dir)
    names = (HYDRA_FOLDER if number == 1 else f"{HYDRA_FOLDER}_{number}" for number in count(1))
    return next(name for name in names if not exists(folder / name))


def _job_folder(_root_: DictConfig) -> str:
    if _root_.hydra.mode is None:
        return "."
    sweep_folder = Path(_root_.hydra.sweep.dir)
    job = make_job(_root_, _root_.hydra)
    swept = list_swept(read_overrides(sweep_folder))
    return find_job_folder(sweep_folder, replace(job, swept=swept)).name


OmegaConf.register_new_resolver("glassgpt.run_folder", _run_folder, replace=True)
OmegaConf.register_new_resolver("glassgpt.record_folder", _record_folder, replace=True)
OmegaConf.register_new_resolver("glassgpt.job_folder", _job_folder, replace=True)
# Hydra passes what was cached on to the jobs, so that they have one folder.
OmegaConf.register_new_resolver("glassgpt.new_folder", _new_folder, replace=True, use_cache=True)
