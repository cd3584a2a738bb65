"""What is typed, checked and turned into a configuration. Does not import torch."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from importlib.metadata import distributions
from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config import Config, SampleConfig, TokenizerConfig, UserError, did_you_mean, escaped, is_hf, knobs, read_config

CONFIGS = Path(__file__).parent / "configs"
# Hydra's options that go with train.py, and the words that follow them (None: any).
FLAGS = {"-m": (), "--multirun": (), "--resolve": (), "--hydra-help": (), "--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all"),
         "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"), "--package": None, "-p": None,
         "--config-dir": None, "-cd": None}
# A sweep's alternatives stand between commas; what is quoted or calls a function of Hydra's is left to Hydra.
CHOICES = re.compile(r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\([^)]*\)|[^,])+""")
HYDRA_SYNTAX = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:choice|glob)\(.*\)""")
# A run that continues keeps these; anything else may be changed on the way.
FIXED = ("model.", "tokenizer.", "seed", "batch_size", "optim.name", "init_from")
SETTLED = ("device", "precision", "compile")
LAUNCHERS = {"joblib": "hydra-joblib-launcher", "submitit_local": "hydra-submitit-launcher", "submitit_slurm": "hydra-submitit-launcher"}


ConfigStore.instance().store(name="schema", node=Config)


def start(main: Callable[[], object], help: Callable[[], str], check: Callable[[list[str]], list[str]] = list) -> None:
    """Run an entry point on the checked arguments: a user's mistake becomes one sentence and status 1, Ctrl-C status 130."""
    try:
        if {"-h", "--help"} & set(sys.argv[1:]):
            print(help(), flush=True)
            return
        os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise what goes wrong, so that it is told here
        sys.argv[1:] = check(sys.argv[1:])
        main()
    except (UserError, OmegaConfBaseException) as e:
        if getattr(e, "said", False):
            sys.exit(1)
        fail(sentence(e))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        output_closed()
    except Exception as e:
        if type(e).__module__.partition(".")[0] != "hydra":
            raise
        fail(sentence(e.__cause__ if isinstance(e.__cause__, OmegaConfBaseException) else e))


def fail(error: UserError | str) -> None:
    if rank() == 0:  # of all the processes that meet with the same mistake
        print(f"error: {error}", file=sys.stderr)
    give_up()


def output_closed() -> None:
    """Whoever read our output has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def give_up() -> None:
    """End with status 1; one of several processes at once, since the threads of a group that is left as it is can crash Python as it ends."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def rank() -> int:
    """This process's number among those that torchrun started; 0 where it did not."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def sentence(error: Exception) -> str:
    """What Hydra and OmegaConf say over several lines, in one."""
    key = getattr(error, "full_key", None)
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    wrong = re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", first)
    if key and wrong:
        return f"{key}={wrong[1]} is not {({'Integer': 'a whole number', 'Float': 'a number', 'Boolean': 'true or false'}).get(wrong[2], wrong[2])}"
    return f"{key}: {first}" if key else first


# --- train.py: Hydra composes; before it sees the arguments they are checked and their texts quoted ---------------


def check_arguments(argv: list[str]) -> list[str]:
    """The arguments as Hydra takes them.

    Raises:
        UserError: an argument names no knob, or no preset.
    """
    types = {name: str(f.type) for name, f, _ in knobs(Config())}
    sweep = bool({"-m", "--multirun"} & set(argv))
    flags, checked, rest = [], [], list(argv)
    while rest:
        arg = rest.pop(0)
        key, equals, value = arg.partition("=")
        if arg.startswith("-"):
            flags.append(arg)
            if key not in FLAGS:
                raise UserError(f"{arg} is not an option; a setting has no dashes: {key.lstrip('-')}=VALUE")
            if sweep and key in ("--cfg", "-c", "--info"):
                raise UserError(f"{key} is about one run's configuration: leave -m out, and give each setting one value")
            if FLAGS[key] != () and not equals:
                flags.append(rest.pop(0) if rest else "")
            if FLAGS[key] and (value or flags[-1]) not in FLAGS[key]:
                raise UserError(f"{key} takes one of {', '.join(FLAGS[key])}, not {value or flags[-1] or 'nothing'}")
            continue
        if key.lstrip("+~").startswith(("hydra.", "hydra/")):
            if key == "hydra/launcher" and value in LAUNCHERS and not any(distributions(name=LAUNCHERS[value])):
                raise UserError(f"{arg} needs a package that is not installed: pip install {LAUNCHERS[value]}")
            if key == "hydra.sweep.dir" and not re.fullmatch(r"[\w./+-]*", value) and not HYDRA_SYNTAX.fullmatch(value) and "${" not in value:
                arg = f"{key}={quote(value)}"
            checked.append(arg)
            continue
        if key[:1] in ("+", "~") and key.lstrip("+~") in types:
            raise UserError(f"{arg}: a setting is changed, not added or removed: write {key.lstrip('+~')}=VALUE")
        if not equals:
            hint = ", without spaces" if arg in types else did_you_mean(arg, types)
            raise UserError(f"{arg or 'an empty argument'} is not of the form key=value{hint}")
        if key in groups():
            check_choice(key, value, sweep)
        elif key not in types:
            raise UserError(f"{key} is not a setting{did_you_mean(key.lstrip('+~'), [*types, *groups()])}; python train.py --help lists them")
        elif value == "???":
            raise UserError(f"{arg}: ??? stands for a value that is missing, and cannot be one")
        elif "str" in types[key] and "bool" not in types[key]:
            choices = CHOICES.findall(value) if sweep else [value]
            value = ",".join(c if c == "null" or (sweep and HYDRA_SYNTAX.fullmatch(c)) else quote(c) for c in choices)
        elif not sweep and "," in value:
            raise UserError(f"{arg} gives several values: add -m to run a sweep over them")
        checked.append(f"{key}={value}")
    if sweep:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise UserError("a sweep does not go with torchrun, whose processes train one run: start it by python train.py -m")
        if any(arg.startswith("run_dir=") for arg in checked):
            raise UserError("run_dir= does not go with a sweep, whose jobs have a folder each: name the sweep's folder with hydra.sweep.dir=PATH")
        if any(arg.startswith("dry_run=") for arg in checked):
            raise UserError("dry_run= plans one run and does not go with a sweep: leave -m out")
        if any(arg in ("resume=true", "resume=True") for arg in checked):
            raise UserError("resume=true is for one run: with resume=auto a sweep runs the jobs that are missing or not finished")
    return flags + checked


def typed_value(key: str, checked: list[str]):
    """The value that checked arguments give a key; None where they do not."""
    given = [arg for arg in checked if arg.partition("=")[0] == key]
    return OverridesParser.create().parse_override(given[-1]).value() if given else None


def constant(checked: list[str]) -> list[str]:
    """The keys to which a sweep's checked arguments, and the preset that they choose, give one value for all jobs."""
    arguments, preset = {arg.partition("=")[0]: arg for arg in checked if not arg.startswith(("-", "hydra"))}, typed_value("sweep", checked)
    if preset:
        params = yaml.safe_load((CONFIGS / "sweep" / f"{preset}.yaml").read_text(encoding="utf-8"))["hydra"]["sweeper"]["params"]
        arguments = {key: f"{key}={value}" for key, value in params.items()} | arguments
    return [key for key, arg in arguments.items() if not OverridesParser.create().parse_override(arg).is_sweep_override()]


