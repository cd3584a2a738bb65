"""Download models of the Hugging Face hub into the cache of huggingface_hub, each file once."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import list_folder
from common.terminal import error_sentence
from interop.folder import MODEL_FILES, PICKLED_FILES

NAME = re.compile(r"(\w[\w.-]*/[\w.-]+?)(?:@(\w[\w./-]*))?")  # owner/name or owner/name@revision
MAX_ERROR_CHARS = 200
MAIN_FOLDER = {"ignore_patterns": ["*/*"]}


@contextmanager
def explain_errors(key: str, name: str) -> Iterator[None]:
    """Raise `UserError`, which names the setting, for any error of the hub's library."""
    try:
        yield
    except Exception as e:  # the library and those below it raise errors of many classes
        raise UserError(
            f"{key}={name} is not a folder here and could not be downloaded from the "
            f"Hugging Face hub ({error_sentence(e)[:MAX_ERROR_CHARS]}): check the name and the "
            "network"
        ) from None


def download(repository: str, revision: str | None, log: Callable[[str], Any]) -> Path:
    """Return the folder of a model in the cache, after downloading the files that it lacks.

    `log` is called with the size of what is downloaded. Without a network, what is there is taken.
    """
    from huggingface_hub import snapshot_download  # importing it is slow and seldom needed
    from huggingface_hub.errors import DryRunError
    from tqdm import tqdm

    class NoProgress(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    options = {"revision": revision, **MAIN_FOLDER}
    names = MODEL_FILES
    try:
        files = snapshot_download(
            repository,
            allow_patterns=MODEL_FILES + PICKLED_FILES,
            dry_run=True,
            tqdm_class=NoProgress,
            **options,
        )
    except DryRunError:  # without a network
        files = []
    if files:
        has_safetensors = any(file.filename.endswith(".safetensors") for file in files)
        if has_safetensors:
            files = [file for file in files if ".bin" not in file.filename]
        names = [file.filename for file in files]
    size = sum(file.file_size for file in files if file.will_download)
    if size:
        name = f"{repository}@{revision}" if revision else repository
        log(f"downloading {name} from the Hugging Face hub: {size / 1e6:,.1f} MB")
    return Path(snapshot_download(repository, allow_patterns=names, **options))


def find_downloaded(repository: str, commit: str) -> Path:
    """Return the folder of a commit in the cache."""
    from huggingface_hub import snapshot_download

    options = {"allow_patterns": MODEL_FILES, "local_files_only": True, **MAIN_FOLDER}
    return Path(snapshot_download(repository, revision=commit, **options))


def list_branches(repository: str) -> list[str]:
    """Return the branches of a model or, without a network, those that were downloaded."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        return [branch.name for branch in HfApi().list_repo_refs(repository).branches]
    except Exception:
        folder = repo_folder_name(repo_id=repository, repo_type="model")
        refs = list_folder(Path(constants.HF_HUB_CACHE, folder, "refs"))
        if not refs:
            raise
        return [path.name for path in refs]
