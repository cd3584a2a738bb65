"""Read the presets that a command chooses, before Hydra does.

A mistake in one of the user's own is one sentence that names its file.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cli.command_line import (
    CONFIGS,
    PRESETS,
    SETTINGS,
    TEXTS,
    Presets,
    translate_setting,
    unknown_setting,
)
from common.errors import UserError, did_you_mean, not_one_of
from common.files import ordinary_file
from common.settings import check_setting, format_value, show_value
from common.terminal import error_sentence

GLOBAL_GROUPS = ("experiment", "sweep")  # their presets set anything, the others one section
PACKAGE = re.compile(r"(?:#.*\n|\s*\n)*?# *@package +(\S+)")  # Hydra's directive
SWEPT_SETTINGS = "hydra.sweeper.params."
HOW_TO_CHOOSE = "write - override /GROUP: NAME, or - NAME for a preset of the same group"


def check_preset(group: str, name: str, presets: Presets, includers: Sequence[Path] = ()) -> None:
    """Raise `UserError` if a preset, or one that it includes, contains a mistake."""
    path = presets[group][name]
    if path in includers:
        raise UserError(f"{path} includes itself: leave that out of the defaults")
    content, package = _read(path)
    if group in GLOBAL_GROUPS and package != "_global_":
        raise UserError(
            f"{path} must begin with the line # @package _global_, without a byte-order mark"
        )
    prefix = "" if group in GLOBAL_GROUPS else f"{package or group}."
    try:
        choices = list(_list_choices(group, content.pop("defaults", []), presets))
        for key, value in _flatten(content, prefix):
            _check_setting(key, value)
        if group == "experiment" and CONFIGS not in path.parents and group not in dict(choices):
            raise UserError(
                "it begins from no experiment, so that the settings that it leaves out would not "
                "be those of --help: write defaults: [default, _self_], or name another experiment"
            )
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    for choice in choices:
        check_preset(*choice, presets, (*includers, path))


def _read(path: Path) -> tuple[dict, str | None]:
    """Return the content of a preset, and the package that its first comments name."""
    try:
        text = ordinary_file(path).read_text(encoding="utf-8")
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
    except Exception as e:  # decoders, parsers and the file system raise errors of many types
        reason = error_sentence(e).replace(' in "<unicode string>",', " in")
        raise UserError(
            f"{path} cannot be read ({reason}): write lines of the form NAME: VALUE in UTF-8, "
            "and indent with spaces"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is a list: write lines of the form NAME: VALUE")
    package = PACKAGE.match(text)
    return content, package[1] if package else None


def _list_choices(group: str, defaults: Any, presets: Presets) -> Iterator[tuple[str, str]]:
    """Yield the group and the name of each preset that a list of defaults chooses."""
    if not isinstance(defaults, list):
        raise UserError(f"defaults is not a list: {HOW_TO_CHOOSE}")
    groups = {group: group} | {f"override /{other}": other for other in PRESETS if other != group}
    for entry in defaults:
        for key, name in (entry if isinstance(entry, dict) else {group: entry}).items():
            if key in groups and name not in (*presets[groups[key]], "_self_", None):
                raise UserError(not_one_of(groups[key], name, presets[groups[key]]))
            if key in groups and name not in ("_self_", None):
                yield groups[key], name
            elif key not in groups and not str(key).startswith("override /hydra/"):
                likely = did_you_mean(re.split(r"[ /]", str(key))[-1], groups.values())
                raise UserError(
                    f"'{key}: {name}' in defaults chooses no preset{likely or ':'} {HOW_TO_CHOOSE}"
                )


def _flatten(content: dict, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each setting of a preset."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        elif "." in str(key) and name in SETTINGS:
            group, _, last = name.rpartition(".")
            raise UserError(f"write {name} in two lines: {group}: and, indented, {last}: VALUE")
        else:
            yield name, value


def _check_setting(key: str, value: Any) -> None:
    swept = key.removeprefix(SWEPT_SETTINGS)
    if swept in TEXTS and isinstance(value, (int, float)):  # 007 is 7, and off is false
        raise UserError(
            f"{swept} is a text, but YAML reads its value as {format_value(value)}: put it in "
            "quotes"
        )
    if swept != key:
        translate_setting(f"{swept}={value}", is_sweep=True)
    elif key in PRESETS:
        raise UserError(
            f"{key}: {show_value(value)} is not a setting: to choose a preset in the list "
            f"defaults, {HOW_TO_CHOOSE}"
        )
    elif key in SETTINGS and "${" not in str(value):  # which OmegaConf replaces
        check_setting(key, SETTINGS[key], value)
    elif key not in SETTINGS and not key.startswith("hydra."):
        raise unknown_setting(f"{key}={show_value(value)}", SETTINGS)
