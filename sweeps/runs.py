"""Read runs from their folders: the jobs of a sweep, and any others. Does not import torch."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path

import yaml

from cli.config_file import PER_COMMAND, absolute_paths, config_yaml, parse_config, read_config
from cli.continuation import LOWERED_BY_FINE_TUNING
from common.checkpoints import CONFIG_FILE
from common.errors import UserError
from common.files import atomic_write, exists, is_folder, list_folder
from common.metrics import METRICS, read_rows
from common.settings import explain_unused, format_value, iterate_settings
from common.terminal import error_sentence, explain_error
from config import Config
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
NOT_OF_JOB = (*PER_COMMAND, "wandb.")
# Settings that may be null → the property with the value that null stands for.
VALUES_OF_NULL = {
    "model.n_kv_head": "model.kv_heads",
    "model.head_dim": "model.key_dim",
    "model.value_head_dim": "model.value_dim",
    "model.mlp_hidden": "model.hidden_dim",
    "model.ngram_size": "model.ngram_dim",
    "data.symbols": "data.num_symbols",
}


@dataclass(frozen=True)
class Run:
    """One job of a sweep, or a run outside of any sweep, as its folder records it."""

    path: Path
    # In a sweep: the typed settings in which its jobs differ, such as model.n_kv_head → 2. If runs
    # are compared: the run's name under `RUN`, and all differing settings.
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
            overrides = read_request(path).typed
        if exists(path / CONFIG_FILE):
            config = _read_run_config(path)
        rows = read_rows(path / METRICS)
    except (UserError, OSError) as e:
        failure = explain_error(e) or error_sentence(e)
    status = "failed" if failure else "unfinished"
    if config is not None and rows and rows[-1]["step"] >= config.max_steps:
        status = "finished"
    return Run(path, {}, overrides, config, rows, status, failure)


def _read_run_config(path: Path) -> Config:
    return _read_config(path / CONFIG_FILE, (path / CONFIG_FILE).stat().st_mtime_ns)


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
    texts = {REQUEST: config_yaml(config), OVERRIDES: yaml.safe_dump(list(overrides))}
    for name, text in texts.items():
        with atomic_write(path / name) as part:
            part.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Request:
    """The request for a job: its typed settings, and the configuration that they make."""

    typed: dict[str, str]  # settings by their keys; those of presets as typed
    config: Config
    identity: dict[str, str]


def read_request(path: Path) -> Request:
    """Return what was requested of a job, with the `max_steps` to which its run was extended.

    Raises:
        UserError: If the files of the request are damaged.
    """
    request = _read_request(path, (path / OVERRIDES).stat().st_mtime_ns)
    steps = request.config.max_steps
    with suppress(UserError, OSError):  # it has not trained yet, or is damaged
        steps = _read_run_config(path).max_steps
    if steps == request.config.max_steps:
        return request
    config = replace(request.config, max_steps=steps)
    extended = {"max_steps": format_value(steps)}
    return Request(request.typed | extended, config, request.identity | extended)


@lru_cache(maxsize=1000)
def _read_request(path: Path, modified_ns: int) -> Request:
    try:
        overrides = yaml.safe_load((path / OVERRIDES).read_text(encoding="utf-8"))
        config = parse_config((path / REQUEST).read_text(encoding="utf-8"))
        typed = [override.partition("=") for override in overrides]
    except Exception as e:  # a damaged file raises errors of many types
        raise UserError(
            f"{path / '.hydra'} cannot be read ({error_sentence(e)}): remove this job"
        ) from None
    settings = format_settings(config)
    return Request(
        {key: settings.get(key, value) for key, _, value in typed},
        config,
        identify(config, [key for key, _, _ in typed]),
    )


def identify(config: Config, typed_keys: Sequence[str]) -> dict[str, str]:
    """Return the settings that identify a job, independent of how they were typed.

    Settings without effect are left out, and a null is replaced by what it stands for.
    """
    config = absolute_paths(config)
    for key, effective in VALUES_OF_NULL.items():
        config = config.with_value(key, attrgetter(effective)(config))
    settings = {
        key: value
        for key, value in format_settings(config).items()
        if not key.startswith(NOT_OF_JOB) and not explain_unused(config, key)
    }
    if config.init_from:
        for key in LOWERED_BY_FINE_TUNING:
            if key in settings and key not in typed_keys:
                settings[key] += " before fine-tuning"
    return settings


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
    """Read the runs of a sweep, sorted by the names of their folders.

    Jobs with the same settings, such as copies of a folder, count once. Runs that differ only by
    the seed have the same values of all other settings, however they were typed.
    """
    require_sweep(folder)
    requests: dict[Path, Request] = {}
    distinct: dict[object, Run] = {}
    for path in job_folders(folder):
        run, identity = read_run(path), object()
        with suppress(UserError):  # an unreadable job is no duplicate
            requests[path] = read_request(path)
            identity = frozenset(requests[path].identity.items())
        other = distinct.setdefault(identity, run)
        if (run.status == "finished", run.steps) > (other.status == "finished", other.steps):
            distinct[identity] = run
    runs = list(distinct.values())

    typed = dict.fromkeys(key for run in runs for key in run.overrides if key not in NO_COLUMNS)
    variants: dict[frozenset, dict[str, str]] = {}
    values: dict[Path, dict[str, str]] = {}
    for run in runs:
        if request := requests.get(run.path):
            settings = format_settings(request.config) | request.typed
            settings["tokenizer.vocab_size"] = _vocab_size(request.config, run.config)
            shown = {key: settings.get(key, "") for key in typed}
            variant = frozenset(item for item in request.identity.items() if item[0] != "seed")
            values[run.path] = variants.setdefault(variant, shown) | {"seed": settings["seed"]}
    keys = [key for key in typed if len({shown[key] for shown in values.values()}) > 1]
    return [
        replace(run, settings={key: values.get(run.path, {}).get(key, "") for key in keys})
        for run in runs
    ]


def _vocab_size(requested: Config, trained: Config | None) -> str:
    """Return the requested vocabulary size, after the real one if a short text has too few."""
    wanted, size = requested.tokenizer.vocab_size, trained and trained.model.vocab_size
    is_smaller = wanted and size and size < wanted
    return f"{size} of {wanted}" if is_smaller else format_value(wanted)
