"""Parse the command line of train.py: settings, presets and Hydra's options."""

import argparse
import glob
import os
import re
import shlex
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString, RangeSweep
from hydra.errors import HydraException

from cli.config_file import escape_interpolation
from cli.presets import GROUPS, SETTINGS, check_setting, find_presets, is_text, read_preset
from common.checkpoints import contains_run
from common.errors import UserError, did_you_mean
from common.paths import ONE_PATH, expand_home
from common.settings import format_value
from common.torchrun import is_under_torchrun

MAX_CHECKED_CHOICES = 1000  # of one setting of a sweep
MAX_SHOWN_PATHS_CHARS = 200  # of the paths that a shell made of a glob
# Settings that a sweep refuses → what to do instead.
REFUSED_IN_SWEEPS = {
    "run_dir": "each job has its own folder in the sweep's, which hydra.sweep.dir=PATH names",
    "prepare_only": "leave out -m",
    "eval_only": "leave out -m, and evaluate one model at a time",
    "resume=true": "use resume=auto, which runs the jobs that are missing or unfinished",
}
# Settings of Hydra's that are refused → what to use instead.
REFUSED_HYDRA_SETTINGS = {
    "hydra.run.dir": "run_dir={value}",
    "hydra.sweep.subdir": "hydra.sweep.dir=PATH; each job's folder there is named by its settings",
    "hydra.mode": "-m for a sweep",
    "hydra.searchpath": "--config-dir=FOLDER",
}
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")  # of --info
# Options of Hydra's that would replace configs/config.yaml or skip the checks.
UNSUPPORTED_OPTIONS = ("--config-name", "-cn", "--config-path", "-cp", "--experimental-rerun")
# Settings and files of nanoGPT and similar programs → their equivalents here.
NANOGPT = yaml.safe_load(Path(__file__).with_name("nanogpt.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class CommandLine:
    """The validated arguments of train.py, with text values quoted for Hydra."""

    settings: list[str]  # KEY=VALUE
    options: list[str]  # Hydra's options with their values, such as -m
    is_sweep: bool = False  # -m or --multirun
    config_dir: str | None = None  # a folder with presets of the user's own
    is_for_hydra: bool = False  # asks for what Hydra itself prints, such as --cfg job

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
        return CommandLine([], argv, is_for_hydra=True)
    if parsed.multirun and is_under_torchrun():
        raise UserError(
            "torchrun cannot start a sweep, because its processes share one run: "
            "use python train.py -m"
        )
    options = list(argv)
    for argument in parsed.settings:
        options.remove(argument)
    paths = dict.fromkeys(
        argument
        for argument in parsed.settings
        if argument.startswith("data.path=") or ("=" not in argument and names_files(argument))
    )
    if len(paths) > 1:  # as from a shell that expands braces or a glob
        shown = textwrap.shorten(" ".join(paths), MAX_SHOWN_PATHS_CHARS, placeholder=" …")
        raise UserError(f"{shown} cannot be combined: {ONE_PATH}")
    is_sweep, is_for_hydra = parsed.multirun, parsed.request is not None
    check = partial(_check_argument, is_sweep=is_sweep, config_dir=parsed.config_dir)
    is_job = not is_sweep and not is_for_hydra
    settings = [check(argument, is_job=is_job) for argument in parsed.settings]
    if not any(setting.startswith("experiment=") for setting in settings):
        check("experiment=default")
    return CommandLine(settings, options, is_sweep, parsed.config_dir, is_for_hydra)


def _parse_options(argv: list[str]) -> argparse.Namespace:
    """Separate settings from Hydra's options, and refuse unknown options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--shell-completion", "-sc", dest="completion", action="store_true")
    parser.add_argument("--cfg", "-c", dest="request", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", dest="request", nargs="?", const="all", choices=INFO)
    parser.add_argument("--package", "-p")
    for option in ("--resolve", "--hydra-help", "--version"):
        parser.add_argument(option, dest="request", action="store_const", const="all")
    for argument in argv:
        if argument.startswith(UNSUPPORTED_OPTIONS):
            raise UserError(
                f"{argument} is not supported: a run is described by experiment=NAME, and "
                "--config-dir=FOLDER adds presets of your own"
            )
    try:
        parsed, unknown = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as e:
        raise UserError(f"{e}; python train.py --help lists all settings") from None
    if unknown:
        raise unknown_setting(unknown[0], SETTINGS)
    if parsed.package is not None and not parsed.request:
        raise UserError(f"--package={parsed.package} prints nothing: add --cfg job")
    folder = parsed.config_dir
    if folder is not None and not any(Path(folder, group).is_dir() for group in GROUPS):
        raise UserError(
            f"--config-dir={folder} is not a folder that contains one of {', '.join(GROUPS)}: name "
            "the folder above the one with your presets"
        )
    return parsed


def _check_argument(
    argument: str, is_sweep: bool, config_dir: str | None, is_job: bool = False
) -> str:
    """Validate a setting KEY=VALUE, and return it as Hydra takes it, with a text in quotes.

    In a sweep the value may stand for several, as Hydra parses it. A job is a single run.
    """
    key, equals, value = argument.partition("=")
    if equals and key.startswith(("hydra.", "hydra/")):
        return _check_hydra_setting(key, value, is_job)
    if not equals or key not in {*SETTINGS, *GROUPS} or is_nanogpt_setting(argument):
        raise unknown_setting(argument, [*SETTINGS, *GROUPS])
    advice = REFUSED_IN_SWEEPS.get(key) or REFUSED_IN_SWEEPS.get(argument.lower())
    if is_sweep and advice:
        raise UserError(f"{argument} cannot be used in a sweep: {advice}")

    # Several values
    is_free_text = key in SETTINGS and is_text(key) and "choices" not in SETTINGS[key].metadata
    if is_sweep and is_free_text:  # Hydra cannot parse ~
        paths = re.sub(r"(?<![^,])~[^,'\"]*", lambda path: quote(path[0]), value)
        argument = f"{key}={paths}" if _parse_override(f"{key}={paths}") else argument
    override = _parse_override(argument) if is_sweep or not is_free_text else None
    if override and override.is_sweep_override():
        if key == "sweep":
            raise UserError(f"{argument} names several sweeps: start one at a time")
        if not is_sweep:
            raise UserError(f"{argument} has several values: add -m to train a run with each")
        for choice in _list_choices(argument, override, config_dir):
            if key in GROUPS:
                _check_preset(key, str(choice), is_sweep, config_dir)
            else:
                check_setting(key, choice)
        return argument

    # A single value
    if key in GROUPS:
        _check_preset(key, value, is_sweep, config_dir)
    is_for_hydra = is_sweep if is_free_text else "${" in value
    if key in GROUPS or (is_for_hydra and override):
        return argument
    converted = check_setting(key, value)
    needs_quotes = isinstance(converted, str) and "choices" not in SETTINGS[key].metadata
    return f"{key}={quote(converted) if needs_quotes else format_value(converted)}"


def _check_hydra_setting(key: str, value: str, is_job: bool) -> str:
    """Return a setting of Hydra's own, with its path expanded and in quotes."""
    if key in REFUSED_HYDRA_SETTINGS:
        advice = REFUSED_HYDRA_SETTINGS[key].format(value=value)
        raise UserError(f"{key}={value} is not supported: use {advice}")
    if is_job:
        raise UserError(f"{key}={value} has no effect on a single run: leave it out, or add -m")
    needs_value = key == "hydra.sweep.dir" or key.startswith("hydra/")
    if needs_value and value in ("", "None", "null"):
        raise UserError(f"{key}={value} has no value: write {key}=VALUE, or leave it out")
    if key == "hydra.sweep.dir":
        return f"{key}={quote(str(expand_home(key, value)))}"
    return f"{key}={value}"


def _parse_override(argument: str) -> Override | None:
    """Return what Hydra reads in KEY=VALUE, or None if it cannot parse it."""
    with suppress(HydraException):
        return OverridesParser.create().parse_override(argument)
    return None


def _list_choices(argument: str, override: Override, config_dir: str | None) -> list[Any]:
    """Return the first single values that a sweep lists; an interval has none."""
    value = override.value()
    if isinstance(value, Glob):
        presets = find_presets(config_dir).get(override.key_or_group, {})
        if names := value.filter(list(presets)):
            return names
        examples = ", ".join(presets) or "1,2"
        raise UserError(f"{argument} matches no preset: list the values, such as {examples}")
    try:
        choices = value.range() if isinstance(value, RangeSweep) else getattr(value, "list", [])
        first = list(islice(choices, MAX_CHECKED_CHOICES))
    except (TypeError, ValueError) as e:
        raise UserError(f"{argument} is not a range: {e}") from None
    return [choice.text if isinstance(choice, QuotedString) else choice for choice in first]


def _check_preset(group: str, name: str, is_sweep: bool, config_dir: str | None) -> None:
    """Check the files of a preset, and the settings that it varies in a sweep."""
    if group == "sweep" and not is_sweep:
        raise UserError(f"sweep={name} is a sweep: add -m")
    for path, sweep_params in read_preset(group, name, config_dir).items():
        if sweep_params and not is_sweep:
            raise UserError(f"{path} describes a sweep: add -m")
        try:
            for key, value in sweep_params.items():
                if key == "sweep":
                    raise UserError(f"sweep={value} is a sweep in a sweep: leave it out")
                _check_argument(f"{key}={value}", True, config_dir)
                if _parse_override(f"{key}={value}") is None:
                    raise UserError(f"{key}={value} cannot be parsed: put each text in quotes")
        except UserError as e:
            raise UserError(f"{path}: {e}") from None


def is_nanogpt_setting(argument: str) -> bool:
    """Return whether KEY=VALUE is a setting of nanoGPT that does not name a file here."""
    return argument in NANOGPT and not Path(argument.partition("=")[2]).exists()


def quote(text: str) -> str:
    """Quote a text so that Hydra's grammar and OmegaConf's interpolation return it unchanged."""
    # Backslashes count only in front of a quote or at the end of the text.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", escape_interpolation(text)).replace("'", r"\'")
    return f"'{escaped}'"


def names_run(argument: str) -> bool:
    """Return whether an argument is the path of a run; an unreadable path is not."""
    with suppress(OSError):
        return contains_run(Path(argument))
    return False


def names_files(argument: str) -> bool:
    """Return whether an argument is the path of a file, or of a folder that is not a run.

    It may also be a glob that matches something.
    """
    with suppress(ValueError):  # no path contains a null character
        exists = os.path.exists(argument) or any(glob.iglob(argument))
        return exists and not names_run(argument)
    return False


def unknown_setting(
    argument: str, known: Iterable[str], command: str = "python train.py"
) -> UserError:
    """Build the error for an argument that is not a setting of a command, or has no value."""
    name = argument.lstrip("-+~")
    key, equals, _ = name.partition("=")
    for nanogpt_name in (name, Path(name).name, key.rpartition(".")[2]):
        if nanogpt_name in NANOGPT:
            return UserError(f"{argument} is not a setting here: use {NANOGPT[nanogpt_name]}")
    known = list(known)
    suggestion = did_you_mean(key, known)
    if argument.startswith("-") and key in known:
        setting = name if equals else f"{key}=VALUE"
        return UserError(f"{argument} is not an option: write {setting}, without dashes")
    if argument in known:
        return UserError(f"{argument} has no value: write {key}=VALUE")
    if "run_dir" in known and names_run(argument):
        return UserError(f"{argument} is a run without a setting: write run_dir={argument}")
    if "data.path" in known and names_files(argument):
        path = shlex.quote(argument)
        return UserError(f"{argument} is a path: write data=text data.path={path}")
    if "score" in known and names_files(argument):
        path = shlex.quote(argument) if os.path.exists(argument) else "FILE"  # for a glob
        return UserError(
            f"{argument} is a path: write prompt_file={path} to continue a text, score={path} to "
            f"score it, or init_from={path} to load a model"
        )
    if not equals or not key or argument.startswith("-"):
        return UserError(
            f"{argument!r} is not of the form KEY=VALUE (quote values with spaces){suggestion}"
        )
    return UserError(
        f"{argument.partition('=')[0]} is not a setting{suggestion or ';'} "
        f"{command} --help lists all settings"
    )
