"""Download models of the Hugging Face hub into the cache of huggingface_hub, each file once."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import list_folder
from common.terminal import error_sentence
from interop.folder import MODEL_FILES, PICKLED_FILES

NAME = re.compile(r"(\w[\w.-]*/[\w.-]+?)(?:@(\w[\w./-]*))?")  # owner/name or owner/name@revision
MAX_ERROR_CHARS = 200


@contextmanager
def explain_errors(key: str, name: str) -> Iterator[None]:
    """Raise `UserError`, which names the setting, for an error of the hub's library."""
    try:
        yield
    except Exception as e:  # the library and those below it raise errors of many classes
        raise UserError(
            f"{key}={name} is not a folder here and could not be downloaded from the "
            f"Hugging Face hub ({error_sentence(e)[:MAX_ERROR_CHARS]}): check the name and the "
            "network"
        ) from None


def download(repository: str, revision: str | None, log: Callable[[str], Any]) -> Path:
    """Return the folder of a model in the cache after downloading what it lacks, if anything.

    `log` is called with the size first. Pickled weights are left out if there are others.
    """
    from huggingface_hub import snapshot_download  # importing it is slow and seldom needed
    from huggingface_hub.errors import DryRunError
    from tqdm import tqdm

    fetch = partial(snapshot_download, repository, revision=revision, ignore_patterns="*/*")
    names = MODEL_FILES
    with suppress(DryRunError):  # without a network
        silent = partial(tqdm, disable=True)
        files = fetch(allow_patterns=MODEL_FILES + PICKLED_FILES, dry_run=True, tqdm_class=silent)
        if any(file.filename.endswith(".safetensors") for file in files):
            files = [file for file in files if ".bin" not in file.filename]
        names = [file.filename for file in files]
        if size := sum(file.file_size for file in files if file.will_download):
            place = f"{repository}@{revision or 'main'}"
            log(f"downloading {place} from the Hugging Face hub: {size / 1e6:,.1f} MB")
    return Path(fetch(allow_patterns=names))


def cache_folder(repository: str) -> Path:
    """Return the folder of the cache in which a model's branches are `refs` to `snapshots`."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))


def list_branches(repository: str) -> list[str]:
    """Return the branches of a model or, without a network, those that were downloaded."""
    from huggingface_hub import HfApi

    try:
        return [branch.name for branch in HfApi().list_repo_refs(repository).branches]
    except Exception:
        if downloaded := list_folder(cache_folder(repository) / "refs"):
            return [path.name for path in downloaded]
        raise
