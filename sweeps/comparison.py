"""Read any runs to compare them: their names, and the settings in which they differ."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import UserError
from common.files import exists, is_folder, list_folder
from common.settings import format_settings
from config import Config
from run.config_file import PER_COMMAND
from run.run_dir import RunDir
from sweeps.runs import RUN, Run, read_run

MAX_DEPTH = 2  # of runs below a folder that is compared: in it, or in a sweep in it


def read_comparison(paths: Sequence[Path]) -> list[Run]:
    """Read the runs at some paths, with their names and the settings that differ between them.

    A path is the folder of a run, or one that holds runs or sweeps. A run is named by its path
    relative to the deepest folder that contains all of them.
    """
    folders = _find_all_runs(paths)
    parent = os.path.commonpath([folder.parent for folder in folders])
    runs = [read_run(folder) for folder in folders]
    differing = _find_differing_settings([run.config for run in runs if run.config])
    named = []
    for run in runs:
        settings = {RUN: run.path.relative_to(parent).as_posix()}
        if run.config:
            values = format_settings(run.config)
            settings |= {key: values[key] for key in differing}
        named.append(replace(run, settings=settings))
    return named


def _find_all_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of the runs at some paths, each once.

    Raises:
        UserError: If there is no run at one of the paths.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        at_path = _find_runs(Path(os.path.abspath(path)), MAX_DEPTH)
        if not at_path:
            problem = "holds no run" if exists(path) else "does not exist"
            raise UserError(f"{path} {problem}: give folders of runs, or a folder that holds runs")
        folders |= dict.fromkeys(at_path)
    return list(folders)


def _find_runs(folder: Path, depth: int) -> list[Path]:
    """Return the folder if it is that of a run, else the runs in it, including jobs of sweeps."""
    if not is_folder(folder):
        return []
    run = RunDir(folder)
    if run.has_begun or exists(run.job_file):
        return [folder]
    inner = list_folder(folder) if depth else []
    return [found for path in inner for found in _find_runs(path, depth - 1)]


def _find_differing_settings(configs: Sequence[Config]) -> list[str]:
    """Return the keys of the settings that differ, except those of a command."""
    settings = [format_settings(config) for config in configs]
    return [
        key
        for key in format_settings(Config())
        if key not in PER_COMMAND and len({each[key] for each in settings}) > 1
    ]
