"""Launch train.py: answer help, Hydra's options and mistakes before torch is imported."""

import sys
from collections.abc import Callable, Sequence

import hydra
from omegaconf import DictConfig

from cli.arguments import CommandLine, parse_command_line
from cli.compose import Job, compose_job, configure
from cli.presets import CONFIGS
from cli.settings import train_help
from common.errors import UserError
from common.paths import require_path
from common.signals import exit_on_stop_signals
from common.terminal import Terminal, printer, run_main
from common.torchrun import process_rank


def read_request() -> CommandLine | Job:
    """Read the command line before torch is imported, which takes seconds.

    Prints the help or what Hydra is asked for and exits, or exits with status 1 after one sentence
    about a mistake.

    Returns:
        The run to train, or the command line of a sweep, whose jobs Hydra composes.
    """
    request = run_main(_parse_and_check, lambda: train_help(compose_job([]).config))
    exit_on_stop_signals()
    if process_rank() == 0:
        printer(Terminal())("loading PyTorch …")
    return request


def _parse_and_check() -> CommandLine | Job:
    command_line = parse_command_line(sys.argv[1:])
    if command_line.is_for_hydra:
        run_hydra(lambda cfg: None, command_line.arguments)  # which calls no job
        sys.exit()
    return command_line if command_line.is_sweep else _compose_and_check(command_line)


def read_job(arguments: Sequence[str]) -> Job:
    """Return the run that these arguments of train.py describe.

    Raises:
        UserError: If they are not valid, or ask for something else than one run.
    """
    command_line = parse_command_line(list(arguments))
    if command_line.is_sweep or command_line.is_for_hydra:
        raise UserError(f"{command_line.options[0]} does not describe a single run: leave it out")
    return _compose_and_check(command_line)


def _compose_and_check(command_line: CommandLine) -> Job:
    """Compose a run and refuse a configuration that cannot work.

    With torchrun, only rank 0 looks at folders: the others could see what rank 0 has begun there.
    """
    job = compose_job(command_line.settings, command_line.config_dir)
    if process_rank() == 0 or job.config.distributed == "none":
        config = configure(job, log=lambda note: None)
        if config.data.path:
            require_path(config.data.path)
    return job


def run_hydra(task: Callable[[DictConfig], object], arguments: list[str]) -> None:
    """Have Hydra print what an option such as --cfg asks for, or call `task` for each job."""
    sys.argv[1:] = arguments
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")(task)()
