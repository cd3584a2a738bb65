"""Find presets, and check their files before Hydra reads them."""

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cli.unused import refuse_unused
from common.errors import UserError, did_you_mean, not_one_of
from common.files import list_folder, ordinary_file
from common.settings import check_value, convert_value, format_value, iterate_settings
from config import Config

CONFIGS = Path(__file__).parents[1] / "configs"
GROUPS = tuple(sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir()))
STRING_TYPES = ("<class 'str'>", "str | None")  # of settings that are texts
SETTINGS = {name: field for name, field, _ in iterate_settings(Config())}
GLOBAL_GROUPS = ("experiment", "sweep")  # their presets set anything, the others one section
GLOBAL_PACKAGE = "# @package _global_"
# What to do if a group has no preset of a name.
GROUP_HINTS = {
    "data": "for text of your own use data=text data.path={}",
    "tokenizer": "another encoding of tiktoken is tokenizer.name={}",
}
# Parts of the YAML parser's messages, and what to do about them.
YAML_HINTS = {
    r"'\t'": "indent with spaces instead of tabs",
    "mapping values are not allowed": "put a text with a colon in quotes",
}

Presets = dict[str, dict[str, Path]]  # the files by group and name


class Preset(NamedTuple):
    """What a preset's file refers to."""

    path: Path
    bases: list[tuple[str, str]]  # group and name of the presets that it builds on
    sweep_params: dict[str, Any]  # the settings of the jobs, if it is a sweep


def find_presets(config_dir: str | None = None) -> Presets:
    """Return the file of each preset by its group and name.

    Args:
        config_dir: A folder with presets of the user's own, beside those of the repository.
    """
    groups: Presets = {group: {} for group in GROUPS}
    # The repository's presets come last, because Hydra prefers them to others of the same name.
    roots = [CONFIGS] if config_dir is None else [Path(config_dir), CONFIGS]
    for root in roots:
        for group, presets in groups.items():
            for path in _list_files(Path(root, group)):
                name = path.relative_to(Path(root, group)).with_suffix("").as_posix()
                presets[name] = path
    return groups


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the .yaml files below a folder, and raise `OSError` if one cannot be listed."""
    for path in list_folder(folder):
        if path.suffix == ".yaml":
            yield path
        elif path.is_dir():
            yield from _list_files(path)


def read_presets(chosen: dict[str, list[str]], config_dir: str | None) -> list[Preset]:
    """Read and check presets, and those that they build on.

    Args:
        chosen: The names of the presets by their groups.
        config_dir: A folder with presets of the user's own.

    Raises:
        UserError: If there is no such preset, or its file cannot work.
    """
    presets = find_presets(config_dir)
    if config_dir is not None and not any(Path(config_dir, group).is_dir() for group in presets):
        raise UserError(
            f"--config-dir={config_dir} has none of the folders {', '.join(presets)}: name the "
            "folder above the one with your presets"
        )
    read: dict[tuple[str, str], Preset] = {}

    def visit(group: str, name: str, files_above: list[Path]) -> None:
        try:
            path = _require_preset(group, name, presets, config_dir)
            if path in files_above:
                raise UserError("the preset builds on itself: correct defaults")
        except UserError as e:
            raise UserError(f"{files_above[-1]}: {e}" if files_above else str(e)) from None
        if (group, name) not in read:
            preset = read[group, name] = _read_preset(group, path)
            for base in preset.bases:
                visit(*base, [*files_above, path])

    for group, names in chosen.items():
        for name in names:
            visit(group, name, [])
    return list(read.values())


def _require_preset(group: str, name: str, presets: Presets, config_dir: str | None) -> Path:
    """Return the file of a preset; raise `UserError` if there is none, or two."""
    own = Path(config_dir, group, f"{name}.yaml") if config_dir is not None else None
    if name in presets[group]:
        path = presets[group][name]
        if own is not None and own != path and own.exists():
            raise UserError(f"{own} has the name of a preset of GlassGPT: rename it")
        return path
    stem = Path(name).stem
    for root in (config_dir, CONFIGS):
        for file in Path(root or CONFIGS, group).glob(f"{glob.escape(stem or '?')}.*"):
            if file.suffix != ".yaml":
                raise UserError(f"{group}={name}: rename {file} to {stem}.yaml")
    message = not_one_of(group, name, presets[group])
    if stem in presets[group]:
        message = f"{group}={name} is not the name of a preset: use {group}={stem}"
    elif group in GROUP_HINTS:
        message += f"; {GROUP_HINTS[group].format(name)}"
    raise UserError(message)


def _read_preset(group: str, path: Path) -> Preset:
    try:
        text = _read_text(path)
        _check_package(group, text)
        content = _parse(text)
        bases = list(_read_bases(group, content.pop("defaults", [])))
        hydra_settings = content.pop("hydra", {}) if group in GLOBAL_GROUPS else {}
        _check_content(content, "" if group in GLOBAL_GROUPS else f"{group}.")
        return Preset(path, bases, _read_sweep_params(hydra_settings))
    except UserError as e:
        raise UserError(f"{path}: {e}") from None


def _read_text(path: Path) -> str:
    try:
        text = ordinary_file(path).read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"the preset cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        byte = f"byte {e.object[e.start]:#04x} at offset {e.start}"
        raise UserError(f"the preset is not UTF-8 text ({byte}): save it as UTF-8") from None
    if text.startswith("\ufeff"):
        raise UserError("the preset begins with a byte-order mark: save it as UTF-8 without one")
    return text


def _check_package(group: str, text: str) -> None:
    """Check the comments that begin with @, which Hydra reads at the top of a file."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    directives = []
    while lines and re.match(r"#\s*@", lines[0]):
        directives.append(" ".join(lines.pop(0).lstrip("#").split()))
    if group in GLOBAL_GROUPS and directives != [GLOBAL_PACKAGE[2:]]:
        raise UserError(f"the first line must be {GLOBAL_PACKAGE}")
    if group not in GLOBAL_GROUPS and directives:
        raise UserError(f"remove the line # {directives[0]}, because the file sets {group}.… only")


