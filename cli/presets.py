"""Read the files of presets for Hydra; a mistake in one is a sentence that names it."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from cli.command_line import PRESETS, SETTINGS, TEXTS, check_argument, unknown_setting
from common.errors import UserError, did_you_mean, not_one_of
from common.files import ordinary_file
from common.settings import check_setting, format_value, show_value
from common.terminal import error_sentence

GLOBAL_GROUPS = ("experiment", "sweep")  # their presets set anything, the others one section
GLOBAL_PACKAGE = "_global_"
SWEPT_SETTINGS = "hydra.sweeper.params."
HOW_TO_CHOOSE = "write - override /GROUP: NAME, or - NAME for a preset of the same group"


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's source of YAML files, which refuses files that would be read in another way.

    It has the name of the class that it replaces, because Hydra registers that again in the
    processes of a launcher, and keeps the registered class only if the names are equal.
    """

    def is_config(self, config_path: str) -> bool:
        """Return whether there is a preset with this name."""
        unread = Path(self.path, f"{config_path}.yml")
        has_preset: bool = super().is_config(config_path)
        if unread.is_file() and not has_preset:
            raise UserError(f"{unread} is not read as a preset: rename it to {unread.stem}.yaml")
        return has_preset

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a preset; an experiment of the user's own changes the default one, or another.

        Raises:
            UserError: If its file is not UTF-8 or YAML, lacks the line that says which settings it
                has, or contains a mistake.
        """
        path = Path(self.path, self._normalize_file_name(config_path))
        config, header = self._read(path)
        group = config_path.partition("/")[0]
        if group not in PRESETS:  # configs/config.yaml, or a preset of Hydra's
            return ConfigResult(self.provider, f"file://{self.path}", config, header)
        section = header["package"] or group
        if group in GLOBAL_GROUPS and section != GLOBAL_PACKAGE:
            raise UserError(f"{path} must begin with the line # @package {GLOBAL_PACKAGE}")
        content: Any = OmegaConf.to_container(config)
        defaults = content.pop("defaults", [])
        try:
            self._check_defaults(group, defaults)
            _check_settings(content, () if section == GLOBAL_PACKAGE else (section,))
        except UserError as e:
            raise UserError(f"{path}: {e}") from None
        is_own = self.provider != "main"
        has_base = any(isinstance(entry, str) and entry != "_self_" for entry in defaults)
        if group == "experiment" and is_own and not has_base:
            config.defaults = ["/experiment/default", *defaults]
        return ConfigResult(self.provider, f"file://{self.path}", config, header)

    def _read(self, path: Path) -> tuple[DictConfig, dict[str, Any]]:
        try:
            text = ordinary_file(path).read_text(encoding="utf-8-sig")
            config = OmegaConf.load(io.StringIO(text))
            header = self._get_header_dict(text)
        except Exception as e:  # decoders, parsers and the file system raise errors of many types
            reason = error_sentence(e).replace(' in "<file>",', " in")
            raise UserError(
                f"{path} cannot be read ({reason}): write lines of the form NAME: VALUE in UTF-8, "
                "and indent with spaces"
            ) from None
        if not isinstance(config, DictConfig):
            raise UserError(f"{path} is a list: write lines of the form NAME: VALUE")
        return config, header

    def _check_defaults(self, group: str, defaults: Any) -> None:
        """Raise `UserError` if a list of defaults chooses a preset that does not exist."""
        if not isinstance(defaults, list):
            raise UserError(f"defaults is not a list: {HOW_TO_CHOOSE}")
        others = [other for other in PRESETS if other != group]
        groups = {"": group} | {f"override /{other}": other for other in others}
        for entry in defaults:
            choices = entry if isinstance(entry, dict) else {"": entry}
            for key, name in choices.items():
                if key in groups:
                    self._check_name(groups[key], name)
                elif not str(key).startswith("override /hydra/"):
                    likely = did_you_mean(re.split(r"[ /]", str(key))[-1], others)
                    raise UserError(
                        f"'{key}: {name}' in defaults chooses no preset{likely or ';'} "
                        f"{HOW_TO_CHOOSE}"
                    )

    def _check_name(self, group: str, name: Any) -> None:
        own = [path.stem for path in Path(self.path, group).glob("*.y*ml")]  # .yml is refused
        known = sorted({*PRESETS[group], *own})
        if name not in (*known, "_self_", None):
            raise UserError(not_one_of(group, name, known))


def use_preset_files() -> None:
    """Let Hydra read presets by the `FileConfigSource` of this module."""
    Plugins.instance()  # which registers Hydra's own class
    SourcesRegistry.instance().types["file"] = FileConfigSource


def _check_settings(content: dict, section: Sequence[str]) -> None:
    """Raise `UserError` if a preset has something else than settings with possible values."""
    for key, value in content.items():
        keys = (*section, str(key))
        if isinstance(value, dict):
            _check_settings(value, keys)
        else:
            _check_setting(keys, value)


def _check_setting(keys: Sequence[str], value: Any) -> None:
    name = ".".join(keys)
    swept = name.removeprefix(SWEPT_SETTINGS)
    if swept in TEXTS and isinstance(value, (int, float)):  # 007 is 7, and off is false
        raise UserError(
            f"{swept} is a text, but YAML reads its value as {format_value(value)}: put it in "
            "quotes"
        )
    if swept != name:
        check_argument(f"{swept}={value}", is_sweep=True)
    elif name in PRESETS:
        raise UserError(
            f"{name}: {show_value(value)} is not a setting; to choose a preset in the list "
            f"defaults, {HOW_TO_CHOOSE}"
        )
    elif name in SETTINGS and "." in keys[-1]:
        section, _, last = name.rpartition(".")
        raise UserError(f"write {name} in two lines: {section}: and, indented, {last}: VALUE")
    elif name in SETTINGS and "${" not in str(value):  # which OmegaConf replaces
        check_setting(name, SETTINGS[name], value)
    elif name not in SETTINGS and keys[0] != "hydra":
        raise unknown_setting(f"{name}={show_value(value)}", SETTINGS)
