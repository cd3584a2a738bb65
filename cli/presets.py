"""Find presets, and check their files before Hydra reads them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cli.unused import refuse_unused, refuse_unused_in_files
from common.errors import UserError, did_you_mean, not_one_of
from common.files import list_folder, ordinary_file
from common.settings import check_value, convert_value, format_value, iterate_settings
from config import Config, DataConfig

CONFIGS = Path(__file__).parents[1] / "configs"
GROUPS = tuple(sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir()))
SETTINGS = {name: field for name, field, _ in iterate_settings(Config())}
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}
GLOBAL_GROUPS = ("experiment", "sweep")  # their presets set anything, the others one section
GLOBAL_PACKAGE = "# @package _global_"
# What to do if a group has no preset of a name.
GROUP_HINTS = {
    "data": "; for text of your own use data=text data.path={}",
    "tokenizer": "; another encoding of tiktoken is tokenizer.name={}",
}
# Names that Hydra reads as the text that they are.
PRESET_NAME = re.compile(r"(?ai:(?!(null|true|false|nan|inf)$)[a-z_][\w ./-]*)")


def find_presets(config_dir: str | None = None) -> dict[str, dict[str, Path]]:
    """Return the file of each preset by its group and name; `config_dir` adds the user's own."""
    groups: dict[str, dict[str, Path]] = {group: {} for group in GROUPS}
    # The repository's presets come last, because Hydra prefers them to others of the same name.
    for root in (Path(config_dir or CONFIGS), CONFIGS):
        for group, presets in groups.items():
            for path in _list_files(root / group):
                presets[path.relative_to(root / group).with_suffix("").as_posix()] = path
    return groups


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the .yaml files below a folder, and raise `OSError` if one cannot be listed."""
    for path in list_folder(folder):
        if path.suffix == ".yaml":
            yield path
        elif path.is_dir():
            yield from _list_files(path)


def read_preset(
    group: str, name: str, config_dir: str | None, files_above: tuple[Path, ...] = ()
) -> dict[Path, dict]:
    """Read and check a preset, and those that it builds on.

    Returns:
        The swept settings of each preset by its path; {} unless it describes a sweep.

    Raises:
        UserError: If there is no such preset, or its file cannot work.
    """
    path = _require_preset(group, name, config_dir)
    if path in files_above:
        raise UserError("the preset builds on itself: correct defaults")
    try:
        content = _read_yaml(path, group)
        bases = list(_read_bases(group, content.pop("defaults", [])))
        hydra_settings = content.pop("hydra", {}) if group in GLOBAL_GROUPS else {}
        sweep_params = {path: _read_sweep_params(hydra_settings)}
        values = _read_settings(content, "" if group in GLOBAL_GROUPS else f"{group}.")
        refuse_unused(values, values)
        data = {key[5:]: value for key, value in values.items() if key.startswith("data.")}
        refuse_unused_in_files(values, DataConfig(**{"source": "text", **data}))
        for base in bases:
            sweep_params |= read_preset(*base, config_dir, (*files_above, path))
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    return sweep_params


def _require_preset(group: str, name: str, config_dir: str | None) -> Path:
    """Return the file of a preset; raise `UserError` if there is none, or two."""
    presets = find_presets(config_dir)[group]
    own = Path(config_dir or CONFIGS, group, f"{name}.yaml")
    if name in presets:
        if own != presets[name] and own.exists():
            raise UserError(f"{own} has the same name as a preset of GlassGPT: rename yours")
        if not PRESET_NAME.fullmatch(name):
            raise UserError(
                f"{presets[name]}: rename the preset with letters of ASCII, digits, - and _"
            )
        return presets[name]
    if (yml := own.with_suffix(".yml")) in list_folder(own.parent):
        raise UserError(f"{group}={name}: rename {yml} to {own.name}")
    if Path(name).stem in presets:
        raise UserError(f"{group}={name} is not a preset's name: use {group}={Path(name).stem}")
    hint = GROUP_HINTS.get(group, "").format(name)
    raise UserError(not_one_of(group, name, presets) + hint)


def _read_yaml(path: Path, group: str) -> dict[Any, Any]:
    """Return the content of a preset's file; interpolations stay as they are."""
    try:
        content = OmegaConf.load(ordinary_file(path))
        if not isinstance(content, DictConfig):
            raise ValueError("it is a list")
    except Exception as e:  # OmegaConf and the YAML parser raise errors of many types
        reason = " ".join(str(e).split()).replace(f' in "{path}"', "")
        raise UserError(
            f"the preset cannot be read ({reason}): write lines of the form NAME: VALUE in UTF-8, "
            "indent with spaces, and put texts that contain a colon in quotes"
        ) from None
    first_line = path.read_text(encoding="utf-8").strip().partition("\n")[0].rstrip()
    if group in GLOBAL_GROUPS and first_line != GLOBAL_PACKAGE:
        raise UserError(f"the first line must be {GLOBAL_PACKAGE}, without a byte-order mark")
    if group not in GLOBAL_GROUPS and re.match(r"#\s*@", first_line):
        raise UserError(f"remove the line {first_line}, because the file sets {group}.… only")
    return dict(OmegaConf.to_container(content))


