"""Compose a run's settings from presets and overrides, and merge them with the run it continues."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from cli.arguments import quote
from cli.config_file import PER_COMMAND, absolute_paths, read_run_config
from cli.presets import CONFIGS, SETTINGS
from cli.unused import refuse_unused, refuse_unused_in_files
from common.checkpoints import contains_run
from common.errors import UserError
from common.files import list_folder
from common.paths import expand_home, expand_model_name
from common.settings import iterate_settings
from common.terminal import error_sentence
from config import Config, TokenizerConfig

# Settings that a resumed run keeps: its weights, data order and best loss depend on them.
IMMUTABLE_ON_RESUME = (
    "model.",
    "tokenizer.",
    "seed",
    "batch_size",
    "optim.name",
    "init_from",
    "data.val_max_tokens",
)
# Settings that an evaluation of a run keeps: those of its model.
IMMUTABLE_IN_EVALUATION = ("model.", "tokenizer.", "init_from")
# A setting, another one that follows from it if it is null, and the property with its value then.
DEPENDENT_SETTINGS = (
    ("model.n_embd", "model.mlp_hidden", "model.hidden_dim"),
    ("optim.lr", "optim.muon_lr", "optim.muon_peak_lr"),
)
# What init_from determines, so that an experiment does not change it when a run is resumed.
SET_BY_START = ("init_from", "model", "tokenizer")
LEARNING_RATES = ("optim.lr", "optim.muon_lr")  # init_from may lower them
FINE_TUNING_SHARE = 0.1  # of a preset's learning rates, which damage pretrained models (LOG.md)

ConfigStore.instance().store(name="schema", node=Config)


@dataclass(frozen=True)
class Job:
    """One run as it was requested: its composed settings, and the overrides they come from."""

    config: Config  # composed, but neither checked nor merged with the run that it continues
    overrides: list[str]  # as typed: KEY=VALUE
    experiment: str = "default"
    swept: Sequence[str] = ()  # the keys that differ between the jobs of a sweep

    @property
    def keys(self) -> list[str]:
        """The keys of the overrides."""
        return [override.partition("=")[0] for override in self.overrides]


def compose_settings(overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """Have Hydra compose presets and quoted overrides; the result includes Hydra's own settings."""
    if config_dir is not None:
        folder = quote("file://" + os.path.abspath(config_dir))
        overrides = [*overrides, f"hydra.searchpath=[{folder}]"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides, return_hydra_config=True)


def compose_job(overrides: list[str], config_dir: str | None = None) -> Job:
    """Compose the job that these overrides describe."""
    composed = compose_settings(overrides, config_dir)
    with open_dict(composed):
        hydra_settings = composed.pop("hydra")
    if hydra_settings.mode == RunMode.MULTIRUN:
        raise UserError("hydra.mode=MULTIRUN in a preset asks for a sweep: add -m")
    experiment = hydra_settings.runtime.choices.get("experiment") or "default"
    try:
        return Job(OmegaConf.to_object(composed), overrides, experiment)
    except OmegaConfBaseException as e:
        raise UserError(f"{error_sentence(e)}; correct it, or write the value itself") from None


def configure(
    job: Job,
    starting_model: Callable[[str], Config] | None = None,
    log: Callable[[str], None] = print,
) -> Config:
    """Return the checked configuration of a job.

    A run that is resumed keeps the configuration it was started with, except for the settings that
    are typed now. A typed experiment counts as all of its settings, so that the command that
    started a run can be repeated to resume it.

    `starting_model` reads the shape and tokenizer of the model that `init_from` names, and pins the
    commit of a model on the hub. Without it, as before torch is imported, they stay as composed.
    `log` prints notes about derived settings.

    Raises:
        UserError: If settings are invalid, or contradict each other or the run to be continued.
    """
    run_dir, init_from = job.config.run_dir, job.config.init_from
    if run_dir:
        run_dir = str(expand_home("run_dir", run_dir))
    if init_from is not None:
        init_from = expand_model_name("init_from", init_from)
    config = replace(job.config, run_dir=run_dir, init_from=init_from)
    config = _fit_to_task(config, job.keys, log)
    run = _config_to_continue(config, log)
    if init_from is None:
        config = _fit_to_overrides(config, job.keys, log)
    elif run and _has_same_start(run, config):  # the starting model is not needed any more
        config = _adopt(config, job.overrides, run)
    elif starting_model:
        config = _adopt(config, job.overrides, starting_model(init_from))
        config = _fit_to_overrides(config, job.keys, log)
        if config.optim.lr != job.config.optim.lr and not config.eval_only:
            log(
                f"note: optim.lr={config.optim.lr:g} is a tenth of the preset's, which would "
                "damage a pretrained model; set optim.lr to choose it yourself"
            )
    else:
        run = None
    if run:
        config = _continue_run(run, absolute_paths(config), job.keys, log)
    config.check()
    _refuse_unused(job, config)
    return config


