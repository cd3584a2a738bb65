"""Parse the command line of train.py: settings, presets and Hydra's options."""

import argparse
import glob
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from cli.config_file import escape_interpolation
from common.checkpoints import contains_run
from common.errors import UserError, did_you_mean
from common.paths import ONE_PATH
from common.settings import iterate_settings
from common.torchrun import is_under_torchrun
from config import Config

CONFIGS = Path(__file__).parents[1] / "configs"
GROUPS = tuple(sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir()))
SETTINGS = {name: field for name, field, _ in iterate_settings(Config())}
MAX_SHOWN_PATHS_CHARS = 200  # of the paths that a shell made of a glob
# Settings that a sweep refuses → what to do instead.
REFUSED_IN_SWEEPS = {
    "run_dir": "each job has its own folder in the sweep's, which hydra.sweep.dir=PATH names",
    "prepare_only": "leave out -m",
    "eval_only": "leave out -m, and evaluate one model at a time",
    "resume=true": "use resume=auto, which runs the jobs that are missing or unfinished",
}
# Settings and files of nanoGPT and similar programs → their equivalents here.
NANOGPT = yaml.safe_load(Path(__file__).with_name("nanogpt.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class CommandLine:
    """The arguments of train.py, as typed and with texts quoted for Hydra."""

    typed: list[str]  # all arguments
    settings: list[str]  # KEY=VALUE
    options: list[str]  # Hydra's options with their values, such as -m
    is_sweep: bool = False  # -m or --multirun
    config_dir: str | None = None  # a folder with presets of the user's own
    is_for_hydra: bool = False  # asks for what Hydra itself prints, such as --cfg job

    @property
    def arguments(self) -> list[str]:
        """The arguments as Hydra takes them."""
        return [*self.settings, *self.options]


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Separate settings from Hydra's options, and quote texts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", dest="request", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", dest="request", nargs="?", const="all")
    parser.add_argument("--package", "-p")
    for option in ("--resolve", "--hydra-help", "--version", "--shell-completion", "-sc"):
        parser.add_argument(option, dest="request", action="store_const", const="all")
    try:
        parsed, unknown = parser.parse_known_intermixed_args(list(argv))
    except argparse.ArgumentError as e:
        raise UserError(f"{e}; python train.py --help lists all settings") from None
    if unknown:
        raise unknown_setting(unknown[0], SETTINGS)
    if parsed.config_dir and not Path(parsed.config_dir).is_dir():
        raise UserError(f"--config-dir={parsed.config_dir} is not a folder: give that of presets")
    if parsed.multirun and is_under_torchrun():
        raise UserError(
            "torchrun cannot start a sweep, because its processes share one run: "
            "use python train.py -m"
        )
    options = [argument for argument in argv if argument not in parsed.settings]
    if parsed.request:
        return CommandLine(list(argv), parsed.settings, options, is_for_hydra=True)
    _refuse_several_paths(parsed.settings)
    settings = [_check_argument(argument, parsed.multirun) for argument in parsed.settings]
    return CommandLine(list(argv), settings, options, parsed.multirun, parsed.config_dir)


def _refuse_several_paths(arguments: Sequence[str]) -> None:
    """Raise `UserError` if a shell has expanded braces or a glob to several texts."""
    paths = [argument for argument in arguments if argument.startswith("data.path=")]
    paths += [argument for argument in arguments if "=" not in argument and names_files(argument)]
    if len(set(paths)) > 1:
        shown = textwrap.shorten(" ".join(paths), MAX_SHOWN_PATHS_CHARS, placeholder=" …")
        raise UserError(f"{shown} cannot be combined: {ONE_PATH}")


def _check_argument(argument: str, is_sweep: bool) -> str:
    """Return KEY=VALUE as Hydra takes it: a text is quoted, unless a sweep has several of them."""
    key, equals, value = argument.partition("=")
    is_hydras = key.startswith(("hydra.", "hydra/"))
    is_known = is_hydras or key in SETTINGS or key in GROUPS
    if not equals or not is_known or is_nanogpt_setting(argument):
        raise unknown_setting(argument, [*SETTINGS, *GROUPS])
    if not value:
        raise UserError(f"{argument} has no value: write {key}=VALUE, or leave it out")
    if is_hydras and not is_sweep:
        raise UserError(f"{argument} has no effect on a single run: leave it out, or add -m")
    if key == "sweep" and not is_sweep:
        raise UserError(f"{argument} is a sweep: add -m")
    advice = REFUSED_IN_SWEEPS.get(key) or REFUSED_IN_SWEEPS.get(argument.lower())
    if is_sweep and advice:
        raise UserError(f"{argument} cannot be used in a sweep: {advice}")
    if key == "hydra.sweep.dir" or (_is_text(key) and value != "null"):
        has_several_texts = is_sweep and "," in value and key in SETTINGS
        return argument if has_several_texts else f"{key}={quote(value)}"
    if "," in value and not is_sweep:
        raise UserError(f"{argument} has several values: add -m to train a run with each")
    return argument


def _is_text(key: str) -> bool:
    if key not in SETTINGS:
        return False
    field = SETTINGS[key]
    return field.type in (str, str | None) and "choices" not in field.metadata


def quote(text: str) -> str:
    """Quote a text so that Hydra's grammar and OmegaConf's interpolation return it unchanged."""
    # Backslashes count only in front of a quote or at the end of the text.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", escape_interpolation(text)).replace("'", r"\'")
    return f"'{escaped}'"


def is_nanogpt_setting(argument: str) -> bool:
    """Return whether KEY=VALUE is a setting of nanoGPT that does not name a file here."""
    return argument in NANOGPT and not Path(argument.partition("=")[2]).exists()


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
    suggestion = did_you_mean(key, known)
    if not equals or not key or argument.startswith("-"):
        return UserError(
            f"{argument!r} is not of the form KEY=VALUE (quote values with spaces){suggestion}"
        )
    return UserError(
        f"{argument.partition('=')[0]} is not a setting{suggestion or ';'} "
        f"{command} --help lists all settings"
    )
