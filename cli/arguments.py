"""What is typed for train.py, as Hydra takes it: its options, its settings, its presets."""

import argparse
import os
import re
from contextlib import suppress
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
NOT_IN_A_SWEEP = {
    "run_dir": "hydra.sweep.dir=PATH names its folder, in which each job has its own",
    "prepare_only": "leave -m out",
    "resume=true": "resume=auto runs the jobs that are missing or not finished",
}
# What is typed for nanoGPT → what it is here.
NANOGPT = yaml.safe_load(Path(__file__).with_name("nanogpt.yaml").read_text(encoding="utf-8"))


def check_arguments(argv: list[str]) -> list[str]:
    """The arguments as Hydra takes them; what names no setting is refused."""
    given = hydra_options(argv)
    if given.asked == "completion":  # of which Hydra reads install=bash and the like
        return list(argv)
    if given.multirun and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "a sweep does not go with torchrun, whose processes train one run: "
            "start it by python train.py -m"
        )
    texts = ("<class 'str'>", "str | None")
    names = {name: str(f.type) in texts for name, f, _ in iterate_settings(Config())}
    names |= dict.fromkeys(groups(), False) | {"hydra.sweep.dir": True}
    options = list(argv)
    for arg in given.settings:
        options.remove(arg)
    return [*(as_hydra_takes_it(arg, names, given.multirun) for arg in given.settings), *options]


def hydra_options(argv: list[str]) -> argparse.Namespace:
    """The `settings`, and Hydra's options: `multirun`, `config_dir`, what else it is `asked`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", dest="asked", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", "--package", "-p", dest="asked", nargs="?", const="all")
    parser.add_argument(
        "--resolve", "--hydra-help", "--version", dest="asked", action="store_const", const="all"
    )
    parser.add_argument(
        "--shell-completion", "-sc", dest="asked", action="store_const", const="completion"
    )
    try:
        given, unknown = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as e:
        raise UserError(str(e)) from None
    if unknown:
        raise no_setting(unknown[0], [name for name, *_ in iterate_settings(Config())])
    if given.config_dir is not None and not Path(given.config_dir).is_dir():
        raise UserError(f"--config-dir={given.config_dir} is not a folder")
    return given


def as_hydra_takes_it(arg: str, names: dict[str, bool], sweep: bool) -> str:
    """A setting, in quotes where it is a text: Hydra's grammar would read something else in it.

    names: what can be typed before an equals sign → whether its value is a text. Those of a sweep
    are left to Hydra, where it can read them."""
    key, equals, value = arg.partition("=")
    known = key in names or key.startswith(("hydra.", "hydra/"))
    if not equals or not known or is_nanogpts(arg):
        raise no_setting(arg, names)
    if sweep and (wrong := NOT_IN_A_SWEEP.get(key) or NOT_IN_A_SWEEP.get(arg.lower())):
        raise UserError(f"{arg} does not go with a sweep: {wrong}")
    if key == "hydra.run.dir":
        raise UserError(f"{arg}: here run_dir={value} names the run's folder")
    if key == "sweep" and not sweep:
        raise UserError(f"{arg} is a sweep: add -m")
    if not names.get(key) or value == "null":
        return arg
    if key == "hydra.sweep.dir":
        value = str(expand_home(key, value))
    elif sweep:
        with suppress(HydraException):
            OverridesParser.create().parse_override(arg)
            return arg
    return f"{key}={quote(value)}"


def is_nanogpts(arg: str) -> bool:
    """Whether a setting with its value is one of nanoGPT's, and names nothing here."""
    return arg in NANOGPT and not Path(arg.partition("=")[2]).exists()


def quote(text: str) -> str:
    """A text as Hydra's grammar and OmegaConf's interpolation give it back unchanged."""
    # Backslashes count only where they stand before a quote or the text's end.
    return (
        "'"
        + re.sub(
            r"(\\*)('|\Z)", lambda m: m[1] * 2 + (r"\'" if m[2] else ""), escape_interpolation(text)
        )
        + "'"
    )


def no_setting(arg: str, known, command: str = "python train.py") -> UserError:
    """The error for what names no setting of a command, or gives it no value."""
    name = arg.lstrip("-+~")
    key, equals, _ = name.partition("=")
    near = did_you_mean(key, known)
    for habit in (name, Path(name).name, key.rpartition(".")[2]):
        if habit in NANOGPT:
            return UserError(f"{arg} is nanoGPT's; here it is {NANOGPT[habit]}")
    if not equals or arg.startswith("-"):
        return UserError(
            f"{arg} is not of the form key=value, in quotes where the value has spaces{near}"
        )
    return UserError(
        f"{arg.partition('=')[0]} is not a setting{near or ';'} {command} --help lists all"
    )


def groups(config_dir: str | None = None) -> dict[str, dict[str, Path]]:
    """The groups of presets: group → preset → its file, those of a --config-dir too."""
    found = {folder.name: {} for folder in sorted(CONFIGS.iterdir()) if folder.is_dir()}
    for root in filter(None, (config_dir, CONFIGS)):  # Hydra takes ours where names are the same
        for group, presets in found.items():
            for path in sorted(Path(root, group).rglob("*.yaml")):
                presets[path.relative_to(Path(root, group)).with_suffix("").as_posix()] = path
    return found