def typed(cfg, overrides: list[str]) -> dict[str, str]:
    """What a job was given, by key, as a user types it."""
    pairs = (o.partition("=")[::2] for o in overrides)
    return {key: value if key in groups() else _shown(OmegaConf.select(cfg, key)) for key, value in pairs}


def groups() -> dict[str, list[str]]:
    """The groups of presets: name → presets."""
    return {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in sorted(CONFIGS.iterdir()) if folder.is_dir()}


def check_choice(group: str, value: str, sweep: bool) -> None:
    known = groups()[group]
    if group == "sweep" and not sweep:
        raise UserError(f"sweep={value} is a sweep: add -m")
    if group == "sweep" and value not in known:  # one, whatever else is swept
        raise UserError(f"sweep={value} is not one of {', '.join(known)}{did_you_mean(value, known)}")
    if sweep and "(" in value:  # glob(*), choice(…): Hydra's to expand
        return
    for choice in value.split(",") if sweep else [value]:
        if choice not in known and "," in choice:
            raise UserError(f"{group}={value} gives several presets: add -m to run a sweep over them")
        if choice not in known:
            raise UserError(f"{group}={choice} is not one of {', '.join(known)}{did_you_mean(choice, known)}")


def quote(text: str) -> str:
    """A text as Hydra's grammar and OmegaConf's interpolation give it back unchanged."""
    # Backslashes count only where they stand before a quote or the text's end.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + (r"\'" if m[2] else ""), escaped(text)) + "'"


