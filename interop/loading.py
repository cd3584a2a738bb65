"""Load any model: a run, or a checkpoint of another library by its path or its name on the hub."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from cli.config_file import read_config
from common.checkpoints import (
    CONFIG_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    Manifest,
    find_checkpoint,
    verify_checkpoint,
)
from common.errors import UserError
from config import Config, TokenizerConfig
from data.tokenizer import Tokenizer, load_tokenizer
from interop.external import ExternalCheckpoint
from interop.hub import find_model_folder, pin_model
from interop.locate import RunPath, identify
from model import GPT
from training.checkpoint import SavedWeights, find_weights, load_checkpoint, load_weights
from training.inputs import StartingWeights
from training.nonfinite import check_finite_weights


class LoadedRun(NamedTuple):
    """The run whose checkpoint was loaded."""

    path: RunPath
    step: int  # of the checkpoint
    config: Config


class LoadedModel(NamedTuple):
    """A model that was loaded for evaluation."""

    model: GPT
    tokenizer: Tokenizer
    run: LoadedRun | None = None  # None for a model of another library


def load_hf(path: str | os.PathLike) -> GPT:
    """Load a model of another library, by its folder or file, on the CPU and in float32.

    Raises:
        UserError: It cannot be read, or our model cannot compute the same.
    """
    return ExternalCheckpoint(path).load(torch.float32)


def load(
    name: str | os.PathLike,
    which: str | int = "best",
    log: Callable[[str], None] = print,
    key: str = "init_from",
) -> tuple[GPT, Tokenizer]:
    """Load a model and its tokenizer on the CPU, for evaluation.

    Args:
        name: A run or one of its checkpoints, a folder of Hugging Face's format, a .gguf file,
            nanoGPT's ckpt.pt, or a name on the Hugging Face hub.
        which: Checkpoint of a run: "best", "last" or a step. "best" if the name is a checkpoint's.
        log: Called with a line if a checkpoint is damaged and another one is loaded.
        key: The setting that contains the name, for error messages.

    Raises:
        UserError: It cannot be read, its weights are not finite, or our model lacks a feature.
    """
    return load_model(name, which, "best", log, key)[:2]


def load_model(
    name: str | os.PathLike, which: str | int, default: str, log: Callable[[str], None], key: str
) -> LoadedModel:
    """Load a model as `load` does, and return what it is besides.

    If the name is a checkpoint's, or a model's of another library, `which` must be the `default`.
    """
    path = find_model_folder(pin_model(os.fspath(name), key))
    source = identify(path)
    if isinstance(source, RunPath):
        loaded = _load_run(source, path, which, default, log)
    elif which != default:
        raise UserError(
            f"checkpoint={which} has no effect on {name}, which is no run: leave it out"
        )
    else:
        checkpoint = ExternalCheckpoint(source)
        external_tokenizer = checkpoint.read_tokenizer()
        if external_tokenizer is None:
            raise UserError(
                f"{path} has the characters of its vocabulary in another file, a pickle, which is "
                f"not opened because it may run code; train on its text with init_from={path}, "
                "and load that run"
            )
        loaded = LoadedModel(checkpoint.load(), external_tokenizer)
        loaded.model.token_count = external_tokenizer.vocab_size
    check_finite_weights(loaded.model, str(path))
    return loaded


def _load_run(
    run: RunPath, path: Path, which: str | int, default: str, log: Callable[[str], None]
) -> LoadedModel:
    names_checkpoint = run.is_copy or run.which is not None
    if names_checkpoint and str(which) not in (default, run.which):
        raise UserError(f"{path} is a checkpoint, but checkpoint={which}; leave out one of them")
    if run.is_copy:
        folder, manifest = _find_checkpoint(run, log)
        saved = SavedWeights(manifest.step, folder, folder / MODEL_FILE)
    else:
        saved = find_weights(run.folder, run.which or which, log)
    model, tokenizer, config = load_checkpoint(saved)
    return LoadedModel(model, tokenizer, LoadedRun(run, saved.step, config))


def read_starting_model(init_from: str) -> Config:
    """Return the model, tokenizer and init_from, with its commit, that training starts with.

    The model is downloaded if necessary. `run_dir` names it if it is a run that began with random
    weights.
    """
    init_from = pin_model(init_from)
    source = identify(find_model_folder(init_from))
    if isinstance(source, RunPath):
        folder, _ = _find_checkpoint(source, log=lambda note: None)
        config = read_config(folder / CONFIG_FILE)
        run_dir = None if config.init_from else str(source.folder)
        start = Config(run_dir=run_dir, init_from=init_from)
        return replace(start, model=config.model, tokenizer=config.tokenizer)
    tokenizer = TokenizerConfig(name=source.tokenizer_name)
    model = ExternalCheckpoint(source).config
    return Config(init_from=init_from, model=model, tokenizer=tokenizer)


def open_starting_weights(
    init_from: str | os.PathLike, log: Callable[[str], None] = print
) -> StartingWeights:
    """Open the weights that training starts from, which `read_starting_model` has downloaded."""
    source = identify(find_model_folder(init_from))
    if isinstance(source, RunPath):
        folder, manifest = _find_checkpoint(source, log)
        copy_to = partial(load_weights, path=folder / MODEL_FILE)
        return StartingWeights(load_tokenizer(folder / TOKENIZER_FILE), copy_to, manifest)
    checkpoint = ExternalCheckpoint(source)
    return StartingWeights(checkpoint.read_tokenizer(), checkpoint.copy_to)


def _find_checkpoint(run: RunPath, log: Callable[[str], None]) -> tuple[Path, Manifest]:
    """Return a verified checkpoint and its manifest: the one that a path names, or a run's best."""
    if not run.is_copy:
        return find_checkpoint(run.folder, run.which or "best", log)
    try:
        return run.folder, verify_checkpoint(run.folder)
    except ValueError as e:
        raise UserError(f"{run.folder} is a damaged checkpoint ({e}); copy it again") from None
