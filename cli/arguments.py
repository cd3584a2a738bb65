"""What is typed for train.py, checked, and its texts quoted before Hydra reads them."""

import argparse
import os
import re
from importlib.metadata import distributions
from itertools import pairwise, takewhile
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from cli.command import sentence
from config import Config, UserError, did_you_mean, escaped, knobs, not_one_of

CONFIGS = Path(__file__).parents[1] / "configs"
# Hydra's options that would take another configuration than ours.
NO_OPTIONS = ("config_path", "config_name", "experimental_rerun")
LAUNCHERS = {"joblib": "hydra-joblib-launcher", "submitit_local": "hydra-submitit-launcher",
             "submitit_slurm": "hydra-submitit-launcher"}
# A sweep's alternatives stand between commas; what is quoted or calls one of Hydra's functions
# is left to Hydra.
CHOICES = re.compile(r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\([^)]*\)|[^,])+""")
HYDRA_SYNTAX = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:choice|glob)\(.*\)""")
NOT_IN_A_SWEEP = {
    "run_dir": "run_dir= does not go with a sweep, whose jobs have a folder each: "
               "name the sweep's folder with hydra.sweep.dir=PATH",
    "dry_run": "dry_run= plans one run and does not go with a sweep: leave -m out",
    "prepare_only": "prepare_only= is for one text and does not go with a sweep: leave -m out",
    "resume=true": "resume=true is for one run: with resume=auto a sweep runs the jobs that are "
                   "missing or not finished"}
TEXTS = ("<class 'str'>", "str | None")  # the types of settings that are taken as they are typed
FREE = ("str | None", "list[str]")  # those of texts and paths, in which spaces are usual
# nanoGPT's settings that are called otherwise here.
NANOGPT = {
    "out_dir": "run_dir=PATH",
    "init_from=resume": "run_dir=PATH resume=true",
    "init_from=scratch": "the default: leave it out",
    "max_iters": "max_steps=N",
    "eval_interval": "eval.every=N",
    "log_interval": "log.every=N",
    "eval_iters": "data.val_max_tokens=N, at most, of the whole validation split",
    "always_save_checkpoint": "checkpoint.every=N",
    "dataset": "data=shakespeare, or data=text data.path=PATH",
    "gradient_accumulation_steps": "accumulate=N, into which batch_size is split",
    "learning_rate": "optim.lr=RATE",
    "min_lr": "optim.min_lr_ratio=SHARE, of optim.lr",
    "decay_lr": "optim.schedule=constant",
    "warmup_iters": "optim.warmup_steps=N",
    "lr_decay_iters": "max_steps=N, at which the decay ends",
    "dtype": "precision=bf16, or precision=fp32",
    "backend": "chosen by itself: leave it out",
    "wandb_log": "wandb.mode=online",
    "wandb_project": "wandb.project=NAME",
    "wandb_run_name": "the environment variable WANDB_NAME, or run_dir=PATH",
    "start": "prompt=TEXT",
    "train_gpt2.py": "experiment=gpt2_124m",
    "train_shakespeare_char.py": "experiment=nanogpt_gpu, or experiment=nanogpt_cpu",
    "finetune_shakespeare.py": "init_from=FOLDER data=shakespeare"}
NANOGPT |= {f"init_from={name}": f"init_from=openai-community/{name}"
            for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


def check_arguments(argv: list[str]) -> list[str]:
    """The arguments as Hydra takes them.

    Raises:
        UserError: an argument names no setting, or no preset, or cannot be read.
    """
    given = hydra_options(argv)
    types = {name: str(f.type) for name, f, _ in knobs(Config())}
    check_quotes(given.overrides, types)
    presets = groups(given.config_dir)
    checked = [check_argument(arg, types, presets, given.multirun) for arg in given.overrides]
    if given.multirun and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("a sweep does not go with torchrun, whose processes train one run: "
                        "start it by python train.py -m")
    flags = list(argv)
    for arg in given.overrides:
        flags.remove(arg)
    return flags + checked


def hydra_options(argv: list[str]) -> argparse.Namespace:
    """What Hydra's own options are given; `overrides` are the settings.

    Raises:
        UserError: there is no such option, or it does not go with the others.
    """
    parser = get_args_parser()
    parser.allow_abbrev = parser.exit_on_error = False
    try:
        given, unknown = parser.parse_known_intermixed_args(argv)
    except argparse.ArgumentError as e:
        raise UserError(str(e)) from None
    if unknown:
        setting = unknown[0].lstrip("-")
        check_habit(setting)
        raise UserError(f"{unknown[0]} is not an option; a setting has no dashes: "
                        f"{setting if '=' in setting else setting + '=VALUE'}")
    for name in NO_OPTIONS:
        if getattr(given, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}={getattr(given, name)} is not for "
                            "GlassGPT: presets of your own go with --config-dir=FOLDER")
    if given.multirun and (given.cfg or given.info):
        raise UserError("--cfg and --info are about one run's configuration: leave -m out, and "
                        "give each setting one value")
    if given.config_dir is not None and not Path(given.config_dir).is_dir():
        raise UserError(f"--config-dir={given.config_dir} is not a folder")
    return given


