"""Expand and check the paths that a user types."""

import glob
import os
import re
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from common.errors import UserError

# Page of a model on the Hugging Face hub.
HUB_ADDRESS = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)|hf:/)/([^/]+/[^/]+)/?")
ONE_PATH = "data.path takes one path, so for several files give their folder, or a glob in quotes"


def expand_home(key: str, path: str) -> Path:
    """Expand a leading ~, which shells do not expand after an equals sign.

    Args:
        key: The setting with the path, for the message.
        path: The path as typed.

    Raises:
        UserError: If the ~ names an unknown user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and not os.path.exists(expanded):
        raise UserError(
            f"{key}={path} does not exist: {path.partition('/')[0]} is an unknown user "
            f"(for a file whose name begins with ~, write ./{path})"
        )
    return Path(expanded)


def expand_model_name(key: str, name: str) -> str:
    """Return the path or the name on the Hugging Face hub that a user typed for a model.

    Args:
        key: The setting with the name, for the message.
        name: A path, which may begin with ~ or file://, or a name or address on the hub.

    Raises:
        UserError: If it is empty, another address, or its ~ names an unknown user.
    """
    if not name:
        raise UserError(f"{key}= is empty: give the path of a model")
    address = urlsplit(name)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return url2pathname(address.path)
    on_hub = HUB_ADDRESS.fullmatch(name)
    if on_hub:
        return on_hub[1]
    if "://" in name:
        raise UserError(f"{key}={name} is an address: download the model and give its path")
    return str(expand_home(key, name)) if name.startswith("~") else name


def require_path(path: str) -> None:
    """Raise `UserError` if data.path names no file or folder and is not a glob."""
    expanded = str(expand_home("data.path", path))
    if not os.path.exists(expanded) and not glob.has_magic(expanded):
        advice = (
            ONE_PATH
            if set(path) & set(", ")
            else "give the path of a text file or folder, or a glob"
        )
        raise UserError(f"data.path={path} does not exist: {advice}")