def to_config(cfg, overrides: list[str]) -> tuple[Config, bool]:
    """The checked configuration that Hydra composed, and whether it continues a run.

    A run that is resumed has the configuration it was started with, changed by what is typed now; an experiment that is
    typed stands for all its settings, as when the command that started the run is given again.

    Raises:
        UserError: a setting is wrong, or the run cannot be continued with it.
    """
    asked: Config = OmegaConf.to_object(cfg)
    if asked.init_from is not None:
        adopt(asked, overrides)
    if not (asked.resume or asked.eval_only) or asked.run_dir is None:
        asked.check()
        return asked, False
    kept = Path(asked.run_dir) / "config.yaml"
    if not kept.exists():
        if asked.resume == "auto" and not asked.eval_only:
            asked.check()
            return asked, False
        raise UserError(f"run_dir={asked.run_dir} holds no run, so there is nothing to continue: leave resume=true out to start one there")
    run = read_config(kept)
    config = deepcopy(run)
    typed = [o.partition("=")[0] for o in overrides]
    if "experiment" in typed:
        config = asked
        for key in SETTLED:
            if getattr(config, key) == "auto":
                setattr(config, key, getattr(run, key))
    for key in typed:
        section, _, name = key.rpartition(".")
        if hasattr(config, key.partition(".")[0]):  # a setting, or a preset that fills a whole section
            setattr(getattr(config, section) if section else config, name,
                    getattr(getattr(asked, section) if section else asked, name))
    config.model.vocab_size = config.model.vocab_size or run.model.vocab_size
    if "data.val_windows" not in typed:  # a run keeps those it began with
        config.data.val_windows = run.data.val_windows
    for key in ("run_dir", "resume", "eval_only", "dry_run", "accept_changed_data", "distributed"):  # said each time
        setattr(config, key, getattr(asked, key))
    now = {name: value for name, _, value in knobs(config)}
    changed = [f"{name}: {value} in the run, {now[name]} asked for" for name, _, value in knobs(run)
               if name.startswith(FIXED) and value != now[name]]
    if changed:
        raise UserError(f"run_dir={asked.run_dir} cannot continue with other settings ({'; '.join(changed)}): "
                        "leave them as they are, or start a new run")
    config.check()
    for name, _, value in knobs(run):
        if name in typed and value != now[name] and name.startswith("optim."):
            print(f"note: {name} is {now[name]} from here on; it was {value}")
    return config, True


def adopt(asked: Config, overrides: list[str]) -> None:
    """Give a run that starts from a trained model that model's settings and its tokenizer's.

    Raises:
        UserError: there is no such run, or other settings for them are typed.
    """
    folder = Path(asked.init_from)
    if is_hf(folder):
        from interop import model_config  # which imports torch

        model, tokenizer = model_config(folder), TokenizerConfig(name="hf")
    else:
        source = read_config(folder / "config.yaml")
        model, tokenizer = source.model, source.tokenizer
    for typed in overrides:
        if typed.partition("=")[0].partition(".")[0] in ("model", "tokenizer") and not typed.startswith(("model.dropout=", "model.block_size=")):
            raise UserError(f"{typed} does not go with init_from={asked.init_from}, which brings its model and its tokenizer: leave it out")
        if typed.startswith("model.block_size="):
            if asked.model.block_size > model.block_size:
                raise UserError(f"{typed} is more than the {model.block_size} of init_from={asked.init_from}: lower it, or leave it out")
            model = replace(model, block_size=asked.model.block_size)
    asked.model, asked.tokenizer = replace(model, dropout=asked.model.dropout), tokenizer


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

Presets: GROUP=PRESET takes a file of configs/GROUP. A preset that is typed
replaces the one that the experiment chose; what the experiment sets itself wins
over presets; KEY=VALUE wins over all.
"""]
    for group, presets in groups().items():
        lines.append(textwrap.fill(", ".join(presets), 79, initial_indent=f"  {group:<12} ", subsequent_indent=" " * 15))
    lines.append("\nSettings (KEY=VALUE), with their defaults before any preset:")
    lines += _knob_lines(Config())
    return "\n".join(lines)


def _knob_lines(config) -> list[str]:
    width, lines, section = max(72, min(120, shutil.get_terminal_size((100, 24)).columns)), [], ""
    for name, f, default in knobs(config):
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines.append("")
        choices = f.metadata.get("choices")
        words = f.metadata["help"] + (f" ({' | '.join(_shown(c) for c in choices)})" if choices else "")
        lines.append(textwrap.fill(words, width, break_on_hyphens=False, subsequent_indent=" " * 33,
                                   initial_indent=f"  {name + '=' + _shown(default):<30} "))
    return lines


def _shown(value) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- sample.py: the same key=value arguments, without presets ------------------------------------------------------


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
            hint = did_you_mean(arg.lstrip("-"), known) or ("; a prompt is prompt=TEXT" if "prompt" in known else "")
            raise UserError(f"{arg or 'an empty argument'} is not of the form key=value{hint}")
        if key not in known:
            raise UserError(f"{key} is not a setting of {command.split()[-1]}{did_you_mean(key, known)}; {command} --help lists them")
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
    wrong = re.search(r"\\(?![nt\\])", re.sub(r"\\\\", "", stop))
    if wrong:
        raise UserError(f"stop={stop} has a backslash that means nothing: write \\n for a line end, \\t for a tab, \\\\ for a backslash")
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), stop)


def sample_help() -> str:
    """The text of `python sample.py --help`."""
    return settings_help("""Generate text from a trained run: the text on stdout, everything else on stderr.

  python sample.py                             from the newest run
  python sample.py run_dir=runs/X prompt="def main():" temperature=0.7 top_k=50
  echo "import os" | python sample.py prompt=-
  python sample.py prompts=many.jsonl num_samples=4 json=true
  python sample.py interactive=true stop="\\n\\n"
  python sample.py score=FILE                  how surprised the model is by it
  python sample.py init_from=FOLDER            a model of Hugging Face's format""", SampleConfig)


def settings_help(text: str, kind: type) -> str:
    return "\n".join([text, "\nSettings (KEY=VALUE), with their defaults:", *_knob_lines(kind())])
