"""Expand and check the paths that a user types."""

import atexit
import glob
import os
import re
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from urllib.parse import urlsplit
from urllib.request import url2pathname

from common.errors import UserError
from common.files import part_path

# The address of a model on the Hugging Face hub.
HUB_ADDRESS = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface|hf)\.co/|hf://)([^/]+/[^/]+)(?:/tree/main)?/?"
)
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # of OpenAI's models on the hub


def expand_home(key: str, path: str) -> Path:
    """Expand a leading ~, which shells do not expand after an equals sign."""
    if "://" in path and not os.path.exists(path):
        raise UserError(f"{key}={path} is an address: give a path on this machine")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and not os.path.exists(expanded):
        raise UserError(
            f"{key}={path} does not exist: {path.partition('/')[0]} is an unknown user "
            f"(for a file whose name begins with ~, write ./{path})"
        )
    return Path(expanded)


def expand_model_name(key: str, name: str) -> str:
    """Return the path or the name on the Hugging Face hub that a user typed for a model.

    A path may begin with ~ or file://. A model on the hub may be named by its address, and OpenAI's
    GPT-2 without its owner, unless there is a path of that name.
    """
    if not name:
        raise UserError(f"{key}= is empty: give the path of a model")
    if name in GPT2_NAMES and not os.path.lexists(name):
        return f"openai-community/{name}"
    address = urlsplit(name)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return url2pathname(address.path)
    on_hub = HUB_ADDRESS.fullmatch(name)
    if on_hub:
        return on_hub[1]
    if "://" in name:
        raise UserError(f"{key}={name} is an address: download the model and give its path")
    return str(expand_home(key, name)) if name.startswith("~") else name


def require_output_folder(name: str, folder: Path, *files: Path) -> None:
    """Raise `UserError`, beginning with what was typed, unless files can be written in a folder."""
    try:
        for path in (folder, *files):
            with suppress(FileNotFoundError):
                path.stat()  # fails if the name is too long or a parent is a file
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        with TemporaryFile(dir=existing):
            pass
    except OSError as e:
        raise UserError(f"{name} cannot be written ({e.strerror}): choose another place") from None


def require_output_file(name: str, path: Path) -> None:
    """Raise `UserError` unless a file can be written, or replaced, at a path."""
    require_output_folder(name, path.parent, part_path(path))
    if path.is_dir():
        raise UserError(f"{name} is a folder: name a file")


@cache
def writable_folder(folder: Path) -> Path:
    """Return a folder if it can be written, otherwise one that exists as long as this process."""
    try:
        require_output_folder(str(folder), folder)
    except UserError:
        temporary = mkdtemp(prefix="glassgpt-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return Path(temporary)
    return folder


def require_path(key: str, path: str) -> None:
    """Raise `UserError` if a setting names no file or folder and is not a glob."""
    expanded = str(expand_home(key, path))
    if not os.path.exists(expanded) and not glob.has_magic(expanded):
        raise UserError(
            f"{key}={path} does not exist: give the path of a text file or folder, or a glob"
        )