def _read_bases(group: str, defaults: Any) -> Iterator[tuple[str, str]]:
    """Yield group and name of the presets that a defaults list names."""
    if not isinstance(defaults, list):
        raise UserError("defaults must be a list, whose lines begin with a dash")
    overrides = {f"override /{other}": other for other in GROUPS if other != group}
    seen: set[str] = set()
    for entry in defaults:
        if entry == "_self_":
            continue
        is_pair = isinstance(entry, dict) and len(entry) == 1
        pair: dict[str, Any] = entry if is_pair else {str(entry): None}
        ((key, value),) = pair.items()
        is_override = group in GLOBAL_GROUPS and isinstance(value, str) and key not in seen
        if isinstance(entry, str) and not seen:
            yield group, entry
        elif is_override and key in overrides:
            yield overrides[key], value
            seen.add(key)
        elif not (is_override and str(key).startswith("override /hydra/")):
            hint = "" if key in overrides else did_you_mean(str(key), overrides)
            raise UserError(
                f"the entry {key!r} of defaults is unknown, repeated or misplaced{hint}: begin "
                f"with lines '- NAME' for presets of {group}/ to build on; experiments go on with "
                "lines '- override /GROUP: NAME', one for a GROUP"
            )


def _read_settings(content: dict, section: str) -> dict[str, Any]:
    """Return the values of a preset's settings by their dotted names, converted and checked."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{section}{key}"
        if name in SECTIONS and isinstance(value, dict):
            values |= _read_settings(value, f"{name}.")
        elif name in SECTIONS:
            raise UserError(
                f"{name} has no settings below it; a preset is chosen by the line "
                f"'- override /{name}: NAME' below defaults"
            )
        elif name not in SETTINGS:
            raise UserError(f"{name} is not a setting{did_you_mean(name, SETTINGS)}")
        elif "." in str(key):
            upper, _, last = name.rpartition(".")
            raise UserError(f"write {upper}: and below it, indented, {last}: {value}")
        elif is_text(name) and isinstance(value, (int, float)):
            text = format_value(value)  # YAML may have changed it: 007 is 7, and off is false
            raise UserError(f"{name}={text} is not a text: put it in quotes")
        elif not (isinstance(value, str) and "${" in value):  # which Hydra resolves
            values[name] = check_setting(name, value)
    return values


def is_text(name: str) -> bool:
    """Return whether the values of a setting are texts."""
    return SETTINGS[name].type in (str, str | None)


def check_setting(name: str, value: Any) -> Any:
    """Return the value of a setting of train.py, converted to its type and checked."""
    if value == "???":
        raise UserError(f"{name}=??? is not possible: Hydra takes ??? for a value that is missing")
    converted = convert_value(name, SETTINGS[name], value)
    if converted is not None:
        check_value(name, converted, SETTINGS[name].metadata)
    return converted


def _read_sweep_params(hydra_settings: Any) -> dict[str, Any]:
    """Return the settings of a sweep's jobs from the section hydra of a preset."""
    params = hydra_settings
    for key in ("run", "sweep"):
        if isinstance(params, dict) and key in params:
            raise UserError(
                f"hydra.{key} has no effect in a preset: leave it out, and type run_dir=PATH, or "
                "hydra.sweep.dir=PATH for a sweep"
            )
    for key in ("sweeper", "params"):
        params = params.get(key, {}) if isinstance(params, dict) else params
    if not isinstance(params, dict):
        raise UserError("hydra.sweeper.params must have lines SETTING: VALUE,VALUE below it")
    for key, value in params.items():
        if not isinstance(value, (str, int, float)):
            raise UserError(f"hydra.sweeper.params: write {key}: VALUE,VALUE; null in quotes")
    return params
