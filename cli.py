"""What is typed, checked and turned into a configuration. Does not import torch."""

import argparse
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from importlib.metadata import distributions
from operator import attrgetter
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from rich.console import Console

from config import (
    Config,
    GPTConfig,
    SampleConfig,
    TokenizerConfig,
    UserError,
    absolute_paths,
    did_you_mean,
    escaped,
    is_hf,
    knobs,
    named_paths,
    read_config,
)

CONFIGS = Path(__file__).parent / "configs"
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
    "resume=true": "resume=true is for one run: with resume=auto a sweep runs the jobs that are "
                   "missing or not finished"}
IMMUTABLE_ON_RESUME = ("model.", "tokenizer.", "seed", "batch_size", "optim.name", "init_from")
# What belongs to a command and not to the run that it continues.
PER_COMMAND = ("run_dir", "resume", "eval_only", "dry_run", "accept_changed_data", "distributed")
TEXTS = ("<class 'str'>", "str | None")  # the types of settings that are taken as they are typed
WORDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
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
NANOGPT |= {f"init_from={name}": f"init_from=FOLDER, a folder that you fill by "
            f"hf download openai-community/{name} --local-dir FOLDER"
            for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
# How Python, the loader of libraries, and torch on a CPU and on a GPU put it.
TOO_LITTLE_MEMORY = re.compile(
    r"MemoryError|OutOfMemory|failed to map segment|bad_alloc|[Cc]annot allocate memory"
    r"|can't allocate memory|not enough memory|[Ss]ize calculation overflow|multiplication overflow")

ConfigStore.instance().store(name="schema", node=Config)


def start(main: Callable[[], object], help: Callable[[], str],
          check: Callable[[list[str]], list[str]] = list) -> None:
    """Run an entry point on the checked arguments.

    A user's mistake becomes one sentence and status 1, Ctrl-C status 130. An output that cannot
    show a character gets a question mark for it.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  where it was closed
    sys.stdout.reconfigure(errors="replace")
    # For the processes that this one starts, such as a sweep's jobs.
    os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:replace"
    try:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(help(), flush=True)
            return
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, for `sentence`
        sys.argv[1:] = check(sys.argv[1:])
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        output_closed()
    except OSError as e:
        if e.errno is None:
            raise
        if e.filename is None:  # of a stream: the disk under stdout is full
            discard_output()
        fail(f"{e.filename or 'the output'} cannot be read or written: {e.strerror}")
    except Exception as e:
        if is_memory_error(e):
            fail(f"there is too little memory ({first_line(e)}): free some, or ask for less, "
                 "such as a smaller model, batch or text")
        if not isinstance(e, UserError) and not raised_by_hydra(e):
            raise
        if getattr(e, "already_printed", False):
            sys.exit(1)
        fail(sentence(e))


class Terminal(Console):
    """A console that falls silent where its output is gone: under `| head` a run goes on."""

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


def printer(console: Console) -> Callable[[str], None]:
    """What prints a line as it is: without markup, and unbroken, so that it can be copied."""
    def say(line: str) -> None:
        try:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        except OSError:  # the disk of the log is full, or the terminal is gone
            console.on_broken_pipe()

    return say


def raised_by_hydra(error: Exception) -> bool:
    """Whether Hydra, or what it reads files with, refuses something; not what it runs."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].partition(".")[0] in ("hydra", "omegaconf", "yaml")


def fail(error: UserError | str) -> None:
    if rank() == 0:  # of all the processes that meet with the same mistake
        print(f"error: {error}", file=sys.stderr)
    give_up()


def output_closed() -> None:
    """Whoever read our output has seen enough."""
    discard_output()
    sys.exit(141)


def discard_output() -> None:
    """What stdout still holds is not tried again as Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def give_up() -> None:
    """End with status 1.

    One of several processes ends at once: the threads of a group that is left as it is can crash
    Python as it ends.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def rank() -> int:
    """This process's number among those that torchrun started; 0 where it did not."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def sentence(error: Exception) -> str:
    """What Hydra, OmegaConf and YAML say over several lines, in one."""
    first = first_line(error)
    mark = getattr(error, "problem_mark", None)
    if mark:
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    cause = error.__cause__ or error.__context__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        preset = re.match(r"In '(.+?)': ", first)
        return (f"{preset[1]}.yaml: " if preset else "") + sentence(cause)
    missing = re.search(r"Could not find '(.+)/(.+?)'", first)
    if missing and getattr(error, "options", None):
        return no_preset(missing[1], missing[2], error.options)
    key = getattr(error, "full_key", None)
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)):
        if key in ("experiment", "sweep"):
            return "its first line has to be # @package _global_"
        known = [name for name, _, _ in knobs(Config())]
        return f"{key} is not a setting{did_you_mean(key, known)}"
    wrong = re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", first)
    if key and wrong:
        return f"{key}={wrong[1]} is not {WORDS.get(wrong[2], wrong[2])}"
    return f"{key}: {first}" if key else first


def no_preset(group: str, name: str, known) -> str:
    return f"{group}={name} is not one of {', '.join(known)}{did_you_mean(name, known)}"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_memory_error(error: Exception) -> bool:
    """Whether something was refused for want of memory."""
    return bool(TOO_LITTLE_MEMORY.search(f"{type(error).__name__}: {error}"))


# --- train.py: Hydra composes; before it sees the arguments they are checked and texts quoted -----


def check_arguments(argv: list[str]) -> list[str]:
    """The arguments as Hydra takes them.

    Raises:
        UserError: an argument names no setting, or no preset, or cannot be read.
    """
    given = hydra_options(argv)
    types = {name: str(f.type) for name, f, _ in knobs(Config())}
    presets = groups(given.config_dir)
    checked = [check_argument(arg, types, presets, given.multirun) for arg in given.overrides]
    if given.multirun:
        check_sweep(checked)
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
    key, equals, value = arg.partition("=")
    name = key.lstrip("+~")
    if name.startswith(("hydra.", "hydra/")):
        return check_hydra_argument(arg)
    if key != name and name in types:
        raise UserError(f"{arg}: a setting is changed, not added or removed: write {name}=VALUE")
    if not equals:
        check_habit(Path(arg).name)
        hint = ", without spaces" if arg in types else did_you_mean(arg, types)
        raise UserError(f"{arg or 'an empty argument'} is not of the form key=value{hint}")
    if key in presets:
        check_choice(key, value, presets[key], sweep)
    elif key not in types:
        check_habit(arg)
        raise no_setting(key, [*types, *presets])
    elif value == "???":
        raise UserError(f"{arg}: ??? stands for a value that is missing, and cannot be one")
    elif not value and types[key] not in TEXTS:
        raise UserError(f"{arg} has no value: type {key}=VALUE")
    elif types[key] in TEXTS:
        if arg in NANOGPT and not Path(value).exists():
            check_habit(arg)
        return f"{key}={quote_texts(value, sweep)}"
    elif not sweep and "," in value:
        raise UserError(f"{arg} gives several values: add -m to run a sweep over them")
    return readable(arg)


def check_habit(arg: str) -> None:
    """Raise `UserError` for what is typed for nanoGPT, with what to type here."""
    here = NANOGPT.get(arg) or NANOGPT.get(arg.partition("=")[0].rpartition(".")[2])
    if here:
        raise UserError(f"{arg} is nanoGPT's; here it is {here}")


def no_setting(key: str, known, command: str = "python train.py") -> UserError:
    """The error for what names no setting of a command."""
    of = "" if command == "python train.py" else f" of {command.split()[-1]}"
    return UserError(f"{key} is not a setting{of}{did_you_mean(key.lstrip('+~'), known)}; "
                     f"{command} --help lists them")


def check_hydra_argument(arg: str) -> str:
    """A setting of Hydra's as it takes it; raises as `check_arguments`."""
    key, _, value = arg.partition("=")
    package = LAUNCHERS.get(value) if key == "hydra/launcher" else None
    if package and not any(distributions(name=package)):
        raise UserError(f"{arg} needs a package that is not installed: pip install {package}")
    if key == "hydra.sweep.dir" and not HYDRA_SYNTAX.fullmatch(value) and "${" not in value:
        return f"{key}={quote(expand_home(value))}"
    return readable(arg)


def readable(arg: str) -> str:
    """The argument, where Hydra can read it; raises as `check_arguments`."""
    try:
        OverridesParser.create().parse_override(arg)
    except HydraException:
        raise UserError(f"{arg} cannot be read: type {arg.partition('=')[0]}=VALUE, with every "
                        "bracket closed, and one comma between the values of a sweep") from None
    return arg


def check_sweep(checked: list[str]) -> None:
    """Raise `UserError` for what does not go with a sweep."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("a sweep does not go with torchrun, whose processes train one run: "
                        "start it by python train.py -m")
    for arg in checked:
        wrong = NOT_IN_A_SWEEP.get(arg.partition("=")[0]) or NOT_IN_A_SWEEP.get(arg.lower())
        if wrong:
            raise UserError(wrong)


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
    one = group == "sweep" or not sweep  # of all the jobs, whatever else is swept
    for choice in [value] if one else value.split(","):
        if choice in known:
            read_preset(known[choice])
        elif "," in choice and not sweep:
            raise UserError(f"{group}={value} gives several presets: add -m to run a sweep over "
                            "them")
        else:
            raise UserError(no_preset(group, choice, known))


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


def expand_home(path: str | None) -> str | None:
    """The path with its ~, which shells leave as it is behind an equals sign."""
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


# --- what a sweep asks of its arguments -----------------------------------------------------------


def typed_value(key: str, checked: list[str]):
    """The value that checked arguments give a key; None where they do not."""
    given = [arg for arg in checked if arg.partition("=")[0] == key]
    return OverridesParser.create().parse_override(given[-1]).value() if given else None


def typed(cfg, overrides: list[str]) -> dict[str, str]:
    """What a job was given, by key, as a user types it."""
    pairs = (override.partition("=")[::2] for override in overrides)
    return {key: value if key in groups() else _shown(OmegaConf.select(cfg, key))
            for key, value in pairs}


def own_config_dir(job) -> dict[str, str]:
    """The --config-dir that `job`, Hydra's configuration of a job, was given, by that name."""
    folders = [source.path.removeprefix("file://")
               for source in job.runtime.config_sources if source.provider == "command-line"]
    return {"--config-dir": folders[0]} if folders else {}


# --- the configuration ----------------------------------------------------------------------------


def to_config(cfg, overrides: list[str],
              hf_config: Callable[[Path], GPTConfig] | None = None) -> tuple[Config, bool]:
    """The checked configuration that Hydra composed, and whether it continues a run.

    A run that is resumed has the configuration it was started with, changed by what is typed now;
    an experiment that is typed stands for all its settings, as when the command that started the
    run is given again.

    Raises:
        UserError: a setting is wrong, or the run cannot be continued with it.
    """
    asked: Config = OmegaConf.to_object(cfg)
    asked = named_paths(asked)
    keys, notes = [o.partition("=")[0] for o in overrides], []
    if asked.init_from is not None:
        asked = adopt(asked, overrides, hf_config)
    elif "model.n_kv_head" not in keys:
        asked, notes = fit_kv_heads(asked)
    run = kept_config(asked)
    config = asked
    if run:
        config, notes = continued(run, absolute_paths(asked), keys)
    config.check()
    for note in notes:
        print(f"note: {note}")
    return config, run is not None


def kept_config(asked: Config) -> Config | None:
    """The configuration of the run to be continued, evaluated or planned; None for a new one.

    Raises:
        UserError: there is no such run.
    """
    planned = asked.dry_run is not False
    if asked.run_dir is None or not (asked.resume or asked.eval_only or planned):
        return None
    path = Path(asked.run_dir) / "config.yaml"
    if path.exists():
        return absolute_paths(read_config(path))
    if asked.resume is True or asked.eval_only:
        raise UserError(f"run_dir={asked.run_dir} holds no run, so there is nothing to continue: "
                        "leave resume=true out to start one there")
    return None


def continued(run: Config, asked: Config, keys: list[str]) -> tuple[Config, list[str]]:
    """A run's configuration, changed by the typed keys of `asked`, and notes for the user.

    Raises:
        UserError: something is changed that makes it another run.
    """
    config = run
    if "experiment" in keys:
        auto = {key: getattr(run, key) for key in ("device", "precision", "compile")
                if getattr(asked, key) == "auto"}
        config = replace(asked, **auto)
    for key in keys:
        if hasattr(config, key.partition(".")[0]):  # not an experiment
            config = with_value(config, key, attrgetter(key)(asked))
    if "data.val_windows" not in keys:  # a run keeps the windows that it began with
        config = with_value(config, "data.val_windows", run.data.val_windows)
    config = with_value(config, "model.vocab_size", config.model.vocab_size or run.model.vocab_size)
    config = replace(config, **{key: getattr(asked, key) for key in PER_COMMAND})
    now = {name: value for name, _, value in knobs(config)}
    changed = {name: value for name, _, value in knobs(run) if value != now[name]}
    wrong = [f"{name}: {value} in the run, {now[name]} asked for"
             for name, value in changed.items() if name.startswith(IMMUTABLE_ON_RESUME)]
    if wrong:
        raise UserError(f"run_dir={asked.run_dir} cannot continue with other settings "
                        f"({'; '.join(wrong)}): leave them as they are, or start a new run")
    return config, [f"{name} is {now[name]} from here on; it was {value}"
                    for name, value in changed.items()
                    if name in keys and name.startswith("optim.")]


def with_value(config: Config, key: str, value) -> Config:
    """The configuration with a setting, by its dotted key, or a whole section changed."""
    section, _, name = key.rpartition(".")
    if section:
        return replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return replace(config, **{name: value})


def fit_kv_heads(config: Config) -> tuple[Config, list[str]]:
    """A preset's n_kv_head lowered to one that divides n_head, and notes for the user."""
    heads, preset = config.model.n_head, config.model.n_kv_head
    if preset is None or preset < 1 or heads < 1 or heads % preset == 0:
        return config, []
    fitting = max(n for n in range(1, min(heads, preset) + 1) if heads % n == 0)
    return with_value(config, "model.n_kv_head", fitting), [
        f"model.n_kv_head is {fitting}, since the preset's {preset} does not divide "
        f"model.n_head={heads}"]


def adopt(asked: Config, overrides: list[str],
          hf_config: Callable[[Path], GPTConfig] | None) -> Config:
    """The configuration with the model and the tokenizer of the trained model that it starts from.

    `hf_config` reads the model's of a folder in Hugging Face's format; None where only the
    tokenizer matters.

    Raises:
        UserError: there is no such run, or other settings for them are typed.
    """
    folder, start = Path(asked.init_from), f"init_from={asked.init_from}"
    if is_hf(folder):
        model = hf_config(folder) if hf_config else asked.model
        tokenizer = TokenizerConfig(name="hf")
    else:
        source = read_config(folder / "config.yaml")
        model, tokenizer = source.model, source.tokenizer
    for arg in overrides:
        if arg.startswith("model.block_size="):
            if asked.model.block_size > model.block_size:
                raise UserError(f"{arg} is more than the {model.block_size} of {start}: lower it, "
                                "or leave it out")
            model = replace(model, block_size=asked.model.block_size)
        elif re.match(r"(model|tokenizer)[.=]", arg) and not arg.startswith("model.dropout="):
            raise UserError(f"{arg} does not go with {start}, which brings its model and its "
                            "tokenizer: leave it out")
    return replace(asked, model=replace(model, dropout=asked.model.dropout), tokenizer=tokenizer)


# --- help -----------------------------------------------------------------------------------------


def train_help() -> str:
    """The text of `python train.py --help`."""
    lines = ["""Train a small GPT, and watch its attention form.

  python train.py                              Python's own library, 3 minutes
  python train.py data=text data.path=notes/   your text: file, folder or glob
  python train.py data=shakespeare tokenizer=char
  python train.py experiment=nanogpt_cpu       a preset for a whole run
  python train.py model.n_layer=6 optim.lr=3e-4
  python train.py run_dir=runs/X resume=true   go on with a run that was stopped
  python train.py run_dir=runs/X eval_only=true
  python train.py -m model.n_kv_head=1,2,4     a sweep: a run for each value
  python train.py -m sweep=kv_heads            a sweep that is prepared
  python train.py --cfg job                    print the configuration and end
  python train.py --config-dir DIR experiment=mine   DIR/experiment/mine.yaml

Presets: GROUP=PRESET takes a file of configs/GROUP. A preset that is typed
replaces the one that the experiment chose; what the experiment sets itself wins
over presets; KEY=VALUE wins over all.
"""]
    for group, presets in groups().items():
        lines.append(textwrap.fill(", ".join(presets), 79, initial_indent=f"  {group:<12} ",
                                   subsequent_indent=" " * 15))
    lines.append("\nSettings (KEY=VALUE), with their defaults before any preset:")
    lines += _knob_lines(Config())
    return "\n".join(lines)


def _knob_lines(config) -> list[str]:
    width = max(72, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines, section = [], ""
    for name, f, default in knobs(config):
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines.append("")
        choices = f.metadata.get("choices")
        words = f.metadata["help"]
        if choices:
            words += f" ({' | '.join(map(_shown, choices))})"
        lines.append(textwrap.fill(words, width, break_on_hyphens=False,
                                   initial_indent=f"  {name + '=' + _shown(default):<30} ",
                                   subsequent_indent=" " * 33))
    return lines


def _shown(value) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- sample.py: the same key=value arguments, without presets -------------------------------------


def sample_config(argv: list[str]) -> SampleConfig:
    return read_settings(argv, SampleConfig, "python sample.py")


def read_settings(argv: list[str], kind: type, command: str):
    """The checked settings of a command, as the dataclass `kind`.

    Raises:
        UserError: an argument names no setting, or its value is wrong.
    """
    known = {f.name: f for f in fields(kind)}
    values, texts = OmegaConf.structured(kind), {}
    for arg in argv:
        key, equals, value = arg.partition("=")
        if not equals:
            prompt = "; a prompt is prompt=TEXT" if "prompt" in known else ""
            hint = did_you_mean(arg.lstrip("-"), known) or prompt
            raise UserError(f"{arg or 'an empty argument'} is not of the form key=value{hint}")
        if key not in known:
            check_habit(arg.lstrip("-"))
            raise no_setting(key, known, command)
        if key == "stop":
            texts[key] = [*texts.get(key, []), unescape(value)]
        elif value == "null" and "None" in str(known[key].type):
            values[key] = None
        elif "str" in str(known[key].type):
            texts[key] = value  # as it was typed: nothing reads a meaning into it
        else:
            values[key] = value
    config = replace(OmegaConf.to_object(values), **texts)
    config.check()
    return config


def unescape(stop: str) -> str:
    """A stop string as it is meant: a shell makes line ends hard to type.

    Raises:
        UserError: a backslash stands before anything else than n, t or a backslash.
    """
    if re.search(r"\\(?![nt\\])", re.sub(r"\\\\", "", stop)):
        raise UserError(f"stop={stop} has a backslash that means nothing: write \\n for a line "
                        "end, \\t for a tab, \\\\ for a backslash")
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), stop)


def sample_help() -> str:
    """The text of `python sample.py --help`."""
    return settings_help("""Text from a trained run: alone on stdout, everything else on stderr.

  python sample.py                             from the newest run
  python sample.py run_dir=runs/X prompt="def main():" temperature=0.7 top_k=50
  echo "import os" | python sample.py prompt=-
  python sample.py prompts=many.jsonl num_samples=4 json=true
  python sample.py interactive=true stop="\\n\\n"
  python sample.py score=FILE                  how surprised the model is by it
  python sample.py init_from=FOLDER            a model of Hugging Face's format""", SampleConfig)


def settings_help(text: str, kind: type) -> str:
    knob_lines = _knob_lines(kind())
    return "\n".join([text, "\nSettings (KEY=VALUE), with their defaults:", *knob_lines])
