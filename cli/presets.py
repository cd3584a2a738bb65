"""Read the files of presets for Hydra; a mistake in one is a sentence that names it."""

import io
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from cli.command_line import TEXTS
from common.errors import UserError
from common.files import ordinary_file
from common.settings import format_value
from common.terminal import error_sentence

GLOBAL_GROUPS = ("experiment/", "sweep/")  # their presets set anything, the others one section
GLOBAL_PACKAGE = "_global_"


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
        """Read a preset.

        Raises:
            UserError: If its file is not UTF-8 or YAML, lacks the line that says which settings it
                has, or contains a number where a text is needed.
        """
        path = Path(self.path, self._normalize_file_name(config_path))
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
        package = header["package"]
        if config_path.startswith(GLOBAL_GROUPS) and package != GLOBAL_PACKAGE:
            raise UserError(f"{path} must begin with the line # @package {GLOBAL_PACKAGE}")
        section = package or config_path.rpartition("/")[0]
        prefix = "" if section in ("", GLOBAL_PACKAGE) else f"{section}."
        _check_texts(path, OmegaConf.to_container(config), prefix)
        return ConfigResult(self.provider, f"file://{self.path}", config, header)


def use_preset_files() -> None:
    """Let Hydra read presets by the `FileConfigSource` of this module."""
    Plugins.instance()  # which registers Hydra's own class
    SourcesRegistry.instance().types["file"] = FileConfigSource


def _check_texts(path: Path, content: Any, prefix: str) -> None:
    for key, value in content.items():
        name = f"{prefix}{key}".removeprefix("hydra.sweeper.params.")
        if isinstance(value, dict):
            _check_texts(path, value, f"{name}.")
        elif name in TEXTS and isinstance(value, (int, float)):  # 007 is 7, and off is false
            raise UserError(
                f"{path}: {name} is a text, but YAML reads its value as {format_value(value)}: put "
                "it in quotes"
            )
