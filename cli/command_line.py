"""Read what is typed: train.py's settings are translated into Hydra's, others become an object."""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from common.errors import UserError, did_you_mean, not_one_of
from common.files import exists
from common.paths import expand_home, expand_model_name
from common.settings import check_settings, convert_value, explain_unused, iterate_settings, setting
from config import Config, ModelSource
from run.config_file import escape_interpolation
from run.run_dir import RunDir

CONFIGS = Path(__file__).parents[1] / "configs"
Settings = TypeVar("Settings")
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
# Texts whose commas do not separate the values of a sweep.
WITH_COMMAS = ("wandb.tags", "wandb.notes")
# Settings that a sweep refuses → what to do instead.
REFUSED_IN_SWEEPS = {
    "run_dir": "each job has its own folder in the sweep's, which hydra.sweep.dir=PATH names",
    "wandb.name": "each job has the name of its folder; name the sweep with wandb.group",
    "prepare_only": "leave out -m",
    "eval_only": "leave out -m, and evaluate one model at a time",
    "resume=true": "use resume=auto, which runs the jobs that are missing or unfinished",
}
# Settings and files of nanoGPT and similar programs → their equivalents here.
NANOGPT = yaml.safe_load(Path(__file__).with_name("nanogpt.yaml").read_text(encoding="utf-8"))
# Hydra's options without and with a value, by their short names; not --experimental-rerun, which
# would unpickle a file.
FLAGS = {"-m": "--multirun", "-r": "--run", "-sc": "--shell-completion", "-i": "--info"}
FLAGS |= {name: name for name in (*FLAGS.values(), "--resolve", "--hydra-help", "--version")}
WITH_VALUE = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path"}
WITH_VALUE |= {"-c": "--cfg", "-p": "--package", "-i": "--info"}
WITH_VALUE |= {name: name for name in WITH_VALUE.values()}
# Quotes and functions of Hydra in a sweep's values.
SWEEP_SYNTAX = re.compile(r"""['"()\[\]{}\\]""")
CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}


def split_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate Hydra's options, by their long names and with their values, from settings."""
    options: dict[str, str] = {}
    settings = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            settings.append(argument)
        elif name in WITH_VALUE and (equals or rest):
            options[WITH_VALUE[name]] = value if equals else rest.pop(0)
        elif argument in FLAGS:
            options[FLAGS[argument]] = ""
        else:
            raise unknown_setting(argument, [*SETTINGS, *PRESETS])
    for name, choices in CHOICES.items():
        if options.get(name) and options[name] not in choices:
            raise UserError(not_one_of(name, options[name], choices))
    if "--config-dir" in options:
        options["--config-dir"] = str(expand_home("--config-dir", options["--config-dir"]))
    return options, settings


def find_presets(config_dir: str | None) -> Presets:
    """Return all presets: those of `CONFIGS`, and those in a folder of the user's own."""
    if not config_dir:
        return PRESETS
    folder = Path(config_dir)
    if not folder.is_dir():
        raise UserError(f"--config-dir={config_dir} is not a folder: give that of presets")
    own = list_presets(folder)
    if not own.keys() & {*PRESETS, "hydra"}:
        raise UserError(
            f"--config-dir={config_dir} has none of the folders {', '.join(PRESETS)}: name the "
            "folder that they are in"
        )
    for group, paths in PRESETS.items():
        for unread in folder.glob(f"{group}/*.yml"):
            raise UserError(f"{unread} is not read as a preset: rename it to {unread.stem}.yaml")
        for name, path in paths.items():
            own_path = own.get(group, {}).get(name, path)
            if not own_path.samefile(path):  # it would be read instead
                raise UserError(f"{own_path} has the name of a preset in {CONFIGS}: rename it")
    return {group: paths | own.get(group, {}) for group, paths in PRESETS.items()}


def translate_settings(
    arguments: Sequence[str], is_sweep: bool, presets: Presets = PRESETS
) -> list[str]:
    """Return settings as Hydra takes them: each once, and texts quoted.

    A path in the first place is that of a text. What `tokenizer` names beside presets is a name.
    """
    typed = list(arguments)
    if typed and is_text_path(typed[0]):
        path = quote(typed[0]) if is_sweep and "," in typed[0] else typed[0]
        typed[:1] = ["data=text", f"data.path={path}"]
    typed = [_name_tokenizer(each, is_sweep, presets["tokenizer"]) for each in typed]
    last_of_key = {argument.partition("=")[0]: argument for argument in typed}
    return [translate_setting(argument, is_sweep) for argument in last_of_key.values()]


