"""From the arguments of train.py to the checked configuration of a run.

Hydra composes presets and settings, and `check_config` checks them. Does not import torch.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from cli.checks import check_config, fixed_sequence_length
from cli.command_line import (
    CONFIGS,
    SETTINGS,
    find_presets,
    quote,
    split_options,
    translate_settings,
)
from cli.continuation import (
    FINE_TUNING,
    apply_starting_model,
    continue_run,
    find_run_to_continue,
    is_pretrained,
)
from cli.help import train_help
from cli.presets import check_preset
from cli.wandb_environment import read_agent_choices
from common.errors import UserError
from common.launcher import process_rank
from common.paths import expand_home, expand_model_name, require_path
from common.settings import check_settings, explain_unused, replace_setting, show_value
from common.signals import exit_on_stop_signals
from common.terminal import Terminal, command, error_sentence, printer
from common.wait_policy import choose_wait_policy
from config import Config, TokenizerConfig
from run.run_dir import Log

ConfigStore.instance().store(name="glassgpt_schema", node=Config)
ConfigStore.instance().store(name="glassgpt_nothing", node={})  # to which a preset is added alone

# What the commands that do not train read: the beginnings of settings' names.
READ_BY_MODE = {
    "prepare_only": (
        *("prepare_only", "data", "tokenizer", "init_from", "experiment", "run_dir", "resume"),
        "distributed",
    ),
    "eval_only": (
        *("eval_only", "data", "init_from", "experiment", "run_dir", "device", "precision"),
        *("deterministic", "threads", "distributed", "model.block_size", "model.vocab_multiple"),
    ),
}

# Reads the shape and the tokenizer of the model that `init_from` names.
ReadModel = Callable[[str], Config]


class Source(NamedTuple):
    """The folders of presets, the user's own at the end, and the primary configuration."""

    folders: Sequence[str] = (str(CONFIGS),)
    name: str = "config"


REPOSITORY = Source()


@dataclass(frozen=True)
class Job:
    """One run as it was requested: its settings, and the overrides that they come from."""

    config: Config
    overrides: list[str]  # KEY=VALUE, as Hydra takes them
    source: Source = REPOSITORY
    swept: Sequence[str] = ()  # the keys that differ between the jobs of a sweep

    @property
    def keys(self) -> list[str]:
        """The keys of the overrides."""
        return [override.partition("=")[0].lstrip("+") for override in self.overrides]

    def in_folder(self, folder: str) -> "Job":
        """Return the job with its folder, whose path is relative if it is below the current one."""
        path = Path(folder)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return replace(self, config=replace(self.config, run_dir=str(path)))


# Of this command: its arguments before they were translated; the run that was checked before Hydra
# makes its folder, for `train.main`; what reports on a sweep that has begun and not ended.
typed_arguments: list[str] = []
checked_runs: list[Job] = []
stop_reports: list[Callable[[], None]] = []


def makes_no_run(settings: Config | DictConfig) -> bool:
    """Return whether a process makes no folder of a run: it does not train, or is not the first."""
    is_other_rank = process_rank() > 0 and settings.distributed != "none"
    return settings.prepare_only or settings.eval_only or settings.dry_run or is_other_rank


# --- from arguments to a job ----------------------------------------------------------------------


@contextmanager
def hydra_command() -> Iterator[None]:
    """Translate the arguments for `hydra.main`, which is called in the `with` block.

    Prints the help if that is asked for, and exits with status 1 after one sentence about a
    mistake.
    """
    with command(_help):
        typed_arguments[:] = sys.argv[1:]
        sys.argv[1:] = translate(typed_arguments)
        exit_on_stop_signals()
        try:
            yield
        except Exception as e:
            if not stop_reports:
                raise
            raise UserError(
                f"Hydra ended the sweep ({error_sentence(e)}): correct the settings of "
                "hydra.launcher and hydra.sweeper"
            ) from None
        finally:
            while stop_reports:
                stop_reports.pop()()


def prepare_to_import_torch() -> None:
    """Choose how torch's threads wait, and say that importing it takes seconds."""
    if "torch" not in sys.modules and process_rank() == 0:
        printer(Terminal())("loading PyTorch …")
    choose_wait_policy(print)


def _help() -> str:
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--help", "-h")]
    options, typed = split_options(arguments)
    topic = next((each for each in typed if each.isidentifier()), "")
    presets = find_presets(options.get("--config-dir"))
    return train_help(compose_job([]).config, presets, topic)


