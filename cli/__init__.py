"""Turn a command line into a checked configuration.

Does not import torch.
"""

import cli.folders  # registers the resolvers that configs/config.yaml names
from cli.command_line import CONFIGS, read_settings
from cli.help import settings_help
from cli.job import (
    Job,
    checked_runs,
    compose_job,
    configure,
    hydra_command,
    make_job,
    makes_no_run,
    read_job,
)
