"""Expand and check the paths that a user types."""

import glob
import os
from pathlib import Path

from common.errors import UserError


def expand_home(key: str, path: str) -> Path:
    """The path that was typed for `key`, from the home that a ~ at its beginning names: shells
    leave it as it is behind an equals sign."""
    whole = os.path.expanduser(path)
    if whole.startswith("~") and not os.path.exists(whole):
        raise UserError(
            f"{key}={path} does not exist: {path.partition('/')[0]} is nobody's home; "
            f"for a name that begins so write ./{path}"
        )
    return Path(whole)


def require_path(path: str) -> None:
    """Raise `UserError` where a path is of nothing, as is known before any text is read."""
    whole = str(expand_home("data.path", path))
    if not os.path.exists(whole) and not glob.has_magic(whole):
        raise UserError(
            f"data.path={path} does not exist: give the path of a text file, of a folder, or a glob"
        )
