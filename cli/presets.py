"""Check the presets of the user's own before Hydra reads them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cli.command_line import GROUPS, TEXTS
from common.errors import UserError
from common.settings import format_value
from common.terminal import error_sentence

GLOBAL_GROUPS = ("experiment", "sweep")  # their presets set anything, the others one section
GLOBAL_PACKAGE = "# @package _global_"


def check_presets(folder: Path) -> None:
    """Raise `UserError` if a preset in a folder like `configs/` would be read in another way."""
    for group in GROUPS:
        for path in sorted((folder / group).glob("*.yaml")):
            _check_preset(path, group)


def _check_preset(path: Path, group: str) -> None:
    try:
        text = path.read_text(encoding="utf-8")
        content = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as e:  # decoders, parsers and the file system raise errors of many types
        raise UserError(
            f"{path} cannot be read ({error_sentence(e)}): write lines of the form NAME: VALUE in "
            "UTF-8, and indent with spaces"
        ) from None
    is_global = group in GLOBAL_GROUPS
    if is_global and not re.match(rf"\s*{GLOBAL_PACKAGE}\b", text):
        raise UserError(f"{path} must begin with the line {GLOBAL_PACKAGE}")
    for name, value in _iterate_values(content, "" if is_global else f"{group}."):
        name = name.removeprefix("hydra.sweeper.params.")
        if name in TEXTS and isinstance(value, (int, float)):  # 007 is 7, and off is false
            raise UserError(
                f"{path}: {name} is a text, but YAML reads its value as {format_value(value)}: put "
                "it in quotes"
            )


def _iterate_values(content: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of each value of a preset, and the value."""
    for key, value in content.items() if isinstance(content, dict) else ():
        yield f"{prefix}{key}", value
        yield from _iterate_values(value, f"{prefix}{key}.")
