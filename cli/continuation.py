"""Merge the requested settings with the run that they continue, or the model they start from."""

import re
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from cli.config_file import PER_COMMAND, absolute_paths, read_run_config
from common.checkpoints import contains_run, no_checkpoint, saved_steps
from common.errors import UserError
from common.settings import iterate_settings
from config import Config

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
# What init_from determines, so that an experiment does not change it when a run is resumed.
SET_BY_START = ("init_from", "model", "tokenizer")
# The settings that a model to start from determines.
DETERMINED_BY_START = re.compile(r"(model|tokenizer)\b(?!\.(block_size|dropout|vocab_multiple)$)")
# What fine-tuning a pretrained model lowers unless it is typed.
LOWERED_BY_FINE_TUNING = ("optim.lr", "model.block_size", "attention.every")
FINE_TUNING_SHARE = 0.1  # of a preset's learning rates, which damage pretrained models (LOG.md)
MAX_FINE_TUNING_CONTEXT = 256  # tokens; a pretrained model's own context may need a server's memory


def continue_or_adopt(
    requested: Config,
    keys: list[str],
    read_model: Callable[[str], Config],
    log: Callable[[str], None],
) -> Config:
    """Return the configuration of the continued run, or of one that starts from a model.

    A new run without `init_from` is trained as requested. `read_model` reads the shape and the
    tokenizer of a model, and pins the commit of one on the hub. `keys` are those that were typed.
    """
    run = _config_to_continue(requested)
    config = requested
    if requested.init_from and run and _has_same_start(run, requested):
        config = _adopt(requested, keys, run)  # the starting model is not needed any more
    elif requested.init_from:
        start = read_model(requested.init_from)
        config = _adopt(requested, keys, start)
        is_pretrained = start.run_dir is None  # not a run that began with random weights
        # A preset that names init_from has its own values.
        if is_pretrained and "init_from" in keys and not requested.eval_only:
            config = _fit_to_fine_tuning(config, keys, log)
    if run is None:
        return config
    return _continue_run(run, absolute_paths(config), keys, log)


def _config_to_continue(requested: Config) -> Config | None:
    if requested.run_dir is None or not (requested.resume or requested.eval_only):
        return None
    run_dir = Path(requested.run_dir)
    if requested.eval_only and run_dir.absolute().parent.name == "checkpoints":
        run_dir = run_dir.absolute().parents[1]
    if saved_steps(run_dir):
        return absolute_paths(read_run_config(run_dir))
    if contains_run(run_dir) and requested.resume != "auto":
        raise no_checkpoint(run_dir)
    if requested.eval_only:
        raise UserError(
            f"run_dir={requested.run_dir} contains no run to evaluate: name the folder of a run, "
            "or a model of another library with init_from=MODEL"
        )
    if requested.resume is True:
        raise UserError(
            f"run_dir={run_dir} contains no run to resume: leave out resume=true to start one there"
        )
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
            for key in ("device", "precision", "compile", "threads")
            if getattr(requested, key) == "auto"
        }
        if run.init_from:
            resolved |= {key: getattr(run, key) for key in SET_BY_START}
        config = replace(requested, **resolved)
    for key in keys:
        if hasattr(config, key.partition(".")[0]):  # a setting or a section, not an experiment
            config = config.with_value(key, attrgetter(key)(requested))
    if "data.path" in keys and run.data.source == "stdlib":
        config = config.with_value("data.source", requested.data.source)  # a path implies text
    for key in LOWERED_BY_FINE_TUNING:
        if run.init_from and key not in keys:
            config = config.with_value(key, attrgetter(key)(run))
    # Presets leave these open, and the run resolved them.
    for name in ("vocab_size", "vocab_multiple", "ngram_rows"):
        value = getattr(config.model, name) or getattr(run.model, name)
        config = config.with_value(f"model.{name}", value)
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
        if name in keys and name.startswith("optim.") and not config.eval_only:
            log(f"note: {name} changes from {old_value} to {new[name]} from here on")
    return config


def _adopt(requested: Config, keys: list[str], start: Config) -> Config:
    """Return the configuration with the shape and tokenizer of the model that it starts from."""
    if conflicts := [key for key in keys if DETERMINED_BY_START.match(key)]:
        raise UserError(
            f"{' and '.join(conflicts)} cannot be combined with init_from={start.init_from}, which "
            "determines the model and the tokenizer: leave them out"
        )
    model = replace(
        start.model,
        dropout=requested.model.dropout,
        vocab_multiple=requested.model.vocab_multiple,
    )
    if "model.block_size" in keys:
        if requested.model.block_size > model.block_size:
            raise UserError(
                f"model.block_size={requested.model.block_size} exceeds the context length "
                f"{model.block_size} of init_from={start.init_from}: lower it, or leave it out"
            )
        model = replace(model, block_size=requested.model.block_size)
    return replace(requested, init_from=start.init_from, model=model, tokenizer=start.tokenizer)


def _fit_to_fine_tuning(config: Config, keys: list[str], log: Callable[[str], None]) -> Config:
    """Lower, unless they are typed, settings that suit only training from scratch, and say so.

    Any typed attention setting keeps attention.every.
    """
    notes = []
    if "optim.lr" not in keys:
        rate = float(f"{FINE_TUNING_SHARE * config.optim.lr:.6g}")
        config = config.with_value("optim.lr", rate)
        notes.append(f"optim.lr={config.optim.lr:g}, a tenth of the preset's")
    context = config.model.block_size
    if "model.block_size" not in keys and context > MAX_FINE_TUNING_CONTEXT:
        config = config.with_value("model.block_size", MAX_FINE_TUNING_CONTEXT)
        notes.append(f"model.block_size={MAX_FINE_TUNING_CONTEXT}, below the model's {context:,}")
    if config.attention.every and not any(key.startswith("attention.") for key in keys):
        config = config.with_value("attention.every", 0)
        notes.append("attention.every=0, so heads are measured only at the end")
    if notes:
        log(f"note: to fine-tune, {'; '.join(notes)}; set them to choose them yourself")
    return config
