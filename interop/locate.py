"""Find out what a path is by what it contains: a run, or a model of another library."""

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.checkpoints import CONFIG_FILE, MANIFEST_FILE, saved_steps
from common.errors import UserError
from common.files import is_folder, read_start
from interop.folder import ADAPTER_CONFIG_FILE, HFFolder, pickle_error
from interop.gguf_file import GGUFFile
from interop.gguf_header import MAGIC as GGUF_MAGIC
from interop.hub import HF_CONFIG_FILE
from interop.nanogpt import NanoGPTFile
from interop.source import CheckpointSource

TORCH_MAGICS = (b"PK\3\4", b"\x80\2")  # zip, and the pickles of older versions
SAFETENSORS_START = re.compile(rb"[\s\S]{8}\{")  # the length of a JSON object, and the object
# Files of a run, by whose path the run itself can be named.
RUN_FILES = {CONFIG_FILE, "metrics.jsonl", "samples.jsonl", "report.html"}
# Files by which a folder that contains a model is recognized.
MODEL_MARKS = {HF_CONFIG_FILE, ADAPTER_CONFIG_FILE, MANIFEST_FILE}
MAX_DEPTH = 2  # of the folders in which models are looked for, below the one that was given
MAX_FOLDERS = 1000


class RunPath(NamedTuple):
    """A run, or one of its checkpoints."""

    folder: Path  # of the run, or of a checkpoint that is not in its run
    which: str | None = None  # the checkpoint that is named: "last", "best" or a step
    is_copy: bool = False  # whether it is a checkpoint that is not in its run


def identify(path: Path) -> RunPath | CheckpointSource:
    """Return the run or the model of another library at a path, or around a file in it.

    Files may have any name. Raises `UserError` if there is something else.
    """
    model = _identify_folder(path) if is_folder(path) else _identify_file(path)
    if model is None:
        kind = "a folder without a model" if is_folder(path) else "not a model"
        raise UserError(f"{path} is {kind}; give {_suggest(path)}")
    return model


def _identify_folder(path: Path) -> RunPath | CheckpointSource | None:
    if _is_checkpoint(path):
        return _find_run(path) or RunPath(path, is_copy=True)
    if _is_hf(path) and not saved_steps(path):
        return HFFolder(path)
    return RunPath(path) if _is_run(path) else _find_run(path)


def _identify_file(path: Path) -> RunPath | CheckpointSource | None:
    start = read_start(path)
    folder = path.parent
    is_hf = _is_hf(folder)
    is_safetensors = SAFETENSORS_START.match(start) is not None
    if start.startswith(GGUF_MAGIC):
        return GGUFFile(path)
    if start.startswith(TORCH_MAGICS) and is_hf:
        raise pickle_error(path)
    if start.startswith(TORCH_MAGICS):
        return NanoGPTFile(path)
    if is_hf and (is_safetensors or path.suffix == ".json"):
        return HFFolder(folder, path if is_safetensors else None)
    if run := _find_run(path):
        return run
    if _is_checkpoint(folder):
        return RunPath(folder, is_copy=True)
    if is_safetensors:
        raise UserError(
            f"{path} contains weights, but its folder has no {HF_CONFIG_FILE} that describes the "
            f"model; give a folder with a {HF_CONFIG_FILE}"
        )
    return None


def _is_hf(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (HF_CONFIG_FILE, ADAPTER_CONFIG_FILE))


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file() and (folder / CONFIG_FILE).is_file()


def _find_run(path: Path) -> RunPath | None:
    path = path.absolute()
    for run in path.parents[:3]:
        if not _is_run(run):
            continue
        part, *rest = path.relative_to(run).parts
        if part in RUN_FILES or (part == "checkpoints" and not rest):
            return RunPath(run)
        step = re.match(r"(?:step_0*(\d+)|(last|best)$)", rest[0]) if rest else None
        if part in ("checkpoints", "attention") and step:
            return RunPath(run, step[1] or step[2])
        return None
    return None


def _is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, which may have no checkpoint yet."""
    if is_folder(folder / "checkpoints"):
        return True
    return (folder / CONFIG_FILE).is_file() and not (folder / MANIFEST_FILE).is_file()


def _suggest(path: Path) -> str:
    """Return what to give instead of a path that is not a model."""
    models = [model for model in find_models(path) if model.exists()]
    if models:
        newest = max(models, key=lambda model: model.stat().st_mtime)
        return f"a model in it, such as {newest}"
    for folder in path.absolute().parents[:3]:
        if _is_run(folder):
            return f"the run that it belongs to, {folder}"
    return "a run, a folder of Hugging Face's format, a .gguf file or nanoGPT's ckpt.pt"


def find_models(folder: Path) -> Iterator[Path]:
    """Yield the paths below a folder that look like models, a few levels deep."""
    for root, folders, files in islice(os.walk(folder), MAX_FOLDERS):
        path = Path(root)
        yield from (path / name for name in files if name.lower().endswith((".gguf", ".pt")))
        is_model = MODEL_MARKS & set(files) or "checkpoints" in folders
        if path != folder and is_model:
            yield path
        if is_model or len(path.relative_to(folder).parts) == MAX_DEPTH:
            folders.clear()
