"""Download models of the Hugging Face hub by name, into the hub's own cache."""

import os
import re
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import exists
from common.paths import expand_model_name
from common.terminal import print_stderr
from config import HUB_MODEL
from data.hf_tokenizer import HF_TOKENIZER_CONFIG_FILE, HF_TOKENIZER_FILE

HF_CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SHARDS_GLOB = "model-*-of-*.safetensors"
INDEX_FILE = "model.safetensors.index.json"  # of the shards
# What is downloaded: weights that are not pickled, settings and the tokenizer, no subfolders.
DOWNLOADED_FILES = [WEIGHTS_FILE, SHARDS_GLOB, INDEX_FILE, HF_CONFIG_FILE]
DOWNLOADED_FILES += [HF_TOKENIZER_FILE, HF_TOKENIZER_CONFIG_FILE]
HUB_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+?)(?:@(\w[\w./-]*))?")
MAX_HUB_ERROR_CHARS = 200


def pin_model(name: str, key: str = "init_from") -> str:
    """Return the path of a model, or the "owner/name@commit" that is now in the hub's cache.

    Raises:
        UserError: The path does not exist, or the model cannot be downloaded. Only the setting
            `init_from` may name a model on the hub.
    """
    path = expand_model_name(key, name)
    if exists(Path(path)):
        return path
    match = HUB_NAME.fullmatch(path.rstrip("/"))
    owner = Path(path).parts[0]
    if key != "init_from" or not match or owner == "runs" or Path(owner).is_dir():
        raise UserError(_describe_missing(key, name, path, owner if match else None))
    repository, revision = match.groups()
    print_stderr(f"downloading {path} from the Hugging Face hub")
    try:
        folder = _download_snapshot(repository, revision)
    except Exception as e:  # the library and those below it raise errors of many classes
        cause = str(e).strip().partition("\n")[0][:MAX_HUB_ERROR_CHARS]
        raise UserError(
            f"init_from={name} is not a folder here and could not be downloaded from the "
            f"Hugging Face hub ({type(e).__name__}: {cause}); check the name and the network"
        ) from None
    return f"{repository}@{folder.name}"


def _describe_missing(key: str, name: str, path: str, owner: str | None) -> str:
    if os.path.islink(path):
        return f"{key}={name} is a link to {os.readlink(path)}, which does not exist; correct it"
    if key != "init_from":
        return f"{key}={name} does not exist; name the folder of a run"
    condition = f" (where there is no folder {owner} here)" if owner else ""
    return (
        f"init_from={name} does not exist; give a run, a folder of Hugging Face's format, a .gguf "
        "file, nanoGPT's ckpt.pt, or a model's name on the Hugging Face hub, OWNER/NAME"
        f"{condition}"
    )


def find_model_folder(init_from: str | os.PathLike) -> Path:
    """Return the path of a model: the hub's cache for a name that `pin_model` returned."""
    match = HUB_MODEL.fullmatch(str(init_from))
    if not match:
        return Path(init_from)
    name, commit = match.groups()
    return _download_snapshot(name, commit, local_files_only=True)


def _download_snapshot(name: str, commit: str | None, **options: Any) -> Path:
    from huggingface_hub import snapshot_download  # importing it is slow and seldom needed

    patterns = {"allow_patterns": DOWNLOADED_FILES, "ignore_patterns": ["*/*"]}
    return Path(snapshot_download(name, revision=commit, **patterns, **options))
