"""Read runs from their folders: the jobs of a sweep, and any others. Does not import torch."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import yaml

from cli.config_file import PER_COMMAND, config_from_dict, read_config
from common.checkpoints import CONFIG_FILE
from common.errors import UserError
from common.files import atomic_write, exists, is_folder, list_folder
from common.metrics import METRICS, read_rows
from common.settings import format_value, iterate_settings
from common.terminal import error_sentence, explain_error
from config import Config
from studies.claims import STUDIES
from studies.verdicts import ARM
from sweeps.figures import summarize_run

# In a job's folder, as Hydra names them: the settings that were typed, and the configuration that
# they make, in which nothing is resolved that depends on the machine or the text.
OVERRIDES = ".hydra/overrides.yaml"
REQUEST = ".hydra/config.yaml"
FAILURE = "failure.txt"  # in a job's folder: why its last attempt failed
# A pseudo-setting of compared runs: the name of each, so that each is a variant of its own.
RUN = "run"
# Settings whose differences do not distinguish jobs: of the command, and of a sweep's presets.
NO_COLUMNS = (*PER_COMMAND, "sweep", "--config-dir")


@dataclass(frozen=True)
class Run:
    """One job of a sweep, or a run outside of any sweep, as its folder records it."""

    path: Path
    # In a sweep: the typed settings in which its jobs differ, such as model.n_kv_head → 2, and of a
    # study the arm. If runs are compared: the run's name under `RUN`, and all differing settings.
    settings: dict[str, str]
    overrides: dict[str, str]  # everything typed
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
        return format_settings(self.config) if self.config else {}

    @cached_property
    def figures(self) -> dict[str, float]:
        """The run's numbers in sweep.csv, such as `val/loss`; see `summarize_run`."""
        return summarize_run(self.path, self.config, self.rows)


def read_run(path: Path) -> Run:
    """Read a run from its folder. If its files cannot be read, it has failed for that reason."""
    overrides: dict[str, str] = {}
    config, rows, failure = None, [], ""
    try:
        if exists(path / FAILURE):
            failure = (path / FAILURE).read_text(encoding="utf-8", errors="replace")
        if exists(path / OVERRIDES):
            overrides, _ = read_request(path)
        if exists(path / CONFIG_FILE):
            config = _read_config(path / CONFIG_FILE, (path / CONFIG_FILE).stat().st_mtime_ns)
        rows = read_rows(path / METRICS)
    except (UserError, OSError) as e:
        failure = explain_error(e) or error_sentence(e)
    status = "failed" if failure else "unfinished"
    if config is not None and rows and rows[-1]["step"] >= config.max_steps:
        status = "finished"
    return Run(path, {}, overrides, config, rows, status, failure)


@lru_cache(maxsize=1000)
def _read_config(path: Path, modified_ns: int) -> Config:
    """Read a file once per version: parsing takes longer than all other reading of a run."""
    return read_config(path)


def format_settings(config: Config) -> dict[str, str]:
    """Return every setting by its key, as a user would type it."""
    return {key: format_value(value) for key, _, value in iterate_settings(config)}


# --- sweeps ---------------------------------------------------------------------------------------


def write_request(path: Path, overrides: Sequence[str], config: Config) -> None:
    """Write what was typed for a job, and the configuration that it makes."""
    (path / OVERRIDES).parent.mkdir(exist_ok=True)
    for name, content in ((REQUEST, asdict(config)), (OVERRIDES, list(overrides))):
        with atomic_write(path / name) as part:
            part.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def read_request(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the typed settings of a job and all its settings, by their keys."""
    return _read_request(path, (path / OVERRIDES).stat().st_mtime_ns)


@lru_cache(maxsize=1000)
def _read_request(path: Path, modified_ns: int) -> tuple[dict[str, str], dict[str, str]]:
    try:
        overrides = yaml.safe_load((path / OVERRIDES).read_text(encoding="utf-8"))
        config = yaml.safe_load((path / REQUEST).read_text(encoding="utf-8"))
        settings = format_settings(config_from_dict(config))
        typed = [override.partition("=") for override in overrides]
    except Exception as e:  # a damaged file raises errors of many types
        raise UserError(
            f"{path / '.hydra'} cannot be read ({error_sentence(e)}): remove this job"
        ) from None
    return {key: settings.get(key, value) for key, _, value in typed}, settings


def job_folders(folder: Path) -> list[Path]:
    """Return the folders of a sweep's jobs, sorted by their names."""
    return [p for p in list_folder(folder) if is_folder(p) and exists(p / OVERRIDES)]


def is_sweep(folder: Path) -> bool:
    """Return whether a sweep has started a job in this folder."""
    return bool(job_folders(folder))


def require_sweep(folder: Path) -> None:
    """Raise `UserError` unless a sweep has started a job in this folder."""
    if not is_sweep(folder):
        raise UserError(
            f"{folder} is not the folder of a sweep: give one that python train.py -m … has printed"
        )


def read_sweep(folder: Path) -> list[Run]:
    """Read the runs of a sweep, sorted by the names of their folders; of a study, by their arms."""
    require_sweep(folder)
    runs = [read_run(job) for job in job_folders(folder)]
    typed = dict.fromkeys(key for run in runs for key in run.overrides if key not in NO_COLUMNS)
    values = {run.path: _requested_values(run.path) for run in runs}
    known = [settings for settings in values.values() if settings]
    keys = [key for key in typed if len({settings.get(key, "") for settings in known}) > 1]
    runs = [
        replace(run, settings={key: values[run.path].get(key, "") for key in keys}) for run in runs
    ]

    names = {run.overrides.get("sweep", "") for run in runs}
    arms = STUDIES[names.pop()].arms if len(names) == 1 and names <= STUDIES.keys() else ()
    sorted_runs = []
    for arm in arms:
        matching = [run for run in runs if arm.settings.items() <= run.all_settings.items()]
        runs = [run for run in runs if run not in matching]
        sorted_runs += [replace(run, settings={ARM: arm.name} | run.settings) for run in matching]
    return sorted_runs + runs


def _requested_values(path: Path) -> dict[str, str]:
    """Return all settings of a job, and the names of typed presets; {} if they are damaged."""
    with suppress(UserError):
        typed, settings = read_request(path)
        return settings | typed
    return {}
