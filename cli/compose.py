"""The configuration of a run: as Hydra composes it, or as the run that it continues has it."""

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from cli.arguments import CONFIGS, check_arguments, hydra_options, quote
from cli.command import Terminal, printer, rank, start
from cli.config_file import absolute_paths, read_config
from cli.settings import train_help
from common.errors import UserError
from common.paths import expand_home, require_path
from common.settings import iterate_settings
from config import Config, GPTConfig, TokenizerConfig

# With other windows of validation the best loss so far would not compare.
IMMUTABLE_ON_RESUME = (
    "model.",
    "tokenizer.",
    "seed",
    "batch_size",
    "optim.name",
    "init_from",
    "data.val_max_tokens",
)
# What belongs to a command and not to the run that it continues.
PER_COMMAND = ("run_dir", "resume", "prepare_only", "distributed", "shard")

# init_from → itself with its commit, if of the hub; its model's and its tokenizer's settings.
StartingConfig = Callable[[str], tuple[str, GPTConfig, TokenizerConfig]]

ConfigStore.instance().store(name="schema", node=Config)


def answer_early() -> None:
    """Answer --help and mistakes before torch takes seconds to load."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # while imports take seconds too
        signal.signal(stop, lambda number, _: sys.exit(128 + number))
    start(check_composed, lambda: train_help(OmegaConf.to_object(composed([]))), check_arguments)


def check_composed() -> None:
    """Refuse a configuration that cannot work, of a job as it begins; say what a run waits for. Of
    several processes the first alone looks at folders: the others might see its own doing."""
    given = hydra_options(sys.argv[1:])
    if given.asked:
        return
    if not given.multirun:
        cfg = composed(given.settings, given.config_dir)
        if rank() == 0 or cfg.distributed == "none":
            config = to_config(cfg, given.settings, log=lambda note: None)
            if config.data.path:
                require_path(config.data.path)
    if rank() == 0:
        printer(Terminal())("loading PyTorch …")


def composed(typed: list[str], config_dir: str | None = None, **options) -> DictConfig:
    """What Hydra composes of these arguments, and of the presets in a folder of one's own."""
    if config_dir is not None:
        typed = [*typed, f"hydra.searchpath=[{quote('file://' + os.path.abspath(config_dir))}]"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", typed, **options)


def to_config(
    cfg: DictConfig,
    overrides: list[str],
    starting_config: StartingConfig | None = None,
    log: Callable[[str], None] = print,
) -> Config:
    """The checked configuration that Hydra composed of these overrides. A run that is resumed has
    the configuration it was started with, changed by what is typed now; an experiment that is typed
    stands for all its settings, as when the command that started the run is given again. Without
    `starting_config` it stays open what init_from brings."""
    asked = OmegaConf.to_object(cfg)
    for name in ("run_dir", "init_from"):
        if path := getattr(asked, name):
            asked = replace(asked, **{name: str(expand_home(name, path))})
    keys = [override.partition("=")[0] for override in overrides]
    run = kept_config(asked)
    if asked.init_from is None:
        asked = fit_to_typed(asked, keys, log)
    elif run and begins_as(run, asked):  # which the run needs no more
        asked = adopt(asked, overrides, run.init_from, run.model, run.tokenizer)
    elif starting_config is None:
        run = None
    else:
        asked = adopt(asked, overrides, *starting_config(asked.init_from))
    config = continued(run, absolute_paths(asked), keys, log) if run else asked
    config.check()
    return config


def kept_config(asked: Config) -> Config | None:
    """The configuration of the run to be continued; None for a new one."""
    if asked.run_dir is None or not asked.resume:
        return None
    path = Path(asked.run_dir) / "config.yaml"
    if path.exists():
        return absolute_paths(read_config(path))
    if asked.resume is True:
        raise UserError(
            f"run_dir={asked.run_dir} holds no run, so there is nothing to continue: "
            "leave resume=true out to start one there"
        )
    return None


def begins_as(run: Config, asked: Config) -> bool:
    """Whether a run has the init_from that is asked for, if of the hub at any commit."""
    name = str(run.init_from)
    return name == absolute_paths(asked).init_from or name.startswith(f"{asked.init_from}@")


def continued(run: Config, asked: Config, keys: list[str], log: Callable[[str], None]) -> Config:
    """A run's configuration, changed by the typed keys of `asked`."""
    config = run
    if "experiment" in keys:
        auto = {
            key: getattr(run, key)
            for key in ("device", "precision", "compile")
            if getattr(asked, key) == "auto"
        }
        config = replace(asked, **auto)
    for key in keys:
        if hasattr(config, key.partition(".")[0]):  # not an experiment
            config = with_value(config, key, attrgetter(key)(asked))
    for name in ("vocab_size", "ngram_rows"):  # which presets leave open
        value = getattr(config.model, name) or getattr(run.model, name)
        config = with_value(config, f"model.{name}", value)
    config = replace(config, **{key: getattr(asked, key) for key in PER_COMMAND})
    now = {name: value for name, _, value in iterate_settings(config)}
    changed = {name: value for name, _, value in iterate_settings(run) if value != now[name]}
    wrong = [
        f"{name}: {value} in the run, {now[name]} asked for"
        for name, value in changed.items()
        if name.startswith(IMMUTABLE_ON_RESUME)
    ]
    if wrong:
        raise UserError(
            f"run_dir={asked.run_dir} cannot continue with other settings "
            f"({'; '.join(wrong)}): leave them as they are, or start a new run"
        )
    for name in changed:
        if name in keys and name.startswith("optim."):
            log(f"note: {name} is {now[name]} from here on; it was {changed[name]}")
    return config


def with_value(config: Config, key: str, value) -> Config:
    """The configuration with a setting, by its dotted key, or a whole section changed."""
    section, _, name = key.rpartition(".")
    if section:
        return replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return replace(config, **{name: value})


def fit_to_typed(config: Config, keys: list[str], log: Callable[[str], None]) -> Config:
    """The configuration in which a preset's sizes follow those that are typed."""
    model = config.model
    if "model.n_embd" in keys and "model.mlp_hidden" not in keys and model.mlp_hidden:
        model = replace(model, mlp_hidden=None)
        log(f"note: model.mlp_hidden={model.hidden_dim} follows your model.n_embd, not the preset")
    optim = config.optim
    if optim.muon_lr and "optim.lr" in keys and "optim.muon_lr" not in keys:
        optim = replace(optim, muon_lr=None)
        log(f"note: optim.muon_lr={optim.muon_rate:g} follows your optim.lr, not the preset")
    return replace(config, model=model, optim=optim)


def adopt(
    asked: Config,
    overrides: list[str],
    init_from: str,
    model: GPTConfig,
    tokenizer: TokenizerConfig,
) -> Config:
    """The configuration that starts from a trained model, and keeps its shape and its tokenizer."""
    for arg in overrides:
        if arg.startswith("model.block_size="):
            if asked.model.block_size > model.block_size:
                raise UserError(
                    f"{arg} is more than the {model.block_size} of init_from="
                    f"{init_from}: lower it, or leave it out"
                )
            model = replace(model, block_size=asked.model.block_size)
        elif re.match(r"(model|tokenizer)[.=]", arg) and not arg.startswith("model.dropout="):
            raise UserError(
                f"{arg} does not go with init_from={init_from}, which brings its model "
                "and its tokenizer: leave it out"
            )
    model = replace(model, dropout=asked.model.dropout)
    return replace(asked, init_from=init_from, model=model, tokenizer=tokenizer)