def check_argument(arg: str, types: dict[str, str], presets: dict, sweep: bool) -> str:
    """An argument as Hydra takes it; raises as `check_arguments`."""
    key, _, value = arg.partition("=")
    name = key.lstrip("+~")
    if name.startswith(("hydra.", "hydra/")):
        return check_hydra_argument(arg, key, value)
    if key != name and name in types:
        raise UserError(f"{arg}: a setting is changed, not added or removed: write {name}=VALUE")
    if "=" not in arg or key not in types | presets:
        raise no_setting(arg, [*types, *presets])
    if sweep and (wrong := NOT_IN_A_SWEEP.get(key) or NOT_IN_A_SWEEP.get(arg.lower())):
        raise UserError(wrong)
    if types.get(key) in TEXTS and value != "???":
        if arg in NANOGPT and not Path(value).exists():
            check_habit(arg)
        return f"{key}={quote_texts(value, sweep)}"
    if not sweep and "," in value:
        raise UserError(f"{arg} gives several values: add -m to run a sweep over them")
    if key in presets:
        check_choice(key, value, presets[key], sweep)
    return readable(arg)


def check_quotes(args: list[str], types: dict[str, str]) -> None:
    """Raise `UserError` for words that stand alone after a text: its quotes were forgotten."""
    for n, (before, arg) in enumerate(pairwise(args), 1):
        key, _, value = before.partition("=")
        if types.get(key) in FREE and not re.match(r"-|$|.*=", arg) and arg not in types:
            check_habit(Path(arg).name)
            whole = " ".join([value, *takewhile(lambda word: "=" not in word, args[n:])])
            raise UserError(f"{arg} stands alone: put a value with spaces in quotes: "
                            f'{key}="{whole}"')


def check_habit(arg: str) -> None:
    """Raise `UserError` for what is typed for nanoGPT, with what to type here."""
    here = NANOGPT.get(arg) or NANOGPT.get(arg.partition("=")[0].rpartition(".")[2])
    if here:
        raise UserError(f"{arg} is nanoGPT's; here it is {here}")


def no_setting(arg: str, known, command: str = "python train.py", hint: str = "") -> UserError:
    """The error for what names no setting of a command, or gives it no value."""
    key, equals, _ = arg.partition("=")
    near = did_you_mean(key.lstrip("+~-"), known)
    check_habit(arg.lstrip("-") if equals else Path(arg).name)
    if not equals:
        hint = ", without spaces" if arg in known else near or hint
        return UserError(f"{arg or 'an empty argument'} is not of the form key=value{hint}")
    of = "" if command == "python train.py" else f" of {command.split()[-1]}"
    return UserError(f"{key} is not a setting{of}{near or ';'} {command} --help lists all")


def check_hydra_argument(arg: str, key: str, value: str) -> str:
    """A setting of Hydra's as it takes it; raises as `check_arguments`."""
    package = LAUNCHERS.get(value) if key == "hydra/launcher" else None
    if package and not any(distributions(name=package)):
        raise UserError(f"{arg} needs a package that is not installed: pip install {package}")
    if key == "hydra.sweep.dir" and not HYDRA_SYNTAX.fullmatch(value) and "${" not in value:
        home = value.startswith("~")  # shells leave it as it is behind an equals sign
        return f"{key}={quote(str(Path(value).expanduser()) if home else value)}"
    return readable(arg)


def readable(arg: str) -> str:
    """The argument, where Hydra can read it; raises as `check_arguments`."""
    key, _, value = arg.partition("=")
    if value in ("", "???"):  # which OmegaConf takes for a value that is missing
        raise UserError(f"{arg} has no value: type {key}=VALUE")
    try:
        OverridesParser.create().parse_override(arg)
    except HydraException:
        raise UserError(f"{arg} cannot be read: type {key}=VALUE, with every bracket closed, and "
                        "one comma between the values of a sweep") from None
    return arg


def groups(config_dir: str | None = None) -> dict[str, dict[str, Path]]:
    """The groups of presets: group → preset → its file, those of a --config-dir too.

    Raises:
        UserError: a file of the --config-dir has a name that is taken.
    """
    found = {folder.name: {} for folder in sorted(CONFIGS.iterdir()) if folder.is_dir()}
    for root in (CONFIGS, Path(config_dir)) if config_dir is not None else (CONFIGS,):
        for group, presets in found.items():
            for path in sorted((root / group).rglob("*.yaml")):
                name = path.relative_to(root / group).with_suffix("").as_posix()
                if name in presets:
                    raise UserError(f"{path} would not be read, since {group}={name} is one of "
                                    "GlassGPT's presets: give the file another name")
                presets[name] = path
    return found


def read_preset(path: Path) -> dict:
    """What a preset sets.

    Raises:
        UserError: it is not YAML.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return yaml.safe_load(file) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as e:
        why = sentence(e)
        raise UserError(why if str(path) in why else f"{path} cannot be read: {why}") from None


def check_choice(group: str, value: str, known: dict[str, Path], sweep: bool) -> None:
    if group == "sweep" and not sweep:
        raise UserError(f"sweep={value} is a sweep: add -m")
    if sweep and "(" in value:  # glob(*), choice(…): Hydra's to expand
        return
    # One sweep is of all the jobs, whatever else is swept.
    for choice in [value] if group == "sweep" else value.split(","):
        if choice not in known:
            raise UserError(not_one_of(group, choice, known))
        read_preset(known[choice])


def quote_texts(value: str, sweep: bool) -> str:
    """A text, or the texts between the commas of a sweep, quoted but for null and functions."""
    texts = CHOICES.findall(value) if sweep else [value]
    return ",".join(text if text == "null" or (sweep and HYDRA_SYNTAX.fullmatch(text))
                    else quote(text) for text in texts)


def quote(text: str) -> str:
    """A text as Hydra's grammar and OmegaConf's interpolation give it back unchanged."""
    # Backslashes count only where they stand before a quote or the text's end.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + (r"\'" if m[2] else ""),
                        escaped(text)) + "'"


def typed_value(key: str, checked: list[str]):
    """The value that checked arguments give a key; None where they do not."""
    given = [arg for arg in checked if arg.partition("=")[0] == key]
    return OverridesParser.create().parse_override(given[-1]).value() if given else None
