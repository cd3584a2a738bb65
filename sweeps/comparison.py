"""Read runs from any folders to compare them run by run. Does not import torch."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cli.config_file import PER_COMMAND
from common.checkpoints import contains_run
from common.errors import UserError
from common.files import exists, is_folder, list_folder
from sweeps.runs import JOB_FILE, RUN, Run, read_run


def read_comparison(paths: Sequence[Path]) -> list[Run]:
    """Read the runs at some paths, with their names and the settings that differ between them.

    A path is the folder of a run, or one that holds runs or sweeps. A run is named by its path
    relative to the deepest folder that contains all of them.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        found = _find_runs(Path(os.path.abspath(path)))
        if not found:
            problem = "holds no run" if exists(path) else "does not exist"
            raise UserError(f"{path} {problem}: give folders of runs, or a folder that holds runs")
        folders |= dict.fromkeys(found)
    parent = os.path.commonpath([folder.parent for folder in folders])
    runs = [read_run(folder) for folder in folders]
    trained = [run.all_settings for run in runs if run.config]
    keys = [key for key in (trained[0] if trained else ()) if key not in PER_COMMAND]
    differing = [key for key in keys if len({settings[key] for settings in trained}) > 1]
    return [
        replace(
            run,
            settings={RUN: run.path.relative_to(parent).as_posix()}
            | {key: run.all_settings[key] for key in differing if run.config},
        )
        for run in runs
    ]


def _find_runs(folder: Path, depth: int = 2) -> list[Path]:
    """Return the folder if it is that of a run, else the runs in it, including jobs of sweeps."""
    if not is_folder(folder):
        return []
    if contains_run(folder) or exists(folder / JOB_FILE):
        return [folder]
    inner = list_folder(folder) if depth else []
    return [run for path in inner for run in _find_runs(path, depth - 1)]
