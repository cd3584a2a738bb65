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
from cli.command import (
    Terminal,
    fail,
    first_line,
    give_up,
    is_memory_error,
    output_closed,
    printer,
    rank,
    sentence,
    start,
)
from cli.compose import continued, fit_kv_heads, own_config_dir, to_config, typed
from cli.settings import read_settings, sample_config, sample_help, settings_help, train_help
