"""Load any model: by its path, whose content decides what it is, or by its name on the hub."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import exists, is_folder, read_start
from common.paths import expand_model_name
from common.terminal import error_sentence, print_stderr
from config import Config, TokenizerConfig
from data.tokenizer import Tokenizer
from interop import hub
from interop.external import ExternalModel
from interop.folder import HFFolder
from interop.gguf_file import GGUF_MAGIC, GGUFFile
from interop.nanogpt import NanoGPTFile
from interop.stored import StoredRun, open_copied_checkpoint, open_run
from interop.torch_file import TORCH_MAGIC
from model import GPT
from run.checkpoints import CONFIG_FILE, MANIFEST_FILE
from run.config_file import HUB_MODEL
from run.run_dir import HF_CONFIG_FILE, RUNS, find_run
from training.stored_model import StoredModel

FORMATS = "a run, a folder of Hugging Face's format, a .gguf file or nanoGPT's ckpt.pt"


def load(path_or_name: str | os.PathLike, checkpoint: str | int = "best") -> tuple[GPT, Tokenizer]:
    """Load a model and its tokenizer on the CPU, for evaluation.

    Args:
        path_or_name: A run or one of its checkpoints, a folder of Hugging Face's format, a .gguf
            file, nanoGPT's ckpt.pt, or a name on the Hugging Face hub.
        checkpoint: Of a run: "best" (lowest validation loss), "last" or a step, which may be that
            of a snapshot whose weights were kept. A path to a checkpoint prevails.

    Raises:
        UserError: It cannot be read, its weights are not finite, or our model lacks a feature.
    """
    return find_model(path_or_name, checkpoint, key="path_or_name").load()


def load_hf(path: str | os.PathLike) -> GPT:
    """Load a model by its path as `load` does, in float32. It needs no tokenizer."""
    return open_pinned(os.fspath(path)).build().float()


def find_model(
    path_or_name: str | os.PathLike,
    checkpoint: str | int = "best",
    log: Callable[[str], Any] = print_stderr,
    key: str = "init_from",
) -> StoredModel:
    """Find the model that `load` loads: a `StoredRun`, or one of another library.

    `log` is called with the size of a download, and if another checkpoint is taken because one is
    damaged. Errors name the model by `key`.
    """
    return open_pinned(pin_model(os.fspath(path_or_name), key, log), checkpoint, log)


def read_starting_model(init_from: str) -> Config:
    """Return the model, tokenizer and init_from, with its commit, that training starts with.

    The model is downloaded if necessary.
    """
    init_from = pin_model(init_from)
    source = open_pinned(init_from, log=lambda note: None)
    start = Config(init_from=init_from, model=source.config)
    if isinstance(source, StoredRun):
        return replace(start, model=source.settings.model, tokenizer=source.settings.tokenizer)
    assert isinstance(source, ExternalModel)
    return replace(start, tokenizer=TokenizerConfig(name=source.tokenizer_name))


# --- names ----------------------------------------------------------------------------------------


def locate(name: str, key: str) -> tuple[str, re.Match | None]:
    """Return the path of a model or, if there is none, its name on the hub and the name's parts."""
    path = expand_model_name(key, name)
    if exists(Path(path)):
        return path, None
    match = hub.NAME.fullmatch(path.rstrip("/"))
    owner = Path(path).parts[0]
    if not match or owner == str(RUNS) or Path(owner).is_dir():
        raise UserError(
            f"{key}={name} does not exist: give {FORMATS}, or OWNER/NAME, a model on the "
            "Hugging Face hub, if there is no folder OWNER here"
        )
    return path, match


def pin_model(name: str, key: str = "init_from", log: Callable[[str], Any] = print_stderr) -> str:
    """Return the path of a model, or the "owner/name@commit" that is now in the hub's cache.

    Raises:
        UserError: The path does not exist, or the model cannot be downloaded.
    """
    path, match = locate(name, key)
    if match is None:
        return path
    repository, revision = match.groups()
    with hub.explain_errors(key, path):
        folder = hub.download(repository, revision, log)
    return f"{repository}@{folder.name}"


def find_path(pinned: str | os.PathLike) -> Path:
    """Return where a model that `pin_model` returned is on the disk."""
    match = HUB_MODEL.fullmatch(str(pinned))
    return hub.cache_folder(match[1]) / "snapshots" / match[2] if match else Path(pinned)


# --- paths ----------------------------------------------------------------------------------------


def open_pinned(
    pinned: str, checkpoint: str | int = "best", log: Callable[[str], Any] = print_stderr
) -> StoredModel:
    """Open the model at a path, around a file, or of the hub as `pin_model` returned it."""
    path = find_path(pinned)
    run_dir, named = find_run(path)
    is_step = str(checkpoint).isdecimal()
    if is_step and (run_dir is None or named not in (None, str(checkpoint))):
        raise UserError(f"{path} has no checkpoint={checkpoint}: leave that out")
    if run_dir:
        return open_run(run_dir, named or checkpoint, log)
    folder = path if is_folder(path) else path.parent
    if exists(folder / MANIFEST_FILE) and exists(folder / CONFIG_FILE):
        return open_copied_checkpoint(folder)
    try:
        return _open_external(path, folder)
    except Exception as e:  # a file may contain anything
        raise UserError(f"{path} cannot be used: {error_sentence(e)}") from None


def _open_external(path: Path, folder: Path) -> ExternalModel:
    has_config = exists(folder / HF_CONFIG_FILE)
    if not is_folder(path):
        start = read_start(path)
        if start.startswith(GGUF_MAGIC):
            return GGUFFile(path)
        if start.startswith(TORCH_MAGIC) and not has_config:
            return NanoGPTFile(path)
    if not has_config:
        raise UserError(f"it is no model: give {FORMATS}")
    weights = path if path.suffix in (".safetensors", ".bin") else None
    return HFFolder(folder, weights)
