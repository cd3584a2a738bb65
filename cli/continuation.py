"""Merge the requested settings with the run that they continue, or the model they start from."""

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from common.errors import UserError
from common.files import exists, is_folder
from common.paths import expand_model_name
from common.settings import format_settings, replace_setting
from config import Config
from run.checkpoints import MANIFEST_FILE
from run.config_file import PER_COMMAND, absolute_paths
from run.run_dir import CHECKPOINTS, Log, RunDir, find_run

# Settings that a resumed run keeps: its weights, data order and best loss depend on them.
IMMUTABLE_ON_RESUME = (
    "experiment",
    "model.",
    "tokenizer.",
    "seed",
    "batch_size",
    "optim.name",
    "init_from",
    "data.val_max_tokens",
)
# Settings that an evaluation of a run keeps: those of its model.
IMMUTABLE_IN_EVALUATION = ("experiment", "model.", "tokenizer.", "init_from")
# Settings that a run has resolved: if null or auto is typed again, it keeps its values.
RESOLVED = (
    "device",
    "precision",
    "compile",
    "threads",
    "model.vocab_size",
    "model.vocab_multiple",
    "model.ngram_rows",
)
# The settings that a model to start from determines.
DETERMINED_BY_START = re.compile(r"(model|tokenizer)\b(?!\.(block_size|dropout|vocab_multiple)$)")
# The experiment with which a pretrained model is trained unless another one is typed.
FINE_TUNING = "finetune"


def find_run_to_continue(requested: Config) -> Config | None:
    """Return the configuration of the run to resume or to evaluate; None for a new run."""
    if requested.run_dir is None or not (requested.resume or requested.eval_only):
        return None
    run_dir = RunDir(Path(requested.run_dir))
    if requested.eval_only:  # the path may be that of a checkpoint, also of one that was set aside
        folder = run_dir.path.absolute().parent
        run_dir = RunDir(folder.parent) if folder.name == CHECKPOINTS else run_dir
    if run_dir.steps():
        return absolute_paths(run_dir.saved_config())
    if requested.resume == "auto":
        return None
    raise run_dir.missing_checkpoint()


def continue_run(run: Config, requested: Config, typed: Sequence[str], log: Log) -> Config:
    """Return a run's configuration, changed by the settings that are typed.

    Raises:
        UserError: A setting would change that the run keeps.
    """
    config = _change_run(run, requested, typed)
    changes = _list_changes(run, config)
    kept = IMMUTABLE_IN_EVALUATION if config.eval_only else IMMUTABLE_ON_RESUME
    for key, old, new in changes:
        if key.startswith(kept):
            raise UserError(
                f"{key} is {old} in run_dir={requested.run_dir}, which keeps it, but {new} was "
                "requested: leave it out, or start a new run"
            )
    if not config.eval_only and RunDir(Path(str(config.run_dir))).steps()[-1] < config.max_steps:
        for key, old, new in changes:
            log(f"note: {key} changes from {old} to {new} from here on")
    return config


def _change_run(run: Config, requested: Config, typed: Sequence[str]) -> Config:
    """Return a run's configuration with the typed settings, and those of this command."""
    if run.init_from and run.init_from.startswith(f"{requested.init_from}@"):  # on the hub
        requested = replace(requested, init_from=run.init_from)
    requested = absolute_paths(requested)
    config = replace(run, **{key: getattr(requested, key) for key in PER_COMMAND})
    if "data.path" in typed and run.data.source == "stdlib":
        typed = [*typed, "data.source"]  # a path implies text
    for key in typed:
        value = attrgetter(key)(requested)
        if key not in RESOLVED or value not in (None, "auto"):
            config = replace_setting(config, key, value)
    return config


def _list_changes(before: Config, after: Config) -> list[tuple[str, str, str]]:
    """Return the key of each setting of a run that differs, with its values before and after."""
    pairs = zip(format_settings(before).items(), format_settings(after).values())
    return [(key, old, new) for (key, old), new in pairs if old != new and key not in PER_COMMAND]


# --- the model that a run starts from -------------------------------------------------------------


def is_pretrained(init_from: str) -> bool:
    """Return whether a model is of another library, or of a run that fine-tuned one."""
    path = Path(expand_model_name("init_from", init_from))
    run_dir, _ = find_run(path)
    if run_dir and run_dir.steps():
        return run_dir.saved_config().experiment == FINE_TUNING
    folder = path if is_folder(path) else path.parent
    return not exists(folder / MANIFEST_FILE)  # of a checkpoint that was copied out of its run


def apply_starting_model(requested: Config, start: Config, keys: Sequence[str], log: Log) -> Config:
    """Return the configuration with the shape and tokenizer of the model that it starts from.

    The context length of a pretrained model, which may need the memory of a server, is at most
    that of the presets. `keys` are those of the typed settings.
    """
    _check_starting_model(requested, start, keys)
    model = replace(
        start.model,
        dropout=requested.model.dropout,
        vocab_multiple=requested.model.vocab_multiple,
    )
    is_fine_tuning = not requested.eval_only and is_pretrained(str(start.init_from))
    if is_fine_tuning or "model.block_size" in keys:
        block_size = min(requested.model.block_size, start.model.block_size)
        model = replace(model, block_size=block_size)
    if is_fine_tuning and "init_from" in keys:  # an experiment that names it has its own rate
        _note_fine_tuning(requested, keys, log)
    return replace(requested, init_from=start.init_from, model=model, tokenizer=start.tokenizer)


def _check_starting_model(requested: Config, start: Config, keys: Sequence[str]) -> None:
    """Raise `UserError` if a typed setting contradicts the model to start from."""
    if conflicts := [key for key in keys if DETERMINED_BY_START.match(key)]:
        raise UserError(
            f"{' and '.join(conflicts)} cannot be combined with init_from={start.init_from}, which "
            "determines the model and the tokenizer: leave them out"
        )
    context = requested.model.block_size
    longest = start.model.block_size
    if "model.block_size" in keys and context > longest:
        raise UserError(
            f"model.block_size={context} exceeds the context length {longest} of "
            f"init_from={start.init_from}: lower it, or leave it out"
        )


def _note_fine_tuning(requested: Config, keys: Sequence[str], log: Log) -> None:
    """Print which experiment a pretrained model implies, or that the typed one may damage it."""
    if "experiment" not in keys:
        log(f"note: a pretrained model in init_from implies experiment={FINE_TUNING}")
    elif requested.experiment != FINE_TUNING and "optim.lr" not in keys:
        log(
            f"note: optim.lr={requested.optim.lr:g} of experiment={requested.experiment} may "
            "damage a pretrained model: leave the experiment out, or set optim.lr"
        )
