"""Parse the command line of train.py: settings, presets and Hydra's options."""

import argparse
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from cli.config_file import escape_interpolation
from common.errors import UserError, did_you_mean
from common.paths import expand_home
from common.settings import iterate_settings
from config import Config

CONFIGS = Path(__file__).parents[1] / "configs"
STRING_TYPES = ("<class 'str'>", "str | None")  # of settings whose values are quoted for Hydra
# Settings that a sweep refuses → what to do instead.
REFUSED_IN_SWEEPS = {
    "run_dir": "each job has its own folder in the sweep's, which hydra.sweep.dir=PATH names",
    "prepare_only": "leave out -m",
    "resume=true": "use resume=auto, which runs the jobs that are missing or unfinished",
}
# Settings of Hydra's that are refused → what to use instead.
REFUSED_HYDRA_SETTINGS = {
    "hydra.run.dir": "run_dir={value}",
    "hydra.sweep.subdir": "hydra.sweep.dir=PATH; each job's folder there is named by its settings",
    "hydra.mode": "-m for a sweep",
}
# Settings and files of nanoGPT → their equivalents here.
NANOGPT = yaml.safe_load(Path(__file__).with_name("nanogpt.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class CommandLine:
    """The validated arguments of train.py, with text values quoted for Hydra."""

    settings: list[str]  # KEY=VALUE
    options: list[str]  # Hydra's options with their values, such as -m
    is_sweep: bool  # -m or --multirun
    config_dir: str | None  # a folder with presets of the user's own
    is_for_hydra: bool  # asks for what Hydra itself prints: --cfg, --info, shell completion, …

    @property
    def arguments(self) -> list[str]:
        """The arguments as Hydra takes them."""
        return [*self.settings, *self.options]


def parse_command_line(argv: list[str]) -> CommandLine:
    """Parse and validate the arguments of train.py.

    Raises:
        UserError: If an argument is not a setting, a preset or an option of Hydra's.
    """
    parsed = _parse_options(argv)
    if parsed.completion:  # its arguments, such as install=bash, are not settings
        return CommandLine([], list(argv), False, None, is_for_hydra=True)
    if parsed.multirun and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "torchrun cannot start a sweep, because its processes share one run: "
            "use python train.py -m"
        )
    is_text = {name: str(f.type) in STRING_TYPES for name, f, _ in iterate_settings(Config())}
    is_text |= dict.fromkeys(find_presets(), False) | {"hydra.sweep.dir": True}
    options = list(argv)
    for argument in parsed.settings:
        options.remove(argument)
    settings = [quote_for_hydra(argument, is_text, parsed.multirun) for argument in parsed.settings]
    return CommandLine(
        settings, options, parsed.multirun, parsed.config_dir, parsed.request is not None
    )


def _parse_options(argv: list[str]) -> argparse.Namespace:
    """Separate settings from Hydra's options, and refuse unknown options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--shell-completion", "-sc", dest="completion", action="store_true")
    parser.add_argument("--cfg", "-c", dest="request", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", "--package", "-p", dest="request", nargs="?", const="all")
    for option in ("--resolve", "--hydra-help", "--version"):
        parser.add_argument(option, dest="request", action="store_const", const="all")
    try:
        parsed, unknown = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as e:
        raise UserError(str(e)) from None
    if unknown:
        raise unknown_setting(unknown[0], [name for name, *_ in iterate_settings(Config())])
    if parsed.config_dir is not None and not Path(parsed.config_dir).is_dir():
        raise UserError(
            f"--config-dir={parsed.config_dir} is not a folder: give one with your presets"
        )
    return parsed


def quote_for_hydra(argument: str, is_text: dict[str, bool], is_sweep: bool) -> str:
    """Validate a setting, and quote its value if it is a text that Hydra would parse.

    Args:
        argument: The setting as typed, KEY=VALUE.
        is_text: For every key that may be typed, whether its value is a text.
        is_sweep: Whether this is a sweep: values that Hydra can parse are then left unquoted.

    Raises:
        UserError: If the argument is not a setting, or is not allowed here.
    """
    key, equals, value = argument.partition("=")
    is_known = key in is_text or key.startswith(("hydra.", "hydra/"))
    if not equals or not is_known or is_nanogpt_setting(argument):
        raise unknown_setting(argument, is_text)
    if is_sweep:
        advice = REFUSED_IN_SWEEPS.get(key) or REFUSED_IN_SWEEPS.get(argument.lower())
        if advice:
            raise UserError(f"{argument} cannot be used in a sweep: {advice}")
    elif key == "sweep":
        raise UserError(f"{argument} is a sweep: add -m")
    if key in REFUSED_HYDRA_SETTINGS:
        advice = REFUSED_HYDRA_SETTINGS[key].format(value=value)
        raise UserError(f"{argument} is not supported: use {advice}")
    if not is_text.get(key) or value == "null":
        return argument
    if key == "hydra.sweep.dir":
        return f"{key}={quote(str(expand_home(key, value)))}"
    if is_sweep and _hydra_can_parse(argument):
        return argument
    return f"{key}={quote(value)}"


def _hydra_can_parse(argument: str) -> bool:
    with suppress(HydraException):
        OverridesParser.create().parse_override(argument)
        return True
    return False


def is_nanogpt_setting(argument: str) -> bool:
    """Return whether KEY=VALUE is a setting of nanoGPT that does not name a file here."""
    return argument in NANOGPT and not Path(argument.partition("=")[2]).exists()


def quote(text: str) -> str:
    """Quote a text so that Hydra's grammar and OmegaConf's interpolation return it unchanged."""

    def escape(match: re.Match) -> str:
        # Backslashes count only in front of a quote or at the end of the text.
        backslashes, quote_sign = match[1] * 2, r"\'" if match[2] else ""
        return backslashes + quote_sign

    return "'" + re.sub(r"(\\*)('|\Z)", escape, escape_interpolation(text)) + "'"


def unknown_setting(
    argument: str, known: Iterable[str], command: str = "python train.py"
) -> UserError:
    """Build the error for an argument that is not a setting of a command, or has no value."""
    name = argument.lstrip("-+~")
    key, equals, _ = name.partition("=")
    for nanogpt_name in (name, Path(name).name, key.rpartition(".")[2]):
        if nanogpt_name in NANOGPT:
            return UserError(f"{argument} is a nanoGPT setting; use {NANOGPT[nanogpt_name]}")
    suggestion = did_you_mean(key, known)
    if not equals or argument.startswith("-"):
        return UserError(
            f"{argument} is not of the form KEY=VALUE (quote values with spaces){suggestion}"
        )
    return UserError(
        f"{argument.partition('=')[0]} is not a setting{suggestion or ';'} "
        f"{command} --help lists all settings"
    )


def find_presets(config_dir: str | None = None) -> dict[str, dict[str, Path]]:
    """Return the file of each preset by its group and name.

    Args:
        config_dir: A folder with presets of the user's own, beside those of the repository.
    """
    groups: dict[str, dict[str, Path]] = {
        folder.name: {} for folder in sorted(CONFIGS.iterdir()) if folder.is_dir()
    }
    # The repository's presets come last, because Hydra prefers them to others of the same name.
    roots = [CONFIGS] if config_dir is None else [Path(config_dir), CONFIGS]
    for root in roots:
        for group, presets in groups.items():
            for path in sorted(Path(root, group).rglob("*.yaml")):
                name = path.relative_to(Path(root, group)).with_suffix("").as_posix()
                presets[name] = path
    return groups