def _refuse_unused(job: Job, config: Config) -> None:
    """Raise `UserError` if a setting was typed that has no effect in any job of the sweep."""
    values = {
        name: value
        for name, _, value in iterate_settings(config)
        if not any(key == "experiment" or f"{name}.".startswith(f"{key}.") for key in job.swept)
    }
    typed = {key: attrgetter(key)(config) for key in job.keys if key in SETTINGS}
    refuse_unused(typed, values)
    if "data.path" in values:
        refuse_unused_in_files(typed, config.data)


def _config_to_continue(requested: Config, log: Callable[[str], None]) -> Config | None:
    """Return the configuration of the run to be continued, or None for a new run."""
    if requested.run_dir is None or not (requested.resume or requested.eval_only):
        return None
    run_dir = Path(requested.run_dir)
    if requested.eval_only and run_dir.absolute().parent.name == "checkpoints":
        run_dir = run_dir.absolute().parents[1]
    if contains_run(run_dir):
        return absolute_paths(read_run_config(run_dir, log))
    if requested.eval_only:
        raise UserError(
            f"run_dir={requested.run_dir} contains no run to evaluate: name the folder of a run, "
            "or a model of another library with init_from=MODEL"
        )
    if requested.resume is True:
        advice = "leave out resume=true to start one there"
        if list_folder(run_dir):
            advice = "it has neither a config.yaml nor checkpoints; choose another folder"
        raise UserError(f"run_dir={run_dir} contains no run to resume: {advice}")
    return None


def _has_same_start(run: Config, requested: Config) -> bool:
    """Return whether a run began from the requested init_from, at whatever commit of the hub."""
    name = str(run.init_from)
    is_same_path = name == absolute_paths(requested).init_from
    return is_same_path or name.startswith(f"{requested.init_from}@")


def _continue_run(
    run: Config, requested: Config, keys: list[str], log: Callable[[str], None]
) -> Config:
    """Return a run's configuration, changed by the requested settings of these keys."""
    config = run
    if "experiment" in keys:
        resolved = {
            key: getattr(run, key)
            for key in ("device", "precision", "compile")
            if getattr(requested, key) == "auto"
        }
        if run.init_from:
            resolved |= {key: getattr(run, key) for key in SET_BY_START}
        config = replace(requested, **resolved)
    for key in keys:
        if hasattr(config, key.partition(".")[0]):  # a setting or a section, not an experiment
            config = _with_value(config, key, attrgetter(key)(requested))
    for key in LEARNING_RATES:
        if run.init_from and key not in keys:
            config = _with_value(config, key, attrgetter(key)(run))
    # Presets leave these open, and the run resolved them.
    for name in ("vocab_size", "vocab_multiple", "ngram_rows"):
        value = getattr(config.model, name) or getattr(run.model, name)
        config = _with_value(config, f"model.{name}", value)
    config = replace(config, **{key: getattr(requested, key) for key in PER_COMMAND})

    new = {name: value for name, _, value in iterate_settings(config)}
    changed = {name: value for name, _, value in iterate_settings(run) if value != new[name]}
    immutable = IMMUTABLE_IN_EVALUATION if config.eval_only else IMMUTABLE_ON_RESUME
    conflicts = [
        f"{name} is {old_value} in the run but {new[name]} was requested"
        for name, old_value in changed.items()
        if name.startswith(immutable)
    ]
    if conflicts:
        activity = "evaluated" if config.eval_only else "resumed"
        alternative = "" if config.eval_only else ", or start a new run"
        raise UserError(
            f"run_dir={requested.run_dir} cannot be {activity} with other settings "
            f"({'; '.join(conflicts)}): leave them unchanged{alternative}"
        )
    for name, old_value in changed.items():
        if name in keys and name.startswith("optim."):
            log(f"note: {name} changes from {old_value} to {new[name]} from here on")
    return config