def _name_tokenizer(argument: str, is_sweep: bool, presets: Collection[str]) -> str:
    """Return tokenizer=NAME as the setting tokenizer.name, unless it chooses presets."""
    key, _, value = argument.partition("=")
    names = value.split(",") if is_sweep else [value]
    uses_hydra = is_sweep and SWEEP_SYNTAX.search(value)
    if key != "tokenizer" or uses_hydra or all(name.strip() in presets for name in names):
        return argument
    return f"tokenizer.name={value}"


def is_text_path(argument: str) -> bool:
    """Return whether an argument is a path, not a setting, a preset, a run or nanoGPT's file."""
    key = argument.partition("=")[0]
    path = Path(argument)
    is_setting = key in PRESETS or any(f"{name}.".startswith(f"{key}.") for name in SETTINGS)
    is_preset = any(argument in presets for presets in PRESETS.values())
    if is_setting or is_preset or path.name in NANOGPT or CONFIGS in path.absolute().parents:
        return False
    return os.path.isfile(path) or (os.path.isdir(path) and not RunDir(path).has_begun)


def translate_setting(argument: str, is_sweep: bool) -> str:
    """Return KEY=VALUE as Hydra takes it: a text is quoted, unless a sweep has several of them."""
    typed_key, _, value = argument.partition("=")
    key = typed_key.lstrip("+~")
    if key == "hydra.run.dir":
        return translate_setting(f"run_dir={value}", is_sweep)
    if key == "hydra.sweep.dir":
        return f"{key}={quote(str(expand_home(key, value)))}"
    if key.startswith(("hydra.", "hydra/")):
        return argument
    is_known = key in SETTINGS or key in PRESETS
    if is_known and typed_key.startswith("~"):
        raise UserError(f"{argument} cannot be left out, only changed: write {key}=VALUE")
    if not is_known or not value or argument in NANOGPT:
        raise unknown_setting(argument, [*SETTINGS, *PRESETS])
    advice = REFUSED_IN_SWEEPS.get(key) or REFUSED_IN_SWEEPS.get(argument.lower())
    if is_sweep and advice:
        raise UserError(f"{argument} cannot be used in a sweep: {advice}")
    if key in TEXTS and key not in WITH_COMMAS and is_sweep and "," in value:
        return f"{typed_key}={_quote_each(value)}"
    return f"{typed_key}={quote(value)}" if key in TEXTS and value != "null" else argument


def _quote_each(values: str) -> str:
    """Quote each of the texts of a sweep, unless quotes or functions of Hydra are typed."""
    texts = [text.strip() for text in values.split(",")]
    if SWEEP_SYNTAX.search(values) or not all(texts):
        return values
    return ",".join(text if text == "null" else quote(text) for text in texts)


def quote(text: str) -> str:
    """Quote a text so that Hydra's grammar and OmegaConf's interpolation return it unchanged."""
    # Backslashes count only in front of a quote or at the end of the text.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", escape_interpolation(text)).replace("'", r"\'")
    return f"'{escaped}'"


@dataclass
class LoadConfig(ModelSource):
    """Settings of the commands that load a trained model."""

    checkpoint: str = setting("best", "checkpoint of the run: best, last, or a step number")

    def check(self) -> None:
        """Raise `UserError` if a value is out of bounds or settings contradict each other."""
        check_settings(self)
        is_step = self.checkpoint.isascii() and self.checkpoint.isdigit()
        if self.checkpoint not in ("best", "last") and not is_step:
            raise UserError(f"checkpoint={self.checkpoint} must be best, last or a step number")
        if self.run_dir is not None and self.init_from is not None:
            raise UserError("run_dir= and init_from= exclude each other: leave one out")
        if self.run_dir is not None and not exists(
            Path(expand_model_name("run_dir", self.run_dir))
        ):
            raise UserError(f"run_dir={self.run_dir} does not exist: name the folder of a run")


def read_settings(argv: list[str], settings_class: type[Settings], command: str) -> Settings:
    """Read the settings KEY=VALUE of a command, and check them with the method `check`."""
    known = {field.name: field for field in fields(cast(Any, settings_class))}
    typed: dict[str, Any] = {}
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals or key not in known or argument in NANOGPT:
            raise unknown_setting(argument, known, command)
        converted = convert_value(key, known[key], value)
        is_repeatable = isinstance(known[key].default, tuple)
        typed[key] = (*typed.get(key, ()), converted) if is_repeatable else converted
    settings: Any = settings_class(**typed)
    settings.check()
    for key in typed:
        if reason := explain_unused(settings, key):
            raise UserError(reason)
    return settings


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
            f"{argument} {problem}: write prompt={shlex.quote(argument)} for a text, or "
            "init_from=OWNER/NAME for a model of the Hugging Face hub"
        )
    return UserError(
        f"{argument} {problem}{did_you_mean(key, known) or ':'} {command} --help explains "
        "the settings, which are typed as KEY=VALUE"
    )
