"""The fence around Hydra: what is typed becomes a checked configuration. Does not import torch."""

from cli.arguments import CONFIGS, check_arguments, groups, hydra_options
from cli.command import (
    Terminal,
    explained,
    fail,
    first_line,
    is_memory_error,
    printer,
    rank,
    run,
    sentence,
    start,
    waiting,
)
from cli.compose import answer_early, composed, to_config
from cli.settings import read_settings, sample_config, sample_help, settings_help