def _with_value(config: Config, key: str, value: Any) -> Config:
    """Return the configuration with one setting, named by its dotted key, or section replaced."""
    section, _, name = key.rpartition(".")
    if section:
        return replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return replace(config, **{name: value})


def _fit_to_overrides(config: Config, keys: list[str], log: Callable[[str], None]) -> Config:
    """Reset a preset's settings that depend on a setting that was typed."""
    for typed, dependent, effective in DEPENDENT_SETTINGS:
        if typed in keys and dependent not in keys and attrgetter(dependent)(config):
            config = _with_value(config, dependent, None)
            log(
                f"note: {dependent}={attrgetter(effective)(config):g} is derived from your {typed} "
                "and replaces the preset's value"
            )
    is_too_short = config.max_steps <= (config.optim.warmup_steps or 0)
    if is_too_short and "max_steps" in keys and "optim.warmup_steps" not in keys:
        config = _with_value(config, "optim.warmup_steps", None)
        log(f"note: max_steps={config.max_steps} shortens the preset's warm-up")
    return config


def _fit_to_task(config: Config, keys: list[str], log: Callable[[str], None]) -> Config:
    """Return the configuration with the tokenizer and the length of generated sequences."""
    if config.data.source != "synthetic":
        return config
    typed = [key for key in keys if key.partition(".")[0] == "tokenizer"]
    if typed and config.tokenizer != TokenizerConfig("char"):
        raise UserError(
            f"{typed[0]} has no effect with data=synthetic, where each symbol is a token: "
            "leave it out"
        )
    config = replace(config, tokenizer=TokenizerConfig("char"))
    length = config.data.sequence_length
    if length not in (None, config.model.block_size) and "model.block_size" not in keys:
        config = _with_value(config, "model.block_size", length)
        log(f"note: model.block_size={length} is the length of a sequence of this task")
    return config


def _adopt(requested: Config, overrides: list[str], start: Config) -> Config:
    """Return the configuration with the shape and tokenizer of the model that it starts from.

    If that model is pretrained, learning rates that are not typed are lowered.
    """
    model = start.model
    for override in overrides:
        if override.startswith("model.block_size="):
            if requested.model.block_size > model.block_size:
                raise UserError(
                    f"{override} exceeds the context length {model.block_size} of "
                    f"init_from={start.init_from}: lower it, or leave it out"
                )
            model = replace(model, block_size=requested.model.block_size)
        elif re.match(r"(model|tokenizer)[.=](?!(dropout|vocab_multiple)=)", override):
            raise UserError(
                f"{override} cannot be combined with init_from={start.init_from}, which "
                "determines the model and the tokenizer: leave it out"
            )
    model = replace(
        model,
        dropout=requested.model.dropout,
        vocab_multiple=requested.model.vocab_multiple,
    )
    adopted = replace(requested, init_from=start.init_from, model=model, tokenizer=start.tokenizer)
    typed = {override.partition("=")[0] for override in overrides}
    is_pretrained = start.run_dir is None  # not a run that began with random weights
    # A preset that names init_from has its own rates
    if is_pretrained and "init_from" in typed and "optim.lr" not in typed:
        for key in LEARNING_RATES:
            rate = attrgetter(key)(requested)
            if rate and key not in typed:
                adopted = _with_value(adopted, key, float(f"{FINE_TUNING_SHARE * rate:.6g}"))
    return adopted
