"""Turn a command line into a checked configuration.

Does not import torch.
"""

from cli.command_line import CommandLine
from cli.help import read_settings, settings_help
from cli.job import Job, compose_job, compose_settings, configure, read_job, read_request
