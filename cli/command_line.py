"""Parse the command line of train.py: settings, presets and options."""

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from common.errors import UserError, did_you_mean
from common.paths import existing_form, expand_home
from common.settings import iterate_settings
from common.torchrun import is_under_torchrun
from config import Config
from run.config_file import escape_interpolation
from run.run_dir import RunDir

CONFIGS = Path(__file__).parents[1] / "configs"
Presets = dict[str, dict[str, Path]]  # the files of presets by group and name


def list_presets(folder: Path) -> Presets:
    """Return the presets in the folders of a folder, which are their groups."""
    return {
        group.name: {path.stem: path for path in sorted(group.glob("*.yaml"))}
        for group in sorted(folder.iterdir())
        if group.is_dir()
    }


PRESETS = list_presets(CONFIGS)
SETTINGS = {name: field for name, field, _ in iterate_settings(Config())}
TEXTS = {
    name
    for name, field in SETTINGS.items()
    if field.type in (str, str | None) and "choices" not in field.metadata and name not in PRESETS
}
# Settings whose value is a path.
PATH_KEYS = ("data.path", "prompt_file", "score", "run_dir", "init_from")
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
    is_sweep: bool  # -m or --multirun
    config_dir: str | None  # a folder with presets of the user's own
    is_shown: bool  # --cfg job: print the configuration


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate settings from options; return unknown options too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--help", "-h", nargs="?", const="")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=("job",))
    try:
        return parser.parse_known_intermixed_args(list(argv))
    except argparse.ArgumentError as e:
        raise UserError(f"{e}; see python train.py --help") from None


def find_presets(config_dir: str | None) -> Presets:
    """Return all presets: those of `CONFIGS`, and those in a folder of the user's own."""
    if not config_dir:
        return PRESETS
    folder = expand_home("--config-dir", config_dir)
    if not folder.is_dir():
        raise UserError(f"--config-dir={config_dir} is not a folder: give that of presets")
    own = list_presets(folder)
    if not own.keys() & {*PRESETS, "hydra"}:
        raise UserError(
            f"--config-dir={config_dir} has none of the folders {', '.join(PRESETS)}: name the "
            "folder that they are in"
        )
    for group, paths in PRESETS.items():
        for name, path in paths.items():
            own_path = own.get(group, {}).get(name, path)
            if not own_path.samefile(path):  # Hydra would not read it
                raise UserError(f"{own_path} has the name of a preset in {CONFIGS}: rename it")
    return {group: paths | own.get(group, {}) for group, paths in PRESETS.items()}


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Separate settings from options, and quote texts."""
    parsed, unknown = parse_options(argv)
    if parsed.help is not None:  # --help=SECTION, or not on the command line
        unknown = [f"--help={parsed.help}"]
    if unknown:
        raise unknown_setting(unknown[0], SETTINGS)
    find_presets(parsed.config_dir)  # refuses a folder whose presets would not be read
    if parsed.multirun and is_under_torchrun():
        raise UserError(
            "torchrun cannot start a sweep, because its processes share one run: "
            "use python train.py -m"
        )
    typed = parsed.settings
    if typed and typed[0] == argv[0] and _is_text(typed[0]):
        path = quote(typed[0]) if parsed.multirun and "," in typed[0] else typed[0]
        typed = ["data=text", f"data.path={path}", *typed[1:]]
    last_of_key = {argument.partition("=")[0]: argument for argument in typed}
    return CommandLine(
        typed=list(argv),
        settings=[check_argument(argument, parsed.multirun) for argument in last_of_key.values()],
        is_sweep=parsed.multirun,
        config_dir=parsed.config_dir,
        is_shown=parsed.cfg is not None,
    )


def _is_text(argument: str) -> bool:
    """Return whether an argument is a path, not a setting, a preset, a run or nanoGPT's file."""
    key = argument.partition("=")[0]
    path = Path(argument)
    is_setting = key in PRESETS or any(f"{name}.".startswith(f"{key}.") for name in SETTINGS)
    is_preset = any(argument in presets for presets in PRESETS.values())
    if is_setting or is_preset or path.name in NANOGPT or CONFIGS in path.absolute().parents:
        return False
    found = existing_form(argument)
    return os.path.isfile(found) or (os.path.isdir(found) and not RunDir(path).has_begun)


def check_argument(argument: str, is_sweep: bool) -> str:
    """Return KEY=VALUE as Hydra takes it: a text is quoted, unless a sweep has several of them."""
    key, _, value = argument.partition("=")
    is_hydras = key.startswith(("hydra.", "hydra/"))
    is_known = is_hydras or key in SETTINGS or key in PRESETS
    if not value or not is_known or argument in NANOGPT:
        raise unknown_setting(argument, [*SETTINGS, *PRESETS])
    if is_sweep:
        _check_in_sweep(argument)
    elif is_hydras or key == "sweep":
        raise UserError(f"{argument} is for a sweep: leave it out, or add -m")

    if key in TEXTS and is_sweep and "," in value:
        return f"{key}={_quote_each(value)}"
    if key == "hydra.sweep.dir" or (key in TEXTS and value != "null"):
        return f"{key}={quote(value)}"
    return argument


def _check_in_sweep(argument: str) -> None:
    """Raise `UserError` if KEY=VALUE is for a single run."""
    key = argument.partition("=")[0]
    advice = REFUSED_IN_SWEEPS.get(key) or REFUSED_IN_SWEEPS.get(argument.lower())
    if advice:
        raise UserError(f"{argument} cannot be used in a sweep: {advice}")


def _quote_each(values: str) -> str:
    """Quote each of the texts of a sweep, unless quotes or functions of Hydra are typed."""
    texts = [text.strip() for text in values.split(",")]
    if re.search(r"""['"()\[\]{}\\]""", values) or not all(texts):
        return values
    return ",".join(text if text == "null" else quote(text) for text in texts)


def quote(text: str) -> str:
    """Quote a text so that Hydra's grammar and OmegaConf's interpolation return it unchanged."""
    # Backslashes count only in front of a quote or at the end of the text.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", escape_interpolation(text)).replace("'", r"\'")
    return f"'{escaped}'"


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
    if key in known:
        return UserError(f"{argument} is not of the form KEY=VALUE: write {key}=VALUE")
    is_of_train = "data.path" in known
    groups = [group for group in PRESETS if is_of_train and argument in PRESETS[group]]
    forms = [f"{group}={argument}" for group in groups]
    if os.path.lexists(argument):
        forms += [f"{path_key}=PATH" for path_key in PATH_KEYS if path_key in known]
    if forms:
        problem = "is the name of a preset" if groups else "is a path without a setting"
        return UserError(f"{argument} {problem}: write {' or '.join(forms)}")
    problem = "is not a setting" if equals else "is neither a setting nor an existing path"
    is_text = name == argument and (not equals or " " in key)
    if "prompt" in known and is_text and not did_you_mean(key, known):
        return UserError(
            f"{argument} {problem}; write prompt={shlex.quote(argument)} for a text, or "
            "init_from=OWNER/NAME for a model of the Hugging Face hub"
        )
    return UserError(
        f"{argument} {problem}{did_you_mean(key, known) or ';'} {command} --help explains "
        "the settings, which are typed as KEY=VALUE"
    )
