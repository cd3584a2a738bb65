"""The settings of a command without Hydra, and the help of all commands."""

import re
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from omegaconf import OmegaConf

from cli.arguments import groups, is_nanogpts, no_setting
from config import Config, SampleConfig, settings, shown


def read_settings(argv: list[str], kind: type, command: str):
    """The checked settings of a command, as the dataclass `kind`."""
    known = {f.name: str(f.type) for f in fields(kind)}
    values, texts = OmegaConf.structured(kind), {}
    for arg in argv:
        key, equals, value = arg.partition("=")
        if not equals or key not in known or is_nanogpts(arg):
            raise no_setting(arg, known, command)
        if value == "null" and "None" in known[key]:
            values[key] = None
        elif "str" in known[key]:
            texts[key] = value  # as it was typed: nothing reads a meaning into it
        else:
            values[key] = value
    config = replace(OmegaConf.to_object(values), **texts)
    config.check()
    return config


def train_help(plain: Config) -> str:
    """The text of `python train.py --help`; `plain` is the configuration where nothing is typed."""
    text = """Train a small GPT, and watch its attention form.

  python train.py                              Python's own library, in minutes
  python train.py data=text data.path=notes/   your text: file, folder or glob
  python train.py experiment=nanogpt_cpu       a preset for a whole run
  python train.py model.n_layer=6 optim.lr=4e-3   single settings
  python train.py run_dir=runs/X resume=true   go on with a run that was stopped
  python train.py -m model.n_kv_head=1,2,4     a sweep: a run for each value
  python train.py --cfg job                    print the configuration and end
  python train.py --config-dir DIR experiment=mine   DIR/experiment/mine.yaml

Presets: GROUP=PRESET takes a file of configs/GROUP. A preset that is typed
replaces the one that the experiment chose; what the experiment sets itself wins
over presets; KEY=VALUE wins over all.
"""
    presets = [f"  {f'{group}={name}':<32} {headline(path)}"
               for group, found in groups().items() for name, path in found.items()]
    return settings_help("\n".join([text, *presets]), lambda: plain)


def headline(path: Path) -> str:
    """What a preset is, from the first comment in its file that is no command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line[2:] for line in lines if re.match("# (?!@|python |torchrun )", line)), "")


def sample_help() -> str:
    """The text of `python sample.py --help`."""
    return settings_help("""Text from a trained run: alone on stdout, everything else on stderr.

  python sample.py                             from the newest run
  python sample.py run_dir=runs/X prompt="def main():" temperature=0.7 top_k=50
  echo "import os" | python sample.py prompt=-
  python sample.py score=FILE                  how unexpected it is to the model
  python sample.py init_from=FOLDER            a model of Hugging Face's format""", SampleConfig)


def settings_help(text: str, kind: Callable[[], object]) -> str:
    """A text, and below it the settings that `kind` makes, with their values."""
    width = max(72, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines, section = [text, "\nSettings (KEY=VALUE):"], None
    for name, f, default in settings(kind()):
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines.append("")
        words = f.metadata["help"]
        if choices := f.metadata.get("choices"):
            words += f" ({' | '.join(map(shown, choices))})"
        lines.append(textwrap.fill(words, width, break_on_hyphens=False,
                                   initial_indent=f"  {name + '=' + shown(default):<30} ",
                                   subsequent_indent=" " * 33))
    return "\n".join(lines)
