"""Read runs from any folders to compare them run by run. Does not import torch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cli.config_file import PER_COMMAND
from common.checkpoints import contains_run
from common.errors import UserError
from common.files import exists, is_folder, list_folder
from sweeps.note import JOB
from sweeps.runs import RUN, Run, read_run

# Settings of the machine and of what is recorded, which hardly change the model: listed last.
LAST_SETTINGS = (
    "device",
    "precision",
    "compile",
    "deterministic",
    "log.",
    "eval.",
    "checkpoint.",
    "attention.",
    "wandb.",
)


def read_comparison(paths: Sequence[Path]) -> list[Run]:
    """Read the runs at some paths, with their names and the settings that differ between them.

    A path is the folder of a run, or one that holds runs or sweeps. A run is named by its path
    relative to the deepest folder that contains all of them.
    """
    folders = list(dict.fromkeys(run for path in paths for run in _require_runs(path)))
    parent = os.path.commonpath([folder.parent for folder in folders])
    runs = [read_run(folder) for folder in folders]
    keys = _differing_keys([run.all_settings for run in runs if run.config])
    return [
        replace(
            run,
            settings={RUN: run.path.relative_to(parent).as_posix()}
            | {key: run.all_settings[key] for key in keys if run.config},
        )
        for run in runs
    ]


def _require_runs(path: Path) -> list[Path]:
    runs = _find_runs(Path(os.path.abspath(path)))
    if not runs:
        problem = "holds no run" if exists(path) else "does not exist"
        raise UserError(f"{path} {problem}: give folders of runs, or a folder that holds runs")
    return runs


def _find_runs(folder: Path, depth: int = 2) -> list[Path]:
    """Return the folder if it is that of a run, else the runs in it, including jobs of sweeps."""
    if not is_folder(folder):
        return []
    if contains_run(folder) or exists(folder / JOB):
        return [folder]
    inner = list_folder(folder) if depth else []
    return [run for path in inner for run in _find_runs(path, depth - 1)]


def _differing_keys(values: Sequence[dict[str, str]]) -> list[str]:
    differing = [
        key
        for key in (values[0] if values else ())
        if key not in PER_COMMAND and len({settings[key] for settings in values}) > 1
    ]
    return sorted(differing, key=lambda key: key.startswith(LAST_SETTINGS))