def translate(argv: Sequence[str]) -> list[str]:
    """Return the arguments of train.py as Hydra takes them: settings, then options."""
    options, typed = split_options(argv)
    if "--shell-completion" in options:
        return [*argv]
    parts = (part for option in options.items() for part in option if part)
    return [*complete_settings(options, typed), *parts]


def complete_settings(options: Mapping[str, str], typed: Sequence[str]) -> list[str]:
    """Return typed settings as Hydra takes them.

    Raises:
        UserError: A setting is unknown, or a preset of the user's own contains a mistake.
    """
    values = dict(argument.partition("=")[::2] for argument in typed)
    mode = values.get("hydra.mode")
    names_sweep = mode != "RUN" and values.get("sweep", "null") != "null"
    is_sweep = names_sweep or mode == "MULTIRUN" or "--multirun" in options
    presets = find_presets(options.get("--config-dir"))
    settings = translate_settings(typed, is_sweep, presets)
    if "--config-dir" in options:
        for group, paths in presets.items():
            for name in paths.keys() & set(values.get(group, "").split(",")):
                check_preset(group, name, presets)
    return settings


def read_job(arguments: Sequence[str], read_model: ReadModel) -> Job:
    """Return the configured run that these arguments of train.py describe."""
    options, typed = split_options(arguments)
    settings = complete_settings(options, typed)
    config_dir = options.pop("--config-dir", None)
    if options:
        raise UserError(f"{' '.join(options)} does not describe a single run: leave it out")
    source = Source((str(CONFIGS), str(Path(config_dir).absolute()))) if config_dir else REPOSITORY
    return configure(compose_job(settings, source), read_model)


# --- composing ------------------------------------------------------------------------------------