def _parse(text: str) -> dict:
    """Parse YAML as Hydra does; interpolations stay as they are."""
    try:
        content: Any = OmegaConf.create(text)
    except yaml.YAMLError as e:
        mark, problem = getattr(e, "problem_mark", None), getattr(e, "problem", None)
        line = f"line {mark.line + 1}: " if mark else ""
        message = f"{line}{problem or str(e).splitlines()[0]}".replace("but found", "found")
        hints = [hint for part, hint in YAML_HINTS.items() if part in message]
        raise UserError("; ".join([message, *hints])) from None
    except AssertionError:  # so OmegaConf refuses a file that is a single number
        content = None
    except (OmegaConfBaseException, ValueError, RecursionError) as e:
        key = getattr(e, "full_key", None) or "the preset"
        message = str(e).partition("\n")[0]
        raise UserError(f"{key} cannot be parsed ({message}): correct it") from None
    if not isinstance(content, DictConfig):
        raise UserError("the preset is not made up of lines of the form NAME: VALUE")
    return cast(dict, OmegaConf.to_container(content))


def _read_bases(group: str, defaults: Any) -> Iterator[tuple[str, str]]:
    """Yield group and name of the presets that a defaults list names."""
    if not isinstance(defaults, list):
        raise UserError("defaults must be a list, whose lines begin with a dash")
    overrides = {f"override /{other}": other for other in GROUPS if other != group}
    seen: set[str] = set()
    for entry in defaults:
        if isinstance(entry, str) and " " not in entry:
            if entry != "_self_":
                yield group, entry
            if seen and entry != "_self_":
                raise UserError(f"the entry {entry!r} of defaults must come before the overrides")
            continue
        ((key, value),) = entry.items() if isinstance(entry, dict) else ((str(entry), ""),)
        if group in GLOBAL_GROUPS and isinstance(value, str):
            if key in seen:
                raise UserError(f"defaults has several entries {key!r}: leave one")
            seen.add(key)
            if key.startswith("override /hydra/"):
                continue
            if key in overrides:
                yield overrides[key], value
                continue
        raise UserError(
            f"the entry {key!r} of defaults is neither the name of another preset of {group}/ nor "
            f"of the form 'override /GROUP: NAME' in an experiment{did_you_mean(key, overrides)}"
        )


def _check_content(content: dict, section: str) -> None:
    """Check names, types, bounds and the use of a preset's settings."""
    values: dict[str, Any] = {}
    for name, value in _flatten(content, section):
        if isinstance(value, str) and "${" in value:
            continue  # Hydra resolves it
        if str(SETTINGS[name].type) in STRING_TYPES and isinstance(value, (int, float)):
            text = format_value(value)  # YAML may have changed it: 007 is 7, and off is false
            raise UserError(f"{name}={text} is not a text: put it in quotes")
        values[name] = check_setting(name, value)
    refuse_unused(values, values)


def check_setting(name: str, value: Any) -> Any:
    """Return the value of a setting of train.py, converted to its type and checked.

    Raises:
        UserError: If the value is not of the type, or out of bounds.
    """
    if value == "???":
        raise UserError(f"{name}=??? is not possible: Hydra takes ??? for a value that is missing")
    converted = convert_value(name, SETTINGS[name], value)
    if converted is not None:
        check_value(name, converted, SETTINGS[name].metadata)
    return converted


def _flatten(content: dict, section: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of a preset's settings."""
    for key, value in content.items():
        name = f"{section}{key}"
        if "." in str(key) and name in SETTINGS:
            upper, _, last = name.rpartition(".")
            raise UserError(f"write {upper}: and below it, indented, {last}: {value}")
        if name in SETTINGS:
            yield name, value
        elif not any(other.startswith(f"{name}.") for other in SETTINGS):
            raise UserError(f"{name} is not a setting{did_you_mean(name, SETTINGS)}")
        elif isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        else:
            raise UserError(
                f"{name} has no settings below it; a preset is chosen by the line "
                f"'- override /{name}: NAME' below defaults"
            )


def _read_sweep_params(hydra_settings: Any) -> dict[str, Any]:
    """Return the settings of a sweep's jobs from the section hydra of a preset."""
    node, name = hydra_settings, "hydra"
    for key in ("sweeper", "params"):
        node, name = node.get(key, {}) if isinstance(node, dict) else node, f"{name}.{key}"
    if not isinstance(node, dict):
        raise UserError(f"{name} must have lines of the form SETTING: VALUE,VALUE below it")
    for key, value in node.items():
        if not isinstance(value, (str, int, float)):
            raise UserError(f"{name}: write {key}: VALUE,VALUE; null in quotes")
    return node
