"""From the arguments of train.py to the checked configuration of a run.

Hydra composes presets and settings, and `check_config` checks them. Does not import torch.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from cli.checks import check_config, fixed_sequence_length
from cli.command_line import (
    CONFIGS,
    PRESETS,
    SETTINGS,
    CommandLine,
    find_presets,
    parse_command_line,
    parse_options,
    quote,
)
from cli.continuation import (
    FINE_TUNING,
    apply_starting_model,
    continue_run,
    find_run_to_continue,
    is_pretrained,
)
from cli.help import train_help
from cli.presets import use_preset_files
from cli.wandb_environment import read_agent_choices
from common.errors import UserError
from common.paths import expand_home, expand_model_name, require_path
from common.settings import check_settings, explain_unused, replace_setting, show_value
from common.signals import exit_on_stop_signals
from common.terminal import command, error_sentence
from common.torchrun import process_rank
from config import Config, TokenizerConfig
from run.run_dir import Log

ConfigStore.instance().store(name="schema", node=Config)
ConfigStore.instance().store(name="nothing", node={})  # to which a preset is added alone

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


@dataclass(frozen=True)
class Job:
    """One run as it was requested: its settings, and the overrides that they come from."""

    config: Config
    overrides: list[str]  # as typed: KEY=VALUE
    config_dir: str | None = None  # a folder with presets of the user's own
    swept: Sequence[str] = ()  # the keys that differ between the jobs of a sweep

    @property
    def keys(self) -> list[str]:
        """The keys of the overrides."""
        return [override.partition("=")[0] for override in self.overrides]


def read_request(read_model: ReadModel) -> CommandLine | Job:
    """Read the command line before torch is imported; return a run, or a sweep's command line.

    Prints the help or the configuration if that is asked for and exits, with status 1 after one
    sentence about a mistake.
    """
    request: CommandLine | Job
    with command(_help):
        request = command_line = parse_command_line(sys.argv[1:])
        if command_line.is_shown or not command_line.is_sweep:
            job = compose_job(command_line.settings, command_line.config_dir)
            if command_line.is_shown:
                print(yaml.safe_dump(asdict(job.config), sort_keys=False), end="")
                sys.exit()
            request = configure(job, read_model)
    exit_on_stop_signals()
    return request


def _help() -> str:
    options, _ = parse_options(sys.argv[1:])
    return train_help(compose_job([]).config, find_presets(options.config_dir), options.help)


def read_job(arguments: Sequence[str], read_model: ReadModel) -> Job:
    """Return the configured run that these arguments of train.py describe."""
    command_line = parse_command_line(arguments)
    if command_line.is_sweep or command_line.is_shown:
        raise UserError("-m and --cfg do not describe a single run: leave them out")
    return configure(compose_job(command_line.settings, command_line.config_dir), read_model)


def compose_settings(
    overrides: list[str], config_dir: str | None = None, name: str = "config"
) -> DictConfig:
    """Have Hydra compose presets and quoted overrides; the result includes Hydra's own settings."""
    use_preset_files()
    if config_dir is not None:
        folder = quote(f"file://{expand_home('--config-dir', config_dir).absolute()}")
        overrides = [*overrides, f"hydra.searchpath=[{folder}]"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        try:
            return compose(name, overrides, return_hydra_config=True)
        except MissingConfigException as e:
            is_own = config_dir is None and not str(e.missing_cfg_file).startswith("hydra/")
            hint = " (a preset of your own needs --config-dir)" if is_own else ""
            raise UserError(f"{error_sentence(e)}{hint}") from None
        except (HydraException, OmegaConfBaseException) as e:
            raise UserError(error_sentence(e)) from None
        except (ValueError, RecursionError) as e:
            presets = " ".join(o for o in overrides if o.partition("=")[0] in PRESETS)
            raise UserError(
                f"the defaults of {presets or 'the presets'} cannot be followed "
                f"({error_sentence(e)}): correct them"
            ) from None


def compose_job(overrides: list[str], config_dir: str | None = None) -> Job:
    """Compose the job that these overrides describe, and check the bounds of its settings.

    The path of a text implies data=text unless another source is chosen, and a typed pretrained
    model experiment=finetune unless an experiment is typed.
    """
    job = Job(_compose_config(overrides, config_dir), overrides, config_dir)
    implied = _list_implied_presets(job)
    if implied:
        job = replace(job, config=_compose_config([*overrides, *implied], config_dir))
    return job


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


def _compose_config(overrides: list[str], config_dir: str | None) -> Config:
    composed = compose_settings(overrides, config_dir)
    with open_dict(composed):
        hydra_settings = composed.pop("hydra")
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as e:
        raise UserError(error_sentence(e)) from None
    check_settings(config)
    return replace(config, experiment=hydra_settings.runtime.choices.get("experiment"))


def configure(job: Job, read_model: ReadModel, log: Log = print) -> Job:
    """Return a job with the configuration with which it trains.

    A run that is resumed keeps the configuration it was started with, except for the settings that
    are typed now. With torchrun only rank 0 does this. `log` prints notes.
    """
    if process_rank() > 0 and job.config.distributed != "none":
        return job
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
    """Return the configuration with the user's home in the paths of runs and models."""
    if config.run_dir:
        config = replace(config, run_dir=str(expand_home("run_dir", config.run_dir)))
    if config.init_from:
        config = replace(config, init_from=expand_model_name("init_from", config.init_from))
    return config


def _request_to(run: Config, job: Job) -> Config:
    """Return what is requested of a run, with the typed presets as its experiment changes them."""
    config = job.config
    presets = [key for key in job.keys if _is_section(key)]
    if presets and run.experiment and "experiment" not in job.keys:
        overrides = [*job.overrides, f"experiment={run.experiment}"]
        composed = _compose_config(overrides, job.config_dir)
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
            preset = compose_settings([f"+{override}"], job.config_dir, "nothing")
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
