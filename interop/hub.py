"""Download models of the Hugging Face hub by name, into the hub's own cache."""

import re
from pathlib import Path
from typing import Any

from cli import print_stderr
from common.errors import UserError
from config import HUB_MODEL

# What is downloaded: weights that are not pickled, settings and the tokenizer, no subfolders.
WEIGHTS_FILE = "model.safetensors"
SHARDS_GLOB = "model-*-of-*.safetensors"
DOWNLOADED_FILES = [
    WEIGHTS_FILE,
    SHARDS_GLOB,
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
HUB_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+?)(?:@([0-9a-f]{40}))?")
MAX_HUB_ERROR_CHARS = 200


def pin_model(init_from: str) -> str:
    """Download a model if it is named by its name on the hub.

    Args:
        init_from: A path, or "owner/name" or "owner/name@commit" on the hub.

    Returns:
        The path as it is, or "owner/name@commit" of the downloaded model.

    Raises:
        UserError: The path does not exist, or the model cannot be downloaded.
    """
    if Path(init_from).exists():
        return init_from
    match = HUB_NAME.fullmatch(init_from)
    first_folder = Path(init_from).parts[:1]
    is_path = first_folder == ("runs",) or Path(*first_folder).is_dir()
    if not match or is_path:
        raise UserError(
            f"init_from={init_from} does not exist; give the folder of a run or of Hugging Face "
            "weights, a .gguf file, nanoGPT's ckpt.pt, or a name on the Hugging Face hub"
        )
    name, commit = match.groups()
    print_stderr(f"downloading {init_from} from the Hugging Face hub")
    try:
        folder = _download_snapshot(name, commit)
    except Exception as e:  # the library and those below it raise errors of many classes
        cause = str(e).strip().partition("\n")[0][:MAX_HUB_ERROR_CHARS]
        raise UserError(
            f"init_from={init_from} is not a folder here and could not be downloaded from the "
            f"Hugging Face hub ({type(e).__name__}: {cause}); check the name and the network"
        ) from None
    return f"{name}@{folder.name}"


def find_model_folder(init_from: str | Path) -> Path:
    """Return the path of a model: the hub's cache for a name that `pin_model` returned."""
    match = HUB_MODEL.fullmatch(str(init_from))
    if not match:
        return Path(init_from)
    name, commit = match.groups()
    return _download_snapshot(name, commit, local_files_only=True)


def _download_snapshot(name: str, commit: str | None, **options: Any) -> Path:
    """The folder of a model at a commit in the hub's cache."""
    from huggingface_hub import snapshot_download  # importing it is slow and seldom needed

    folder = snapshot_download(
        name,
        revision=commit,
        allow_patterns=DOWNLOADED_FILES,
        ignore_patterns=["*/*"],
        **options,
    )
    return Path(folder)
