"""The environment variables by which W&B gives a process the settings of one run.

Does not import torch or W&B.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from cli.command_line import quote
from common.errors import UserError
from common.settings import convert_value, iterate_settings, show_value
from config import Config

# Variables that name one run. W&B ignores WANDB_RESUME, because a run is always started to resume.
ONE_RUN = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_FORK_FROM", "WANDB_RESUME_FROM")


# The folders of this process's runs, by the variables and values that named them.
_claimed: dict[tuple[str, str | None], Path] = {}


def refuse_in_sweep() -> None:
    """Raise `UserError` if a variable would give all jobs of a sweep the same W&B run or name."""
    for variable in ONE_RUN:
        if os.environ.get(variable):
            raise UserError(f"{variable} is for one run, but a sweep has several: unset it")


def claim_one_run(run_dir: Path) -> None:
    """Raise `UserError` if a variable names a run that another folder of this process has."""
    for variable in ONE_RUN:
        value = os.environ.get(variable)
        first = _claimed.setdefault((variable, value), run_dir.absolute())
        if value and first != run_dir.absolute():
            raise UserError(
                f"{variable}={value} is for one run, which {first} is: unset it for another one"
            )


def check_agent(config: Config, overrides: Sequence[str]) -> None:
    """Raise `UserError` unless the run has the values that a W&B sweep agent chose for it.

    W&B writes them into its record, whatever the run's settings are. The agent passes them as
    arguments by `${args_no_hyphens}`, and always as the file that WANDB_SWEEP_PARAM_PATH names.
    """
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if not path or config.wandb.mode == "disabled":
        return
    try:
        chosen = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        chosen.pop("wandb_version", None)
        values = {key: entry["value"] for key, entry in chosen.items()}
    except Exception as e:  # W&B reports what it cannot read
        raise UserError(f"WANDB_SWEEP_PARAM_PATH={path} cannot be read ({e}): unset it") from None
    settings = {name: (field, value) for name, field, value in iterate_settings(config)}
    for key, value in values.items():
        typed = {f"{key}={value}", f"{key}={quote(str(value))}"}  # also presets, such as optim
        if typed & set(overrides):
            continue
        if key in settings:
            field, current = settings[key]
            if convert_value(key, field, value) == current:
                continue
        raise UserError(
            f"the W&B agent chose {key}={show_value(value)}, which this run does not have as a "
            "setting: end the sweep's command with ${args_no_hyphens}, as wandb_sweep.yaml does, "
            "or set wandb.mode=disabled"
        )
