"""The fence around Hydra: what is typed becomes a checked configuration. Does not import torch."""

from cli.arguments import (
    CONFIGS,
    LAUNCHERS,
    check_arguments,
    groups,
    hydra_options,
    quote,
    read_preset,
    typed_value,
)
from cli.command import Terminal, fail, give_up, output_closed, printer, rank, start
from cli.compose import continued, fit_kv_heads, own_config_dir, to_config, typed
from cli.errors import first_line, is_memory_error, sentence
from cli.settings import (
    read_settings,
    sample_config,
    sample_help,
    settings_help,
    train_help,
)

__all__ = [
    "CONFIGS",
    "LAUNCHERS",
    "Terminal",
    "check_arguments",
    "continued",
    "fail",
    "first_line",
    "fit_kv_heads",
    "give_up",
    "groups",
    "hydra_options",
    "is_memory_error",
    "output_closed",
    "own_config_dir",
    "printer",
    "quote",
    "rank",
    "read_preset",
    "read_settings",
    "sample_config",
    "sample_help",
    "sentence",
    "settings_help",
    "start",
    "to_config",
    "train_help",
    "typed",
    "typed_value",
]
