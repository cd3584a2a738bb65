"""The environment variables by which W&B gives a process the settings of one run.

Does not import torch or W&B.
"""

import os
import sys
from pathlib import Path

import yaml

from common.errors import UserError
from config import Config

# Variables that name one run. W&B ignores WANDB_RESUME, because a run is always started to resume.
ONE_RUN = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_FORK_FROM", "WANDB_RESUME_FROM")


def refuse_in_sweep() -> None:
    """Raise `UserError` if a variable would give all jobs of a sweep the same W&B run or name."""
    for variable in ONE_RUN:
        if os.environ.get(variable):
            raise UserError(f"{variable} is for one run, but a sweep has several: unset it")


def read_agent_choices(config: Config) -> dict[str, str]:
    """Return the values that a W&B sweep agent chose for this run; {} without one.

    W&B writes them into its record, whatever the run's settings are. The agent passes them as
    arguments by `${args_no_hyphens}`, and always as the file that WANDB_SWEEP_PARAM_PATH names. A
    Python function that has opened the agent's run decides itself how to use the values.
    """
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    is_recorded = "disabled" not in (config.wandb.mode, os.environ.get("WANDB_MODE"))
    is_training = not (config.prepare_only or config.eval_only or config.dry_run)
    is_function = getattr(sys.modules.get("wandb"), "run", None) is not None
    if not path or not is_recorded or not is_training or is_function:
        return {}
    chosen = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    chosen.pop("wandb_version", None)
    return {key: str(entry["value"]) for key, entry in chosen.items()}
