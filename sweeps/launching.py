"""Have Hydra parse the settings of a sweep, and start its jobs. Does not import torch.

Hydra's sweeper chooses the values of each job, and its launcher calls a function with them, here or
in other processes. `cli.compose_job` composes the jobs.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

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
from common.errors import UserError
from common.paths import expand_home

MAX_DRAWN_VALUES = 100  # of a setting whose values a sweeper draws, of which jobs are checked

RunJob = Callable[[Sequence[str], int], float | None]  # overrides and number → validation loss


class JobLoader(ConfigLoaderImpl):
    """Gives Hydra's launchers what all jobs share; `cli.compose_job` composes each job."""

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Return the configuration that a launcher starts a job with."""
        config = copy.deepcopy(master_config)
        config.hydra.overrides.task = list(sweep_overrides)
        return config


def make_loader(config_dir: str | None) -> JobLoader:
    """Return a loader of the presets, and of those in a folder of the user's own."""
    search_path = create_config_search_path(str(CONFIGS))
    if config_dir:
        presets = expand_home("--config-dir", config_dir).absolute()
        search_path.prepend("command-line", str(presets), anchor="schema")
    return JobLoader(search_path)


def parse_settings(
    command_line: cli.CommandLine, loader: JobLoader
) -> tuple[DictConfig, list[Override]]:
    """Return what all jobs share, and the settings of the jobs: those typed and the preset's."""
    parser = OverridesParser.create(config_loader=loader)
    typed = parser.parse_overrides(command_line.settings)
    constant = [str(o.input_line) for o in typed if not o.is_sweep_override()]
    shared = cli.compose_settings(constant, command_line.config_dir)
    params = shared.hydra.sweeper.get("params") or {}
    preset = [check_argument(f"{key}={value}", is_sweep=True) for key, value in params.items()]
    settings = [*parser.parse_overrides(preset), *typed]
    return shared, list({setting.key_or_group: setting for setting in settings}.values())


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
        yield replace(cli.compose_job(job, config_dir), swept=swept)


def _draw_jobs(overrides: Sequence[Override]) -> list[list[str]]:
    """Return settings of jobs in which each value occurs, and both ends of each interval."""
    settings = [
        [f"{override.get_key_element()}={value}" for value in _draw_values(override)]
        for override in overrides
    ]
    count = max(map(len, settings), default=1)
    return [[each[number % len(each)] for each in settings] for number in range(count)]


def _draw_values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if override.is_discrete_sweep():
        return list(islice(override.sweep_string_iterator(), MAX_DRAWN_VALUES))
    interval = override.value()
    return [str(interval.start), str(interval.end)]


def launch(settings: Sequence[Override], folder: Path, loader: JobLoader, run_job: RunJob) -> None:
    """Have Hydra's sweeper and launcher call `run_job` for each job, here or in other processes."""
    # For jobs in processes of their own, which may start anywhere
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("WANDB_RUN_GROUP", folder.name)
    logging.getLogger("hydra_plugins").setLevel(logging.CRITICAL)  # jobs report their own failures
    typed = [str(s.input_line) for s in settings if s.key_or_group != "hydra.sweep.dir"]
    typed.append(f"hydra.sweep.dir={quote(str(folder))}")

    def run_hydra_job(_: DictConfig) -> float | None:
        hydra = HydraConfig.get()
        return run_job(hydra.overrides.task, hydra.job.num + 1)

    hydra = Hydra(task_name="train", config_loader=loader)
    hydra.multirun("config", run_hydra_job, typed, with_log_configuration=False)
