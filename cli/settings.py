"""The settings of a command without Hydra, and the help of all commands."""

import re
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from omegaconf import OmegaConf

from cli.arguments import groups, is_nanogpts, no_setting
from common.settings import format_value, iterate_settings
from config import Config, SampleConfig


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
    presets = [
        f"  {f'{group}={name}':<32} {headline(path)}"
        for group, found in groups().items()
        for name, path in found.items()
    ]
    return settings_help("\n".join([told("train.txt"), "", *presets]), lambda: plain)


def headline(path: Path) -> str:
    """What a preset is, from the first comment in its file that is no command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line[2:] for line in lines if re.match("# (?!@|python |torchrun )", line)), "")


def sample_help() -> str:
    """The text of `python sample.py --help`."""
    return settings_help(told("sample.txt"), SampleConfig)


def told(name: str) -> str:
    """What a command is for, and how it is used."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").rstrip("\n")


def settings_help(text: str, kind: Callable[[], object]) -> str:
    """A text, and below it the settings that `kind` makes, with their values."""
    width = max(72, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines, section = [text, "\nSettings (KEY=VALUE):"], None
    for name, f, default in iterate_settings(kind()):
        if name.rpartition(".")[0] != section:
            section = name.rpartition(".")[0]
            lines.append("")
        words = f.metadata["help"]
        if choices := f.metadata.get("choices"):
            words += f" ({' | '.join(map(format_value, choices))})"
        lines.append(
            textwrap.fill(
                words,
                width,
                break_on_hyphens=False,
                initial_indent=f"  {name + '=' + format_value(default):<30} ",
                subsequent_indent=" " * 33,
            )
        )
    return "\n".join(lines)