@contextmanager
def _initialized_hydra(folder: str) -> Iterator[None]:
    """Let Hydra compose from a folder, also while it runs this program or another one."""
    running = GlobalHydra.instance().hydra
    name, base = JobRuntime.instance().get("name"), VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(folder, job_name=name, version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = running
        VersionBase.instance().version_base = base


def compose_settings(overrides: Sequence[str], source: Source = REPOSITORY) -> DictConfig:
    """Have Hydra compose presets and overrides; the result includes Hydra's own settings."""
    main, *others = source.folders
    if others:
        folders = ",".join(quote(f"file://{folder}") for folder in others)
        overrides = [*overrides, f"hydra.searchpath=[{folders}]"]
    with _initialized_hydra(main):
        try:
            return compose(source.name, [*overrides], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as e:
            raise UserError(error_sentence(e)) from None


def compose_job(overrides: Sequence[str], source: Source = REPOSITORY) -> Job:
    """Compose the job that these overrides describe, and check the bounds of its settings."""
    composed = compose_settings(overrides, source)
    job = make_job(composed, composed.hydra)
    check_settings(job.config)
    return job


def make_job(composed: DictConfig, hydra: DictConfig) -> Job:
    """Return the job that Hydra has composed; `hydra` has Hydra's own settings.

    The path of a text implies data=text unless another source is chosen, and a typed pretrained
    model experiment=finetune unless an experiment is typed.
    """
    source = find_source(hydra)
    overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # keeps backslashes
    job = Job(_to_config(composed, hydra), overrides, source)
    if implied := _list_implied_presets(job):
        composed = compose_settings([*job.overrides, *implied], source)
        job = replace(job, config=_to_config(composed, composed.hydra))
    return job


def find_source(hydra: DictConfig) -> Source:
    """Return from where Hydra has composed a configuration."""
    sources = hydra.runtime.config_sources
    folders = [each.path for each in sources if each.provider not in ("hydra", "schema")]
    return Source(folders, hydra.job.config_name)


def _to_config(composed: DictConfig, hydra: DictConfig) -> Config:
    settings = composed.copy()
    with open_dict(settings):
        settings.pop("hydra", None)
        settings.experiment = hydra.runtime.choices.get("experiment")
    config: Config = OmegaConf.to_object(settings)
    return config


def _list_implied_presets(job: Job) -> list[str]:
    keys = {*job.keys}
    data = job.config.data
    init_from = job.config.init_from
    implied = []
    has_source = bool(keys & {"data", "data.source"}) or data.source != "stdlib"
    if data.path and not has_source:
        implied.append("data=text")
    has_experiment = "experiment" in keys
    if "init_from" in keys and init_from and not has_experiment and is_pretrained(init_from):
        implied.append(f"experiment={FINE_TUNING}")
    return implied


def configure(job: Job, read_model: ReadModel, log: Log = print) -> Job:
    """Return a job with the configuration with which it trains.

    A run that is resumed keeps the configuration it was started with, except for the settings that
    are typed now. Of several processes only rank 0 does this. `log` prints notes.
    """
    if process_rank() > 0 and job.config.distributed != "none":
        return job
    check_settings(job.config)
    job = replace(job, config=_expand_paths(job.config))
    if run := find_run_to_continue(job.config):
        config = continue_run(run, _request_to(run, job), list_typed_settings(job), log)
    else:
        config = _apply_task(job.config, job.keys, log)
        if config.init_from:
            config = apply_starting_model(config, read_model(config.init_from), job.keys, log)
    check_config(config)
    _check_effects(config, job)
    if config.data.path:
        require_path("data.path", config.data.path)
    _check_agent(config, job)
    return replace(job, config=config)


def _expand_paths(config: Config) -> Config:
    """Return the configuration with the user's home in the paths of runs, models, tokenizers."""
    if config.run_dir:
        config = replace(config, run_dir=str(expand_home("run_dir", config.run_dir)))
    if config.init_from:
        config = replace(config, init_from=expand_model_name("init_from", config.init_from))
    if config.tokenizer.is_file:
        path = expand_home("tokenizer", config.tokenizer.name)
        if not path.is_file():
            raise UserError(f"tokenizer={path} is not a file: give the path of a tokenizer.json")
        config = replace_setting(config, "tokenizer.name", str(path))
    return config


def _request_to(run: Config, job: Job) -> Config:
    """Return what is requested of a run, with the typed presets as its experiment changes them."""
    config = job.config
    presets = [key for key in job.keys if _is_section(key)]
    if presets and run.experiment and "experiment" not in job.keys:
        overrides = [*job.overrides, f"experiment={run.experiment}"]
        composed = compose_job(overrides, job.source).config
        for key in presets:
            config = replace_setting(config, key, getattr(composed, key))
    return config


def _check_effects(config: Config, job: Job) -> None:
    """Raise `UserError` if a typed setting has no effect."""
    for key in [*job.keys, "data.path"]:  # which a preset may set
        if key in SETTINGS and (reason := explain_unused(config, key, job.swept)):
            raise UserError(reason)
    for mode, read in READ_BY_MODE.items():
        ignored = [override for override in job.overrides if not override.startswith(read)]
        if getattr(config, mode) and ignored:
            raise UserError(
                f"{show_value(ignored[0])} has no effect with {mode}=true: leave one of them out"
            )


def _check_agent(config: Config, job: Job) -> None:
    """Raise `UserError` unless the run has the values that a W&B sweep agent chose for it."""
    for key, value in read_agent_choices(config).items():
        if not {f"{key}={value}", f"{key}={quote(value)}"} & set(job.overrides):
            raise UserError(
                f"the W&B agent chose {key}={show_value(value)}, but this run was started without "
                "it: end the sweep's command with ${args_no_hyphens}, as wandb_sweep.yaml does, or "
                "set wandb.mode=disabled"
            )


def list_typed_settings(job: Job) -> list[str]:
    """Return the settings that were typed; a preset such as optim=muon counts as those it sets."""
    settings = []
    for key, override in zip(job.keys, job.overrides):
        if _is_section(key):
            nothing = job.source._replace(name="glassgpt_nothing")
            preset = compose_settings([f"+{override}"], nothing)
            settings += [f"{key}.{name}" for name in preset[key]]
        elif key in SETTINGS:
            settings.append(key)
    return settings


def _is_section(key: str) -> bool:
    return is_dataclass(getattr(Config(), key, None))


def _apply_task(config: Config, keys: list[str], log: Log) -> Config:
    """Return the configuration with the tokenizer and the length of generated sequences."""
    if config.data.source != "synthetic":
        return config
    typed = [key for key in keys if key.partition(".")[0] == "tokenizer"]
    if typed and config.tokenizer.name != "char":
        raise UserError(
            f"{typed[0]} has no effect with data=synthetic, where each symbol is a token: "
            "leave it out"
        )
    config = replace(config, tokenizer=TokenizerConfig("char"))
    length = fixed_sequence_length(config.data)
    if length not in (None, config.model.block_size) and "model.block_size" not in keys:
        config = replace_setting(config, "model.block_size", length)
        log(f"note: model.block_size={length} is the length of a sequence of this task")
    return config
