"""The fence around Hydra: what is typed becomes a checked configuration. Does not import torch."""

from cli.arguments import groups, hydra_options
from cli.command import Terminal, first_line, printer, rank, run, sentence, start, tell
from cli.compose import answer_early, composed, to_config
from cli.settings import read_settings, sample_help, settings_help
