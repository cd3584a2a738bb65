"""Expand and check the paths that a user types."""

import glob
import os
from pathlib import Path

from common.errors import UserError


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


def require_path(path: str) -> None:
    """Raise `UserError` if data.path names no file or folder and is not a glob."""
    expanded = str(expand_home("data.path", path))
    if not os.path.exists(expanded) and not glob.has_magic(expanded):
        raise UserError(
            f"data.path={path} does not exist: give the path of a text file or folder, or a glob"
        )
