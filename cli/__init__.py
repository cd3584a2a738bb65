"""Turn a command line into a checked configuration.

Does not import torch.
"""

from cli.arguments import CommandLine, parse_command_line
from cli.compose import Job, compose_job, compose_settings, configure
from cli.launch import read_job, read_request, run_hydra
from cli.presets import find_presets
from cli.settings import explore_help, read_settings, sample_help, settings_help
