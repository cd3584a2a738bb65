"""Format the help of all commands."""

import re
import shutil
import textwrap
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path

from cli.command_line import PRESETS, Presets
from common.errors import UserError, did_you_mean
from common.settings import describe_condition, format_value, iterate_settings
from common.text import join_words
from config import Config

MIN_HELP_WIDTH, MAX_HELP_WIDTH = 72, 120  # characters of a line of --help
DESCRIPTION_COLUMN = 36  # where the description of a preset or a setting begins
PRESET_COLUMN = 14  # where the names of presets begin in a summary
SUMMARIZED_SETTINGS = (
    *("max_steps", "batch_size", "optim.lr", "model.n_layer", "model.n_head", "model.n_embd"),
    *("model.block_size", "tokenizer.vocab_size", "seed"),
)


def train_help(config: Config, presets: Presets, topic: str) -> str:
    """Return what `python train.py --help [SECTION | all]` prints, with the plain command's values.

    Raises:
        UserError: There is no such section.
    """
    if not topic:
        return _train_summary(config, presets)
    sections = {
        group: {f"{group}={name}": headline(path) for name, path in paths.items()}
        for group, paths in presets.items()
    }
    for section, settings in _describe_by_section(config).items():
        sections.setdefault(section, {}).update(settings)
    if topic == "all":
        return "\n\n".join(map(_format_entries, sections.values()))
    if topic not in sections:
        known = ["all", *sections]
        raise UserError(
            f"--help {topic} is not one of {', '.join(known)}{did_you_mean(topic, known)}"
        )
    return _format_entries(sections[topic])


def _train_summary(config: Config, presets: Presets) -> str:
    settings = {name: (field.metadata["help"], v) for name, field, v in iterate_settings(config)}
    lines = [_introduction("train"), "\nThe settings that are changed most (KEY=VALUE):"]
    for name in SUMMARIZED_SETTINGS:
        description, value = settings[name]
        lines.append(_format_entry(f"{name}={format_value(value)}", description))
    lines.append("\nPresets (GROUP=NAME):")
    for group, paths in presets.items():
        lines.append(_format_entry(f"{group}=", " ".join(paths), PRESET_COLUMN))
    return "\n".join(lines)


def headline(path: Path) -> str:
    """Return the first comment of a preset that is not a command or a directive of Hydra's."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comments = (line[2:] for line in lines if re.match("# (?!@|python |torchrun )", line))
    return next(comments, "(its file has no comment)")


def _introduction(name: str) -> str:
    return Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")


def settings_help(name: str, defaults: object) -> str:
    """Return the help of a command, whose introduction is NAME.txt, for the terminal's width."""
    sections = map(_format_entries, _describe_by_section(defaults).values())
    return "\n\n".join([_introduction(name), "Settings (KEY=VALUE):", *sections])


def _describe_by_section(defaults: object) -> dict[str, dict[str, str]]:
    """Return by section the description of each setting, as it is typed with its default."""
    sections: dict[str, dict[str, str]] = {}
    for name, field, default in iterate_settings(defaults):
        if name in PRESETS:  # experiment, whose presets are listed
            continue
        description = field.metadata["help"]
        if choices := field.metadata.get("choices"):
            description += f" ({' | '.join(map(format_value, choices))})"
        if conditions := field.metadata.get("only_with"):
            described = starmap(describe_condition, conditions.items())
            description += f"; only with {join_words(described)}"
        section = sections.setdefault(name.rpartition(".")[0] or "run", {})
        section[f"{name}={format_value(default)}"] = description
    return sections


def _format_entries(descriptions: Mapping[str, str]) -> str:
    return "\n".join(starmap(_format_entry, descriptions.items()))


def _format_entry(name: str, description: str, column: int = DESCRIPTION_COLUMN) -> str:
    columns = shutil.get_terminal_size((100, 24)).columns
    return textwrap.fill(
        description,
        max(MIN_HELP_WIDTH, min(MAX_HELP_WIDTH, columns)),
        break_on_hyphens=False,
        initial_indent=f"  {name:<{column - 3}} ",
        subsequent_indent=" " * column,
    )
