"""The configuration of a run: as Hydra composed it, or as the run that it continues has it."""

import re
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from cli.arguments import groups
from config import (
    Config,
    GPTConfig,
    TokenizerConfig,
    UserError,
    absolute_paths,
    knobs,
    named_paths,
    read_config,
    shown,
)

IMMUTABLE_ON_RESUME = ("model.", "tokenizer.", "seed", "batch_size", "optim.name", "init_from")
# What belongs to a command and not to the run that it continues.
PER_COMMAND = ("run_dir", "resume", "eval_only", "prepare_only", "dry_run", "accept_changed_data",
               "distributed", "shard")

# init_from as typed → itself, a name on the hub with its commit; its model's and its tokenizer's
# settings.
StartingConfig = Callable[[str], tuple[str, GPTConfig, TokenizerConfig]]

ConfigStore.instance().store(name="schema", node=Config)


def to_config(cfg, overrides: list[str],
              starting_config: StartingConfig | None = None) -> tuple[Config, bool]:
    """The checked configuration that Hydra composed, and whether it continues a run.

    A run that is resumed has the configuration it was started with, changed by what is typed now;
    an experiment that is typed stands for all its settings, as when the command that started the
    run is given again. `starting_config` says what init_from brings, in interop/.

    Raises:
        UserError: a setting is wrong, or the run cannot be continued with it.
    """
    asked = named_paths(OmegaConf.to_object(cfg))
    keys, notes = [o.partition("=")[0] for o in overrides], []
    if asked.init_from is not None:
        asked = adopt(asked, overrides, starting_config)
    else:
        asked, notes = fit_to_typed(asked, keys)
    config, run = asked, kept_config(asked)
    if run:
        config, notes = continued(run, absolute_paths(asked), keys)
    config.check()
    for note in notes:
        print(f"note: {note}")
    return config, run is not None


def kept_config(asked: Config) -> Config | None:
    """The configuration of the run to be continued, evaluated or planned; None for a new one.

    Raises:
        UserError: there is no such run.
    """
    if asked.run_dir is None or not (asked.resume or asked.eval_only or asked.dry_run):
        return None
    path = Path(asked.run_dir) / "config.yaml"
    if path.exists():
        return absolute_paths(read_config(path))
    if asked.resume is True or asked.eval_only:
        raise UserError(f"run_dir={asked.run_dir} holds no run, so there is nothing to continue: "
                        "leave resume=true out to start one there")
    return None


def continued(run: Config, asked: Config, keys: list[str]) -> tuple[Config, list[str]]:
    """A run's configuration, changed by the typed keys of `asked`, and notes for the user.

    Raises:
        UserError: something is changed that makes it another run.
    """
    config = run
    if "experiment" in keys:
        auto = {key: getattr(run, key) for key in ("device", "precision", "compile")
                if getattr(asked, key) == "auto"}
        config = replace(asked, **auto)
    for key in keys:
        if hasattr(config, key.partition(".")[0]):  # not an experiment
            config = with_value(config, key, attrgetter(key)(asked))
    if "data.val_windows" not in keys:  # a run keeps the windows that it began with
        config = with_value(config, "data.val_windows", run.data.val_windows)
    config = with_value(config, "model.vocab_size", config.model.vocab_size or run.model.vocab_size)
    config = replace(config, **{key: getattr(asked, key) for key in PER_COMMAND})
    now = {name: value for name, _, value in knobs(config)}
    changed = {name: value for name, _, value in knobs(run) if value != now[name]}
    wrong = [f"{name}: {value} in the run, {now[name]} asked for"
             for name, value in changed.items() if name.startswith(IMMUTABLE_ON_RESUME)]
    if wrong:
        raise UserError(f"run_dir={asked.run_dir} cannot continue with other settings "
                        f"({'; '.join(wrong)}): leave them as they are, or start a new run")
    return config, [f"{name} is {now[name]} from here on; it was {value}"
                    for name, value in changed.items()
                    if name in keys and name.startswith("optim.")]


def with_value(config: Config, key: str, value) -> Config:
    """The configuration with a setting, by its dotted key, or a whole section changed."""
    section, _, name = key.rpartition(".")
    if section:
        return replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return replace(config, **{name: value})


def fit_to_typed(config: Config, keys: list[str]) -> tuple[Config, list[str]]:
    """The configuration in which a preset's sizes follow the size of the model that is typed, and
    notes for the user."""
    notes = []
    if "model.n_kv_head" not in keys:
        config, notes = fit_kv_heads(config)
    if ("model.n_embd" in keys and "model.mlp_hidden" not in keys
            and config.model.mlp_hidden is not None):
        config = with_value(config, "model.mlp_hidden", None)
        notes.append(f"model.mlp_hidden={config.model.hidden_dim} follows your model.n_embd, not "
                     "the preset")
    return config, notes


def fit_kv_heads(config: Config) -> tuple[Config, list[str]]:
    """A preset's n_kv_head lowered to one that divides n_head, and notes for the user."""
    heads, preset = config.model.n_head, config.model.n_kv_head
    if preset is None or preset < 1 or heads < 1 or heads % preset == 0:
        return config, []
    fitting = max(n for n in range(1, min(heads, preset) + 1) if heads % n == 0)
    return with_value(config, "model.n_kv_head", fitting), [
        f"model.n_kv_head is {fitting}, since the preset's {preset} does not divide "
        f"model.n_head={heads}"]


def adopt(asked: Config, overrides: list[str],
          starting_config: StartingConfig) -> Config:
    """The configuration with the model and the tokenizer of the trained model that it starts from.

    Raises:
        UserError: there is no such run, or other settings for them are typed.
    """
    init_from, model, tokenizer = starting_config(asked.init_from)
    start = f"init_from={init_from}"
    for arg in overrides:
        if arg.startswith("model.block_size="):
            if asked.model.block_size > model.block_size:
                raise UserError(f"{arg} is more than the {model.block_size} of {start}: lower it, "
                                "or leave it out")
            model = replace(model, block_size=asked.model.block_size)
        elif re.match(r"(model|tokenizer)[.=]", arg) and not arg.startswith("model.dropout="):
            raise UserError(f"{arg} does not go with {start}, which brings its model and its "
                            "tokenizer: leave it out")
    return replace(asked, init_from=init_from, tokenizer=tokenizer,
                   model=replace(model, dropout=asked.model.dropout))


def typed(cfg, overrides: list[str]) -> dict[str, str]:
    """What a job was given, by key, as a user types it."""
    pairs = (override.partition("=")[::2] for override in overrides)
    return {key: value if key in groups() else shown(OmegaConf.select(cfg, key))
            for key, value in pairs}


def own_config_dir(job) -> dict[str, str]:
    """The --config-dir that `job`, Hydra's configuration of a job, was given, by that name."""
    folders = [source.path.removeprefix("file://")
               for source in job.runtime.config_sources if source.provider == "command-line"]
    return {"--config-dir": folders[0]} if folders else {}
