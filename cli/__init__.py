"""Turn a command line into a checked configuration, and print to the terminal.

Does not import torch.
"""

from cli.arguments import CommandLine, parse_command_line
from cli.compose import Job, compose_job, compose_settings, configure
from cli.launch import read_job, read_request, run_hydra
from cli.presets import find_presets
from cli.settings import explore_help, read_settings, sample_help, settings_help
from common.terminal import (
    Terminal,
    error_reason,
    error_sentence,
    explain_error,
    failure_note,
    first_line,
    is_out_of_processes,
    is_terminal,
    print_stderr,
    printer,
    process_rank,
    run,
    start,
    tolerate_errors,
)
